"""The buffer that a weight's gradients are summed up in, where an optimizer keeps one beside it.

The protocol is that of megatron-core's linear layers: who adds to `main_grad` says so, and hands
autograd a gradient that nobody reads. A weight that is used elsewhere as well (tied embeddings)
has `zero_out_wgrad`; what autograd sums up for it is read, so that what it is handed must be 0.
"""

from typing import Any

import torch
from torch import Tensor


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The weight's main_grad, or None where it has none."""
    return getattr(weight, "main_grad", None)


def main_grad_was_added_to(weight: Any) -> Tensor:
    """Say that a gradient is in the weight's main_grad, and make what autograd gets instead.

    Args:
        weight: [V/tp, H], a parameter; its `grad_added_to_main_grad` becomes true.

    Returns:
        [V/tp, H]: zeros for a weight with `zero_out_wgrad`, otherwise not initialised.
    """
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)
