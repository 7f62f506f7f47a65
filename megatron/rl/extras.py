"""Packages that only some runs need: imported where they are used."""

import importlib
from types import ModuleType


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: The module.
        extra: The extra of this distribution that brings its package.
        what: What it is needed for, to be shown.

    Raises:
        ModuleNotFoundError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        fix = f"pip install 'megatron-slime[{extra}]'"
        message = f"{what} needs the extra {extra}: {fix} ({error})"
        raise ModuleNotFoundError(message, name=error.name) from error
