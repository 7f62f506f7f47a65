"""The two passes over [rows, columns] logits as Triton kernels, each touching a logit once.

Needs triton. Statistics: one program a row, which rescales its sums when it meets a larger logit
(Milakov and Gimelshein, "Online normalizer calculation for softmax", algorithm 3). Gradient: one
program a block of a row. Nothing is tuned or accumulated across programs: the same bits each time.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton import knobs  # pyright: ignore[reportMissingImports]

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# Stands in for -inf where that would meet a factor 0: its exp is 0 too, and the product is no NaN.
_FLOOR = tl.constexpr(-1e20)

IS_INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels below run as Python on the CPU: TRITON_INTERPRET=1 when this is imported."""

_MAX_BLOCK = 4096
_COLUMNS_PER_WARP = 512


def _kernel(function: Callable[..., Any]) -> Any:
    """What triton makes of a function: launched as f[grid](...), or called by another kernel."""
    return triton.jit(function)


@_kernel
@no_type_check
def _row_start(pointer: "Any", row: "Any", stride: "Any") -> Any:
    # Rows x columns of logits pass 2^31 easily, and 32-bit products would wrap around.
    return pointer + row.to(tl.int64) * stride


@_kernel
@no_type_check
def _scaled_columns(
    logits: "Any",
    kept: "Any",
    kept_stride: "Any",
    columns: "Any",
    label: "Any",
    num_columns: "Any",
    divisor: "Any",
) -> Any:
    """Columns of one row of u; -inf behind the last column and at those that are not kept."""
    is_here = columns < num_columns
    scaled = tl.load(logits + columns, mask=is_here, other=-float("inf")).to(tl.float32)
    if divisor is not None:
        scaled = tl.math.div_rn(scaled, divisor)
    if kept is not None:
        is_kept = tl.load(kept + columns.to(tl.int64) * kept_stride, mask=is_here, other=0) != 0
        scaled = tl.where(is_kept | (columns == label), scaled, -float("inf"))
    return scaled


@_kernel
@no_type_check
def _divisor(temperature: "Any", row: "Any", per_row: tl.constexpr) -> Any:
    """The row's temperature; None where it is 1."""
    return tl.load(temperature + row) if per_row else temperature


