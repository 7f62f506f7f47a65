"""Metrics that know how they reduce: a mean stays sum over count, a maximum stays a maximum.

A NaN that a token contributed makes a metric NaN. So does the lack of any token, except for a
sum, which is then 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from slime_loss.collectives import all_gather_rows
from slime_loss.reductions import (
    ESS,
    EXPLAINED_VARIANCE,
    MAX,
    MEAN,
    MIN,
    STD,
    SUM,
    Histogram,
    Reduction,
    histogram_over,
)


@dataclass(frozen=True)
class Metric:
    """One part of a metric, of one micro-batch of one rank.

    Attributes:
        value: [k], float64, what the reduction keeps of the part.
        reduction: How parts are put together.
    """

    value: Float[Tensor, " k"]
    reduction: Reduction

    def __post_init__(self) -> None:
        """Check that the value is one of the reduction's vectors."""
        if self.value.shape != (self.reduction.size,) or self.value.dtype != torch.float64:
            raise ValueError(
                f"value must be [{self.reduction.size}] float64 for {self.reduction}: "
                f"value.shape={tuple(self.value.shape)}, value.dtype={self.value.dtype}"
            )


Metrics = dict[str, Metric]
Groups = ProcessGroup | Sequence[ProcessGroup] | None


@dataclass(frozen=True)
class ReducedMetrics:
    """The metrics of a step, the same on every rank.

    Attributes:
        scalars: name -> number.
        histograms: name -> histogram, of other names.
    """

    scalars: dict[str, float]
    histograms: dict[str, Histogram]


