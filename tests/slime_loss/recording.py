"""Which collectives a call makes, in order, with the shapes it gives them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from slime_loss import (
    collectives,
    head_call,
    layout,
    metrics,
    vocab_softmax,
)

MODULES = (collectives, head_call, layout, metrics, vocab_softmax)
NAMES = ("all_gather_rows", "reduce_scatter_rows", "all_reduce_sum_")

Call = tuple[str, tuple[int, ...]]


@contextmanager
def recorded_collectives() -> Iterator[list[Call]]:
    """Collectives of slime_loss inside the block, which still communicate."""
    calls: list[Call] = []
    originals = {name: getattr(collectives, name) for name in NAMES}

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(tensor: Tensor, group: Any) -> Any:
            calls.append((name, tuple(tensor.shape)))
            return original(tensor, group)

        return record

    with ExitStack() as stack:
        for module in MODULES:
            for name in NAMES:
                if hasattr(module, name):
                    original = originals[name]
                    stack.enter_context(patch.object(module, name, recording(name, original)))
        yield calls
