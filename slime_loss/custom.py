"""Functions that a config names: found by module and name, and called."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from slime_loss.checked_config import ConfigError, Violation

ARGUMENTS = {
    "custom_loss_function_path": "log_probs, entropy, batch, config, *, cp_group",
    "custom_tis_function_path": ("train_log_probs, rollout_log_probs, batch, config, *, cp_group"),
    "custom_advantage_function_path": "inputs, config",
}
"""What the function of each field is called with; behind the * by keyword."""


def load_function(path: str, field: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        path: "module:function".
        field: The config field that names it, one of ARGUMENTS.

    Returns:
        The function.

    Raises:
        ConfigError: The path has another form, the module cannot be imported, whatever it raises,
            SystemExit included, it has no such function, or the function does not take ARGUMENTS.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise _refused(field, "must be module:function", path)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
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
    if isinstance(function, type):
        raise _refused(field, "must name a function, and this is a class", path)
    if not callable(function):
        kind = type(function).__name__
        raise _refused(field, f"must name a function, and this is of type {kind}", path)
    why_not = _refusal_of_arguments(function, ARGUMENTS[field])
    if why_not:
        rule = f"must name a function of ({ARGUMENTS[field]}), and this refuses them ({why_not})"
        raise _refused(field, rule, path)
    return function


def call_function(path: str, field: str, *positional: Any, **keywords: Any) -> Any:
    """Import a function and call it with these arguments.

    Raises:
        ConfigError: As `load_function` does.
        RuntimeError: The function wants to end the process, which would look like success.
    """
    function = load_function(path, field)
    try:
        return function(*positional, **keywords)
    except SystemExit as error:
        raise RuntimeError(
            f"{field} {path} must return, and not exit: SystemExit.code={error.code!r}"
        ) from error


def _refusal_of_arguments(function: Callable[..., Any], arguments: str) -> str:
    """Why a function cannot be called with ARGUMENTS; empty if it can, or does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C
        return ""
    positional, _, keywords = arguments.partition(", *, ")
    try:
        signature.bind(*positional.split(", "), **dict.fromkeys(keywords.split()))
    except TypeError as error:
        return str(error)
    return ""


def _refused(field: str, rule: str, path: str) -> ConfigError:
    fix = "write module:function; python must find the module (PYTHONPATH)"
    return ConfigError([Violation(field, rule, path, fix)])
