"""Functions of the user's own, named in a config as module:function."""

from collections.abc import Callable
from importlib import import_module


def load_function(path: str) -> Callable[..., object]:
    """Import a function.

    Args:
        path: module:function.

    Returns:
        The function.

    Raises:
        ValueError: The path is of another form, the module cannot be imported, or it has no such
            function.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"path must be module:function: path={path!r}")
    try:
        module = import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"path must name a module that can be imported: path={path!r} "
            f"({type(error).__name__}: {error})"
        ) from error
    function: object = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"path must name a function of its module: path={path!r}")
    return function
