"""Metrics that know how they reduce: a mean stays sum over count, a maximum stays a maximum.

A metric that no token contributed to is NaN; a NaN that a token contributed makes it NaN as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor, distributed
from torch.nn import functional


class Reduction(Enum):
    """How the parts of a metric, of micro-batches and of ranks, become one number."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class Metric:
    """One part of a metric, of one micro-batch of one rank.

    Attributes:
        value: [], float64. MEAN: the weighted sum, sum w*x; SUM: the sum; MIN, MAX: the extreme,
            +inf or -inf when nothing contributed.
        count: [], float64. MEAN: the weight, sum w; otherwise the number of contributions.
        reduction: How parts are put together.
    """

    value: Float[Tensor, ""]
    count: Float[Tensor, ""]
    reduction: Reduction


Metrics = dict[str, Metric]
Groups = distributed.ProcessGroup | Sequence[distributed.ProcessGroup] | None


@dataclass(frozen=True)
class TokenMetrics:
    """Makes metrics of [T] streams of which only the masked-in entries count.

    Attributes:
        mask: [T], true where an entry counts.
        weight: [T], the entries' weights in a mean.
    """

    mask: Bool[Tensor, " tokens"]
    weight: Float[Tensor, " tokens"]

    def mean(self, stream: Tensor) -> Metric:
        """The weighted mean of a float or bool stream; of a bool one, the weighted share."""
        weight = self._masked(self.weight, 0.0)
        return Metric((weight * self._masked(stream, 0.0)).sum(), weight.sum(), Reduction.MEAN)

    def weighted_sum(self, stream: Tensor) -> Metric:
        """The sum of weight * stream: a part of a loss."""
        value = (self._masked(self.weight, 0.0) * self._masked(stream, 0.0)).sum()
        return Metric(value, self._count(), Reduction.SUM)

    def min(self, stream: Tensor) -> Metric:
        """The smallest entry."""
        extreme = functional.pad(self._masked(stream, torch.inf), (0, 1), value=torch.inf).amin()
        return Metric(extreme, self._count(), Reduction.MIN)

    def max(self, stream: Tensor) -> Metric:
        """The largest entry."""
        extreme = functional.pad(self._masked(stream, -torch.inf), (0, 1), value=-torch.inf).amax()
        return Metric(extreme, self._count(), Reduction.MAX)

    def count(self) -> Metric:
        """The number of entries that count."""
        return Metric(self._count(), self._count(), Reduction.SUM)

    def _count(self) -> Tensor:
        return self.mask.sum(dtype=torch.float64)

    def _masked(self, stream: Tensor, fill: float) -> Tensor:
        return torch.where(self.mask, stream.detach().double(), fill)


def merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Put together the metrics of several micro-batches of one rank.

    Args:
        parts: Metrics with the same names and reductions.

    Returns:
        Metrics of those names.

    Raises:
        ValueError: The parts differ in a name or a reduction.
    """
    if not parts:
        return {}
    for index, part in enumerate(parts):
        if _declaration(part) != _declaration(parts[0]):
            raise ValueError(
                f"parts must have the same metrics: parts[{index}]={_declaration(part)}, "
                f"parts[0]={_declaration(parts[0])}"
            )
    return {name: _merge([part[name] for part in parts]) for name in parts[0]}


def reduce_metrics(metrics: Metrics, group: Groups = None) -> dict[str, float]:
    """Reduce every metric over the ranks, each by its own reduction.

    One SUM and one MAX all-reduce per group, whatever the number of metrics.

    Args:
        metrics: This rank's metrics; every rank has the same names and reductions.
        group: The ranks that hold different tokens (data and context parallel, not tensor
            parallel); several groups are reduced over one after the other; None is one process.

    Returns:
        name -> value, in the order of `metrics`. NaN where no token of any rank contributed.
    """
    if not metrics:
        return {}
    names = sorted(metrics)
    reductions = [metrics[name].reduction for name in names]
    value = torch.stack([metrics[name].value.detach().double() for name in names])
    count = torch.stack([metrics[name].count.detach().double() for name in names])
    # A minimum travels as the maximum of the opposite. A backend's MAX may lose a NaN, so a flag
    # travels beside each extreme.
    sign = value.new_tensor([_SIGN.get(reduction, 0.0) for reduction in reductions])
    extreme = sign != 0
    sums = torch.stack([torch.where(extreme, 0.0, value), count])
    maxima = torch.stack(
        [torch.where(extreme, sign * value, -torch.inf), (extreme & value.isnan()).double()]
    )
    for one_group in _as_groups(group):
        distributed.all_reduce(sums, distributed.ReduceOp.SUM, group=one_group)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=one_group)
    total, count = sums.unbind()
    hidden = (maxima[1] > 0) | (count == 0)
    peak = torch.where(hidden, torch.nan, sign * maxima[0])
    mean = torch.tensor([reduction is Reduction.MEAN for reduction in reductions])
    total = torch.where(mean.to(total.device), total / count, total)
    reduced = dict(zip(names, torch.where(extreme, peak, total).tolist(), strict=True))
    return {name: reduced[name] for name in metrics}


_SIGN = {Reduction.MIN: -1.0, Reduction.MAX: 1.0}

_MERGE: dict[Reduction, Callable[[Tensor], Tensor]] = {
    Reduction.MEAN: torch.sum,
    Reduction.SUM: torch.sum,
    Reduction.MIN: torch.amin,
    Reduction.MAX: torch.amax,
}


def _merge(parts: Sequence[Metric]) -> Metric:
    reduction = parts[0].reduction
    return Metric(
        _MERGE[reduction](torch.stack([part.value for part in parts])),
        torch.stack([part.count for part in parts]).sum(),
        reduction,
    )


def _declaration(metrics: Metrics) -> dict[str, str]:
    return {name: metric.reduction.value for name, metric in metrics.items()}


def _as_groups(group: Groups) -> Sequence[distributed.ProcessGroup]:
    if group is None:
        return ()
    return (group,) if isinstance(group, distributed.ProcessGroup) else group