@_kernel
@no_type_check
def _statistics_kernel(  # noqa: PLR0913, PLR0917
    logits: "Any",
    logits_stride: "Any",
    kept: "Any",
    kept_stride: "Any",
    kept_column_stride: "Any",
    label_columns: "Any",
    temperature: "Any",
    per_row: tl.constexpr,
    statistics: "Any",
    num_columns: "Any",
    with_moment: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits = _row_start(logits, row, logits_stride)
    if kept is not None:
        kept = _row_start(kept, row, kept_stride)
    label = tl.load(label_columns + row)
    divisor = _divisor(temperature, row, per_row)

    # Every lane has sums of its own, so that a block costs one reduction: its maximum's.
    maximum = tl.full((), _LOWEST, tl.float32)
    total = tl.zeros((block,), tl.float32)
    moment = tl.zeros((block,), tl.float32)
    for start in range(0, num_columns, block):
        columns = start + tl.arange(0, block)
        scaled = _scaled_columns(
            logits, kept, kept_column_stride, columns, label, num_columns, divisor
        )
        larger = tl.maximum(maximum, tl.max(scaled, 0))
        gap = tl.maximum(maximum - larger, _FLOOR)
        shifted = scaled - larger
        decay = tl.exp(gap)
        weights = tl.exp(shifted)
        if with_moment:
            moment = (moment + gap * total) * decay + weights * tl.maximum(shifted, _FLOOR)
        total = total * decay + weights
        maximum = larger

    is_here = (label >= 0) & (label < num_columns)
    at_label = tl.load(logits + label, mask=is_here, other=0.0).to(tl.float32)
    if divisor is not None:
        at_label = tl.math.div_rn(at_label, divisor)
    statistics = _row_start(statistics, row, 4 if with_moment else 3)
    tl.store(statistics, at_label)
    tl.store(statistics + 1, maximum)
    tl.store(statistics + 2, tl.sum(total, 0))
    if with_moment:
        tl.store(statistics + 3, tl.sum(moment, 0))


@_kernel
@no_type_check
def _gradient_kernel(  # noqa: PLR0913, PLR0917
    logits: "Any",
    logits_stride: "Any",
    kept: "Any",
    kept_stride: "Any",
    kept_column_stride: "Any",
    label_columns: "Any",
    temperature: "Any",
    per_row: tl.constexpr,
    maximum: "Any",
    constant: "Any",
    slope: "Any",
    at_label: "Any",
    num_columns: "Any",
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits = _row_start(logits, row, logits_stride)
    if kept is not None:
        kept = _row_start(kept, row, kept_stride)
    label = tl.load(label_columns + row)
    divisor = _divisor(temperature, row, per_row)

    columns = tl.program_id(1) * block + tl.arange(0, block)
    scaled = _scaled_columns(logits, kept, kept_column_stride, columns, label, num_columns, divisor)
    shifted = scaled - tl.load(maximum + row)
    factor = tl.load(constant + row)
    if slope is not None:
        factor += tl.load(slope + row) * tl.maximum(shifted, _FLOOR)
    gradient = tl.exp(shifted) * factor
    gradient = tl.where(columns == label, gradient + tl.load(at_label + row), gradient)
    # The one rounding to a narrower type, after everything is added up.
    tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < num_columns)


def launch_statistics(
    logits: Tensor,
    label_columns: Tensor,
    temperature: float | Tensor,
    kept: Tensor | None,
    statistics: Tensor,
) -> None:
    """Fill `statistics` [c, 3 or 4]; the arguments are those of `row_statistics`, checked."""
    num_rows, num_columns = logits.shape
    block, num_warps = _block_of(num_columns)
    with torch.cuda.device_of(logits):
        _statistics_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            *_kept_arguments(kept),
            label_columns,
            *_temperature_arguments(temperature),
            statistics,
            num_columns,
            with_moment=statistics.shape[1] == 4,
            block=block,
            num_warps=num_warps,
        )


def launch_gradient(
    logits: Tensor,
    label_columns: Tensor,
    temperature: float | Tensor,
    kept: Tensor | None,
    coefficients: tuple[Tensor, Tensor, Tensor | None, Tensor],
) -> None:
    """Overwrite `logits`; the arguments are those of `logits_gradient_`, checked.

    Args:
        logits: [c, V].
        label_columns: [c].
        temperature: A number, or [c].
        kept: [c, V], or None.
        coefficients: maximum, constant, slope and at_label, [c] each.
    """
    num_rows, num_columns = logits.shape
    block, num_warps = _block_of(num_columns)
    with torch.cuda.device_of(logits):
        _gradient_kernel[(num_rows, triton.cdiv(num_columns, block))](
            logits,
            logits.stride(0),
            *_kept_arguments(kept),
            label_columns,
            *_temperature_arguments(temperature),
            *coefficients,
            num_columns,
            block=block,
            num_warps=num_warps,
        )


def _block_of(num_columns: int) -> tuple[int, int]:
    """Columns a program holds at a time, a power of two, and the warps that share them."""
    power = 1 << (num_columns - 1).bit_length()
    block = min(max(power, _COLUMNS_PER_WARP), _MAX_BLOCK)
    return block, block // _COLUMNS_PER_WARP


def _kept_arguments(kept: Tensor | None) -> tuple[Tensor | None, int, int]:
    return (
        (None, 0, 0) if kept is None else (kept.view(torch.uint8), kept.stride(0), kept.stride(1))
    )


def _temperature_arguments(temperature: float | Tensor) -> tuple[float | Tensor | None, bool]:
    """The temperature, None where it is 1, and whether there is one per row."""
    if isinstance(temperature, Tensor):
        return temperature, True
    return (None if temperature == 1 else float(temperature)), False
