"""What the functions with a gradient of their own share."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

AutogradContext = Any
"""What autograd hands to forward and backward: an object that takes any attribute."""


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose result has no gradient, and that says so where one is asked for.

    torch's decorator of this purpose is silent where the gradient that comes in needs none.

    Raises:
        RuntimeError: The backward runs with create_graph=True.
    """

    @wraps(backward)
    def checked(ctx: AutogradContext, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient of slime_loss must not be differentiated again: create_graph=True"
            )
        return backward(ctx, *gradients)

    return checked
