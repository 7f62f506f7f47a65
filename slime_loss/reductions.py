"""How the parts of a metric, of micro-batches and of ranks, become one number.

A reduction is a vector of numbers that parts are summarised in, a merge of such vectors, and the
final number. Deviations are merged with their means: T. F. Chan et al., "Updating formulae and a
pairwise algorithm for computing sample variances", 1979.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Histogram:
    """How a stream is distributed over fixed buckets.

    Bucket i holds the entries in (edges[i - 1], edges[i]]; the first has no lower edge and the
    last no upper one. A NaN among the entries is counted in the last bucket, and shows in minimum,
    maximum and sums.

    Attributes:
        edges: The inner edges, growing.
        counts: Entries in each bucket, one more than there are edges.
        minimum: The smallest entry; NaN without any.
        maximum: The largest entry; NaN without any.
        total: The sum of the entries.
        sum_of_squares: The sum of their squares.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    minimum: float
    maximum: float
    total: float
    sum_of_squares: float

    @property
    def num_entries(self) -> float:
        """The number of entries."""
        return sum(self.counts)

    @property
    def bucket_limits(self) -> tuple[float, ...]:
        """The upper limit of each bucket, as TensorBoard's add_histogram_raw takes them."""
        last = self.edges[-1]
        return (*self.edges, self.maximum if self.maximum > last else last)


@dataclass(frozen=True)
class Reduction:
    """How a metric is put together. Two of one name and the same edges are equal.

    Attributes:
        name: What it makes of the entries.
        size: The length k of the vector that is kept of a part.
        merge: [parts, k], at least one part, to [k]; a NaN in any of them is kept.
        finish: The k numbers to what is shown.
        edges: The inner edges of a histogram's buckets, growing; empty for a number.
    """

    name: str
    size: int
    merge: Callable[[Tensor], Tensor] = field(compare=False, repr=False)
    finish: Callable[[list[float]], float | Histogram] = field(compare=False, repr=False)
    edges: tuple[float, ...] = ()


def _add(parts: Tensor) -> Tensor:
    return parts.sum(0)


def _smallest(parts: Tensor) -> Tensor:
    return torch.stack([parts[:, 0].amin(), parts[:, 1].sum()])


def _largest(parts: Tensor) -> Tensor:
    return torch.stack([parts[:, 0].amax(), parts[:, 1].sum()])


def _merge_deviations(parts: Tensor) -> Tensor:
    return torch.stack(_moments(*parts.unbind(1)))


def _merge_errors(parts: Tensor) -> Tensor:
    count, mean, squares, error_mean, error_squares = parts.unbind(1)
    errors = _moments(count, error_mean, error_squares)
    return torch.stack([*_moments(count, mean, squares), *errors[1:]])


def _merge_buckets(parts: Tensor) -> Tensor:
    extremes = torch.stack([parts[:, 0].amin(), parts[:, 1].amax()])
    return torch.cat([extremes, parts[:, 2:].sum(0)])


def _moments(counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of all parts: [parts] each to [] each."""
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1.0)
    return count, mean, (squares + counts * (means - mean).square()).sum()


def _total(part: list[float]) -> float:
    return part[0]


def _extreme(part: list[float]) -> float:
    return part[0] if part[1] else math.nan


def _ratio(part: list[float]) -> float:
    return part[0] / part[1] if part[1] else math.nan


def _deviation(part: list[float]) -> float:
    count, _, squares = part
    return math.sqrt(squares / max(count - 1, 1.0)) if count else math.nan


def _sample_size(part: list[float]) -> float:
    count, total, squares = part
    return 0.0 if count and squares == 0 else _ratio([total * total, count * squares])


def _explained(part: list[float]) -> float:
    return 1.0 - _ratio([part[4], part[2]])


def _histogram(edges: tuple[float, ...], part: list[float]) -> Histogram:
    smallest, largest, total, squares, *counts = part
    if not any(counts):
        smallest = largest = math.nan
    return Histogram(edges, tuple(counts), smallest, largest, total, squares)


SUM = Reduction("sum", 1, _add, _total)
"""[sum]: the sum; 0 where nothing contributed."""

MEAN = Reduction("mean", 2, _add, _ratio)
"""[sum of w x, sum of w]: the weighted mean; NaN where nothing contributed."""

MIN = Reduction("min", 2, _smallest, _extreme)
"""[smallest, number of entries]: the smallest; NaN where nothing contributed."""

MAX = Reduction("max", 2, _largest, _extreme)
"""[largest, number of entries]: the largest; NaN where nothing contributed."""

STD = Reduction("std", 3, _merge_deviations, _deviation)
"""[n, mean, sum of squared deviations]: the sample standard deviation (n - 1), every entry counting
once. 0 for a single entry, NaN where nothing contributed."""

ESS = Reduction("ess", 3, _add, _sample_size)
"""[n, sum of w, sum of w^2]: (sum w)^2 / (n sum w^2) of n weights, in (0, 1]: the effective sample
size as a share. 1 where all weights are equal, 0 where all are 0, NaN where nothing contributed."""

EXPLAINED_VARIANCE = Reduction("explained_variance", 5, _merge_errors, _explained)
"""[n, mean and sum of squared deviations of the targets, the same two of the errors]:
1 - variance(error) / variance(target), every entry counting once. 1 for a perfect prediction, 0 for
a constant one, negative for worse; NaN where all targets are equal or nothing contributed."""


def histogram_over(edges: tuple[float, ...]) -> Reduction:
    """[smallest, largest, sum, sum of squares, count of each bucket]: a `Histogram`.

    Args:
        edges: The inner edges of the buckets, growing, at least one.
    """
    return Reduction("histogram", 5 + len(edges), _merge_buckets, partial(_histogram, edges), edges)
