"""Log-probs and entropy one token and one column at a time, and what measures an implementation.

Gradients come from autograd through the loops.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from slime_loss import KeptIds

EXACT = {"rtol": 0.0, "atol": 1e-12}
LABELS = torch.tensor([3, -100, 0, 6, -100, 2, 2])
"""Labels of seven rows over seven or more columns, two of them without one."""


def log_softmax(values: list[Tensor]) -> list[Tensor]:
    top = max(value.item() for value in values)
    total = sum((torch.exp(value - top) for value in values), torch.zeros_like(values[0]))
    return [(value - top) - torch.log(total) for value in values]


def entropy_of(values: list[Tensor]) -> Tensor:
    entropy = torch.zeros_like(values[0])
    for log_p in log_softmax(values):
        if log_p.item() > float("-inf"):
            entropy = entropy - torch.exp(log_p) * log_p
    return entropy


def log_probs_of_rows(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    keep_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log_probs and entropy [T], row after row."""
    log_probs, entropies = [], []
    for row, label in enumerate(labels.tolist()):
        if label == -100:
            log_probs.append(logits.new_zeros(()))
            entropies.append(logits.new_zeros(()))
            continue
        divisor = temperature if isinstance(temperature, float) else temperature[row].item()
        columns = range(logits.shape[1] if vocab_size is None else vocab_size)
        scaled = {column: logits[row, column] / divisor for column in columns}
        kept = [
            column
            for column in columns
            if keep_mask is None or column == label or bool(keep_mask[row, column])
        ]
        kept_log_probs = log_softmax([scaled[column] for column in kept])
        log_probs.append(kept_log_probs[kept.index(label)])
        entropies.append(entropy_of(list(scaled.values())))
    if not log_probs:
        return logits.new_zeros(0), logits.new_zeros(0)
    return torch.stack(log_probs), torch.stack(entropies)


def plain(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, keep_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What one writes in torch, with [T, V] tensors, in the dtype of the logits."""
    full = (logits / temperature).log_softmax(-1)
    kept = logits / temperature
    if keep_mask is not None:
        own = torch.nn.functional.one_hot(labels.clamp_min(0), logits.shape[1]).bool()
        kept = kept.masked_fill(~(keep_mask | own), -torch.inf)
    log_probs = kept.log_softmax(-1).gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1)
    entropy = torch.special.entr(full.exp()).sum(-1)
    return torch.where(labels >= 0, log_probs, 0), torch.where(labels >= 0, entropy, 0)


class LargestResult(TorchDispatchMode):
    """Remembers the most elements any operation's result had, and how often each one ran."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.matmul_rows: list[int] = []

    def __torch_dispatch__(  # noqa: ANN204
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and makes_memory(func):
                self.numel = max(self.numel, tensor.numel())
        if func.overloadpacket in (torch.ops.aten.addmm_, torch.ops.aten.mm):
            self.matmul_rows.append(result.shape[0])
        return result


def makes_memory(func: Any) -> bool:
    return all(returned.alias_info is None for returned in func._schema.returns)


@contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    """The tensors that autograd is given to keep."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory that torch held during a call beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def random_logits(num_columns: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(LABELS), num_columns, generator=generator, dtype=torch.float64)
    return logits.requires_grad_()


def kept_ids_of(mask: Tensor) -> KeptIds:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    return KeptIds(mask.nonzero()[:, 1].contiguous(), offsets)


def random_mask(num_columns: int = 7) -> Tensor:
    mask = torch.rand(len(LABELS), num_columns, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[0] = False
    return mask


def weighted(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
    weights = torch.linspace(0.5, -2.0, log_probs.shape[0], dtype=log_probs.dtype)
    if entropy is None or not entropy.requires_grad:
        return (weights * log_probs).sum()
    return (weights * log_probs).sum() + (weights.flip(0) * entropy).sum()
