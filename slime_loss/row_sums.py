"""Sums over the columns of a row of logits, and their merge: the passes over [rows, columns].

Written so that -inf gives exactly 0 where it should, and NaN only where a row has nothing else.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Stands in for -inf where that would meet a factor 0: its exp is 0 too, and the product is no NaN.
_FLOOR = -1e20


class RowSums(NamedTuple):
    """Of a row's columns u, relative to the largest of them; [rows] each.

    Attributes:
        maximum: max u; the lowest finite number where every u is -inf.
        total: sum e^(u - max).
        moment: sum e^(u - max) (u - max), if asked for.
    """

    maximum: Tensor
    total: Tensor
    moment: Tensor | None = None


def reduce_columns(
    scaled: Float[Tensor, "rows columns"], *, with_moment: bool
) -> list[Float[Tensor, " rows"]]:
    """The row sums of these columns, those of an empty set where there is none.

    Args:
        scaled: [c, V], the columns; not changed.
        with_moment: Whether the moment is asked for.

    Returns:
        maximum, total and, if asked for, moment.
    """
    lowest = torch.finfo(scaled.dtype).min
    if scaled.shape[1] == 0:
        zero = scaled.new_zeros(scaled.shape[0])
        return [zero + lowest, zero, zero] if with_moment else [zero + lowest, zero]
    # Finite even where every column is -inf, so that differences with it are no NaN.
    maximum = scaled.amax(1).clamp_min(lowest)
    shifted = scaled - maximum.unsqueeze(1)
    if not with_moment:
        return [maximum, shifted.exp_().sum(1)]
    weights = shifted.exp()
    return [maximum, weights.sum(1), weights.mul_(shifted.clamp_min_(_FLOOR)).sum(1)]


def merge_ranks(
    maximum: Float[Tensor, "ranks rows"],
    total: Float[Tensor, "ranks rows"],
    moment: Float[Tensor, "ranks rows"] | None = None,
) -> RowSums:
    """The row sums over all ranks' columns, from those of each rank; always in rank order."""
    top = maximum.amax(0)
    gap = (maximum - top).clamp_min(_FLOOR)
    weight = gap.exp()
    if moment is not None:
        moment = ((moment + gap * total) * weight).sum(0)
    return RowSums(top, (total * weight).sum(0), moment)


def weighted_exp(
    scaled: Float[Tensor, "rows columns"],
    maximum: Float[Tensor, "rows 1"],
    constant: Float[Tensor, "rows 1"],
    slope: Float[Tensor, "rows 1"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """e^t (constant + slope t) with t = u - max, as a new tensor; `scaled` is not changed."""
    shifted = scaled - maximum
    if slope is None:
        return shifted.exp_().mul_(constant)
    weights = shifted.exp()
    return weights.mul_(shifted.clamp_min_(_FLOOR).mul_(slope).add_(constant))
