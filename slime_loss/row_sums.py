"""The two passes over [rows, columns] logits, and the merge of what several ranks found in them.

u = logits / temperature. Written so that -inf gives exactly 0 where it should, and NaN only where
a row has nothing else. On a CPU a few rows at a time, so that all steps find them in the cache.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from slime_loss import kernels

# Stands in for -inf where that would meet a factor 0: its exp is 0 too, and the product is no NaN.
_FLOOR = -1e20

# Of one temporary. A CPU holds three in its level 2 cache; a GPU wants enough to be busy with.
_CPU_BLOCK_BYTES, _GPU_BLOCK_BYTES = 512 * 2**10, 64 * 2**20

Temperature = float | Float[Tensor, " rows"]


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


class GradientTerms(NamedTuple):
    """What the gradient of rows of logits is made of, one number a row.

    It is e^t (constant + slope t) + onehot(label) at_label, with t = u - maximum.

    Attributes:
        label_columns: [c], the column of the row's label; -1 where it is not among them.
        temperature: Divides the logits: a number, or one per row.
        maximum: [c], of the whole row.
        constant: [c].
        slope: [c]; None for 0.
        at_label: [c].
    """

    label_columns: Tensor
    temperature: Temperature
    maximum: Tensor
    constant: Tensor
    slope: Tensor | None
    at_label: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to compute and accumulate in for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cache_bytes(tensor: Tensor) -> int:
    """How large a temporary should be at most, unless one row is larger."""
    return _GPU_BLOCK_BYTES if tensor.is_cuda else _CPU_BLOCK_BYTES


def row_blocks(logits: Float[Tensor, "rows columns"]) -> list[slice]:
    """Slices of the rows whose temporaries are small enough to work on at a time."""
    num_rows, num_columns = logits.shape
    row_bytes = max(num_columns, 1) * compute_dtype(logits.dtype).itemsize
    rows = max(cache_bytes(logits) // row_bytes, 1)
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def row_statistics(
    logits: Float[Tensor, "rows columns"],
    label_columns: Int64[Tensor, " rows"],
    temperature: Temperature,
    *,
    with_moment: bool,
) -> Float[Tensor, "rows numbers"]:
    """The numbers of each row that log-prob and entropy are made of.

    Args:
        logits: [c, V]; not changed.
        label_columns: [c], the column of the row's label; -1 where it is not among them.
        temperature: Divides the logits: a number, or one per row.
        with_moment: Whether the moment is asked for.

    Returns:
        [c, 3 or 4], float32 (float64 for such logits): u of the label or 0, maximum, total and,
        if asked for, moment, as `RowSums` has them. Of no column: 0, the lowest number, 0, 0.
    """
    if kernels.is_supported(logits):
        return kernels.row_statistics(logits, label_columns, temperature, with_moment=with_moment)
    dtype = compute_dtype(logits.dtype)
    numbers = logits.new_zeros((4 if with_moment else 3, logits.shape[0]), dtype=dtype)
    numbers[1] = torch.finfo(dtype).min
    if logits.numel() == 0:
        return numbers.t()
    at_label = logits.gather(1, label_columns.clamp_min(0).unsqueeze(1)).to(dtype)
    at_label = _over_temperature(at_label, temperature).squeeze(1)
    numbers[0] = torch.where(label_columns >= 0, at_label, 0.0)
    blocks = row_blocks(logits)
    room = [torch.empty_like(logits[blocks[0]], dtype=dtype) for _ in range(2)]
    for block in blocks:
        scaled = _over_temperature(logits[block].to(dtype), _of_rows(temperature, block))
        shifted, weights = (one[: scaled.shape[0]] for one in room)
        _sum_columns(scaled, shifted, weights, numbers[1:, block])
    return numbers.t()


def _sum_columns(scaled: Tensor, shifted: Tensor, weights: Tensor, sums: Tensor) -> None:
    """Write maximum, total and, if there is a third, moment of the rows of u into `sums`.

    Args:
        scaled: [r, V], u.
        shifted: [r, V], room to work in.
        weights: [r, V], room to work in.
        sums: [2 or 3, r], the result.
    """
    maximum, total, *moment = sums.unbind()
    # Finite even where every column is -inf, so that differences with it are no NaN.
    torch.amax(scaled, 1, out=maximum).clamp_min_(torch.finfo(sums.dtype).min)
    torch.sub(scaled, maximum.unsqueeze(1), out=shifted)
    torch.sum(torch.exp(shifted, out=weights), 1, out=total)
    for one in moment:
        torch.sum(weights.mul_(shifted), 1, out=one)
        if one.isnan().any():
            weights = torch.exp(shifted.clamp_min_(_FLOOR), out=weights)
            torch.sum(weights.mul_(shifted), 1, out=one)


def form_gradient_(
    out: Float[Tensor, "rows columns"],
    logits: Float[Tensor, "all_rows columns"],
    chosen: Int64[Tensor, " rows"],
    terms: GradientTerms,
) -> None:
    """Write the gradients of chosen rows of logits.

    Args:
        out: [c, V], float32 or float64; may begin where `logits` does.
        logits: [C, V], of out's dtype.
        chosen: [c], rows of `logits`, rising.
        terms: What the gradients of these rows are made of.
    """
    if out.numel() == 0:
        return
    is_in_place = out.data_ptr() == logits.data_ptr() and out.shape == logits.shape
    if kernels.is_supported(out):
        if not is_in_place:
            _move_rows(logits, chosen, out)
        kernels.logits_gradient_(out, *terms)
        return
    for block in row_blocks(out):
        rows = out[block] if is_in_place else logits.index_select(0, chosen[block])
        _form_rows(rows, block, terms, out[block])
    columns, value = terms.label_columns, torch.where(terms.label_columns >= 0, terms.at_label, 0.0)
    out.scatter_add_(1, columns.clamp_min(0).unsqueeze(1), value.unsqueeze(1))


def _move_rows(logits: Tensor, chosen: Tensor, out: Tensor) -> None:
    for block in row_blocks(out):
        out[block] = logits.index_select(0, chosen[block])


def _form_rows(rows: Tensor, block: slice, terms: GradientTerms, out: Tensor) -> None:
    """Gradient of the rows, but for the label's part; changes them on the way."""
    if isinstance(terms.temperature, Tensor):
        rows.div_(terms.temperature[block, None])
    elif terms.temperature != 1:
        rows.div_(terms.temperature)
    rows.sub_(terms.maximum[block, None])
    constant = terms.constant[block, None]
    if terms.slope is None:
        torch.mul(rows.exp_(), constant, out=out)
        return
    weights = rows.clamp_min_(_FLOOR).exp()
    rows.mul_(terms.slope[block, None]).add_(constant)
    torch.mul(rows, weights, out=out)


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


def _of_rows(temperature: Temperature, rows: slice) -> Temperature:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _over_temperature(values: Tensor, temperature: Temperature) -> Tensor:
    """[c, ...] values divided by the temperature of their rows; may be the argument itself."""
    if isinstance(temperature, Tensor):
        return values / temperature.unsqueeze(1)
    return values if temperature == 1 else values / temperature
