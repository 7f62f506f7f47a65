"""What dotted names stand for, before and after something happened."""

import importlib
import logging
import pkgutil
from typing import Any


def values(targets: list[str]) -> list[Any]:
    """What each "module.attribute" or "logger:name.attribute" is now."""

    def value(target: str) -> Any:
        path, _, name = target.rpartition(".")
        if path.startswith("logger:"):
            return getattr(logging.getLogger(path.removeprefix("logger:")), name)
        return getattr(pkgutil.resolve_name(path), name, "absent")

    return [value(target) for target in targets]


def changed_by_import(rank: int, module: str, targets: list[str]) -> list[str]:
    """The targets that are something else after the import; this module must not import it."""
    before = values(targets)
    importlib.import_module(module)
    after = values(targets)
    return [t for t, a, b in zip(targets, before, after, strict=True) if a is not b]
