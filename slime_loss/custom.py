"""Functions that a config names: found by module and name."""

import importlib
from collections.abc import Callable
from typing import Any

from slime_loss.checked_config import ConfigError, Violation


def load_function(path: str, field: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        path: "module:function".
        field: The config field that names it, for messages.

    Returns:
        The function.

    Raises:
        ConfigError: The path has another form, the module cannot be imported, whatever it raises,
            or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise _refused(field, "must be module:function", path)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        why = f"{type(error).__name__}: {error}"
        rule = f"must name a module that can be imported ({why})"
        raise _refused(field, rule, path) from error
    if not hasattr(module, name):
        rule = (
            f"must name a function of the module, which has no {name!r} "
            f"(spelled as in {module.__file__}?)"
        )
        raise _refused(field, rule, path)
    function = getattr(module, name)
    if not callable(function):
        raise _refused(field, f"must name a function, not a {type(function).__name__}", path)
    return function


def _refused(field: str, rule: str, path: str) -> ConfigError:
    fix = "write module:function; python must find the module (PYTHONPATH)"
    return ConfigError([Violation(field, rule, path, fix)])
