"""Functions that a config names: found by module and name."""

import importlib
from collections.abc import Callable
from typing import Any


def load_function(path: str, field: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        path: "module:function".
        field: The config field that names it, for messages.

    Returns:
        The function.

    Raises:
        ValueError: The path has another form, the module cannot be imported, or it has no such
            function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{field} must be module:function: {field}={path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{field} must name a module that can be imported (is its folder on PYTHONPATH?): "
            f"{field}={path!r}, {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, name):
        raise ValueError(
            f"{field} must name a function of the module, which has no {name!r} "
            f"(spelled as in {module.__file__}?): {field}={path!r}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(
            f"{field} must name a function, not a {type(function).__name__}: {field}={path!r}"
        )
    return function