@dataclass(frozen=True)
class TokenMetrics:
    """Makes metrics of [T] streams of which only the masked-in entries count.

    Attributes:
        mask: [T], true where an entry counts.
        weight: [T], the entries' weights in a mean; everything else counts each entry once.
    """

    mask: Bool[Tensor, " tokens"]
    weight: Float[Tensor, " tokens"]

    def mean(self, stream: Tensor) -> Metric:
        """The weighted mean of a float or bool stream; of a bool one, the weighted share."""
        weight = self._masked(self.weight, 0.0)
        return _metric(MEAN, (weight * self._masked(stream, 0.0)).sum(), weight.sum())

    def weighted_sum(self, stream: Tensor) -> Metric:
        """The sum of weight * stream: a part of a loss."""
        products = self._masked(self.weight, 0.0) * self._masked(stream, 0.0)
        return _metric(SUM, products.sum())

    def min(self, stream: Tensor) -> Metric:
        """The smallest entry."""
        return _metric(MIN, self._extreme(stream, -1.0), self._count())

    def max(self, stream: Tensor) -> Metric:
        """The largest entry."""
        return _metric(MAX, self._extreme(stream, 1.0), self._count())

    def std(self, stream: Tensor) -> Metric:
        """The sample standard deviation of the entries."""
        return _metric(STD, self._count(), *self._moments(stream))

    def effective_sample_size(self, weights: Tensor) -> Metric:
        """The effective sample size of importance weights, as a share of the entries."""
        entries = self._masked(weights, 0.0)
        squares = entries.square().sum()
        return _metric(ESS, self._count(), entries.sum(), squares)

    def explained_variance(self, predictions: Tensor, targets: Tensor) -> Metric:
        """How much of the targets' variance the predictions explain."""
        errors = self._masked(targets, 0.0) - self._masked(predictions, 0.0)
        moments = (*self._moments(targets), *self._moments(errors))
        return _metric(EXPLAINED_VARIANCE, self._count(), *moments)

    def histogram(self, stream: Tensor, edges: tuple[float, ...]) -> Metric:
        """How the entries are distributed over the buckets between growing edges."""
        entries = self._masked(stream, 0.0)
        bucket = torch.bucketize(entries, entries.new_tensor(edges))
        counts = entries.new_zeros(len(edges) + 1).index_add_(0, bucket, self.mask.double())
        extremes = (self._extreme(stream, sign) for sign in (-1.0, 1.0))
        return _metric(
            histogram_over(edges), *extremes, entries.sum(), entries.square().sum(), *counts
        )

    def count(self) -> Metric:
        """The number of entries that count."""
        return _metric(SUM, self._count())

    def _count(self) -> Tensor:
        return self.mask.sum(dtype=torch.float64)

    def _masked(self, stream: Tensor, fill: float) -> Tensor:
        return torch.where(self.mask, stream.detach().double(), fill)

    def _extreme(self, stream: Tensor, sign: float) -> Tensor:
        """The largest entry of sign * stream, times the sign; an empty stream has a last one."""
        entries = sign * self._masked(stream, -sign * torch.inf)
        return sign * functional.pad(entries, (0, 1), value=-torch.inf).amax()

    def _moments(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and sum of squared deviations, both 0 where no entry counts."""
        entries = self._masked(stream, 0.0)
        mean = entries.sum() / self._count().clamp(min=1.0)
        return mean, torch.where(self.mask, entries - mean, 0.0).square().sum()


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
    declaration = _declaration(parts[0])
    for index, part in enumerate(parts):
        if _declaration(part) != declaration:
            raise ValueError(
                f"parts must have the same metrics: parts[{index}]={_declaration(part)}, "
                f"parts[0]={declaration}"
            )
    names = list(declaration)
    merged = _merge(torch.stack([_vector(part, names) for part in parts]), declaration)
    values = _cut(merged, declaration)
    return {
        name: Metric(value, reduction)
        for (name, reduction), value in zip(declaration.items(), values, strict=True)
    }


def reduce_metrics(metrics: Metrics, group: Groups = None) -> ReducedMetrics:
    """Reduce every metric over the ranks, each by its own reduction.

    One all-gather per group, whatever the number of metrics. The ranks' parts are merged in rank
    order, as `merge_metrics` merges those of micro-batches, so all ranks have the same bits.

    Args:
        metrics: This rank's metrics; every rank has the same names and reductions.
        group: The ranks that hold different tokens (data and context parallel, not tensor
            parallel); several groups are reduced over one after the other; None is one process.

    Returns:
        The numbers, in the order of `metrics`. NaN where no token of any rank contributed, but 0
        for a sum.
    """
    if not metrics:
        return ReducedMetrics({}, {})
    names = sorted(metrics)
    declaration = {name: metrics[name].reduction for name in names}
    vector = _vector(metrics, names)
    for one_group in _as_groups(group):
        vector = _merge(all_gather_rows(vector.unsqueeze(0), one_group), declaration)
    numbers = dict(zip(names, _cut(vector.cpu(), declaration), strict=True))
    finished = {
        name: metric.reduction.finish(numbers[name].tolist()) for name, metric in metrics.items()
    }
    scalars = {name: value for name, value in finished.items() if isinstance(value, float)}
    histograms = {name: value for name, value in finished.items() if isinstance(value, Histogram)}
    return ReducedMetrics(scalars, histograms)


Declaration = dict[str, Reduction]


def _metric(reduction: Reduction, *numbers: Tensor) -> Metric:
    """A metric of numbers and vectors, laid end to end."""
    flat = torch.cat([number.reshape(-1) for number in numbers])
    return Metric(flat.detach().double(), reduction)


def _declaration(metrics: Metrics) -> Declaration:
    return {name: metric.reduction for name, metric in metrics.items()}


def _vector(metrics: Metrics, names: Sequence[str]) -> Tensor:
    """The parts' vectors, one after the other."""
    return torch.cat([metrics[name].value for name in names])


def _cut(vectors: Tensor, declaration: Declaration) -> Sequence[Tensor]:
    """The inverse of `_vector`, along the last dimension."""
    return vectors.split([reduction.size for reduction in declaration.values()], dim=-1)


def _merge(
    table: Float[Tensor, "parts numbers"], declaration: Declaration
) -> Float[Tensor, " numbers"]:
    """Merge each metric's columns: on the host, since the steps are many and small."""
    parts = _cut(table.cpu(), declaration)
    merged = [
        reduction.merge(part) for reduction, part in zip(declaration.values(), parts, strict=True)
    ]
    return torch.cat(merged).to(table.device)


def _as_groups(group: Groups) -> Sequence[ProcessGroup]:
    if group is None:
        return ()
    return (group,) if isinstance(group, ProcessGroup) else group
