"""Inputs on which the kernels of slime_loss are checked, and how wrong they may be on them.

The measure is plain torch in float32 on the same device: the kernels may be twice as far from
float64 as that, and a few units in the last place.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slime_loss.kernels import logits_gradient_, row_statistics

TINY = 2.0**-21
"""Four units in the last place of a float32, relative."""


@dataclass(frozen=True)
class Case:
    """What the logits of a few rows look like.

    Attributes:
        num_columns: Columns of the slice; as many again lie behind it in memory.
        dtype: Of the logits.
        num_rows: Rows.
        temperature: 1, another number, or one per row.
        mean: Of the logits of all rows.
        spread: Standard deviation of a row's logits.
        infinite: Share of columns that are -inf; at 1 all of them are in every other row.
        has_kept: Whether a keep mask drops half of the columns.
    """

    num_columns: int
    dtype: torch.dtype = torch.float32
    num_rows: int = 5
    temperature: Literal["one", "number", "rows"] = "one"
    mean: float = 0.0
    spread: float = 3.0
    infinite: float = 0.0
    has_kept: bool = False

    def __str__(self) -> str:
        described = [f"{self.num_rows}x{self.num_columns}", str(self.dtype).removeprefix("torch.")]
        if self.temperature != "one":
            described.append(f"temperature_{self.temperature}")
        if self.mean != 0:
            described.append(f"mean_{self.mean:g}")
        if self.infinite > 0:
            described.append(f"infinite_{self.infinite:g}")
        if self.has_kept:
            described.append("kept")
        return "-".join(described)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a case: logits [c, V], label_columns [c], a number or [c], [c, V]."""

    logits: Tensor
    label_columns: Tensor
    temperature: float | Tensor
    kept: Tensor | None


@dataclass(frozen=True)
class Check:
    """How far something is from float64, and how far it may be."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """False for an error that is NaN, too."""
        return self.error <= self.bound


def _all_cases() -> Iterator[Case]:
    block = 4096
    for num_columns in (1, 2, 127, 128, 129, 1000, 1025, block, block + 1, 2 * block + 7):
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(num_columns, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Case(1025, dtype, temperature="number")
        yield Case(block + 1, dtype, temperature="rows", infinite=0.3)
        yield Case(1025, dtype, temperature="rows", infinite=0.3, has_kept=True)
        yield Case(block + 1, dtype, has_kept=True)
        yield Case(1025, dtype, mean=1e4, temperature="number")
        yield Case(block + 1, dtype, mean=-200.0, spread=0.1)
        yield Case(300, dtype, infinite=1.0)
        yield Case(block + 300, dtype, infinite=0.999, temperature="rows")
        yield Case(129, dtype, num_rows=0)
        yield Case(0, dtype, temperature="rows")


CASES = list(_all_cases())


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """A case's arguments; the labels of every third row lie in another slice."""
    generator = torch.Generator().manual_seed(case.num_columns)
    shape = (case.num_rows, case.num_columns)
    wide = torch.randn(case.num_rows, 2 * case.num_columns, generator=generator)
    wide = wide * case.spread + case.mean
    if case.infinite > 0:
        wide[torch.rand(wide.shape, generator=generator) < case.infinite] = -math.inf
    if case.infinite == 1:
        wide[::2] = torch.randn(wide[::2].shape, generator=generator)
    labels = torch.randint(max(case.num_columns, 1), (case.num_rows,), generator=generator)
    labels[2::3] = -1
    temperature: float | Tensor = 1.0 if case.temperature == "one" else 0.7
    if case.temperature == "rows":
        temperature = (0.3 + torch.rand(case.num_rows, generator=generator)).to(device)
    return Inputs(
        wide.to(case.dtype).to(device)[:, : case.num_columns],
        (labels if case.num_columns > 0 else torch.full_like(labels, -1)).to(device),
        temperature,
        (torch.rand(shape, generator=generator) < 0.5).to(device) if case.has_kept else None,
    )


def plain_scaled(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """u [c, V] in plain torch: -inf where it is not kept."""
    # As a tensor even where it is a number, by whose reciprocal CUDA would multiply instead.
    temperature = torch.as_tensor(inputs.temperature, dtype=dtype, device=inputs.logits.device)
    scaled = inputs.logits.to(dtype) / temperature.view(-1, 1)
    if inputs.kept is None:
        return scaled
    columns = torch.arange(scaled.shape[1], device=scaled.device)
    is_label = columns == inputs.label_columns.unsqueeze(1)
    return scaled.masked_fill(~(inputs.kept | is_label), -math.inf)


def plain_statistics(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The statistics [c, 4] in plain torch."""
    scaled = plain_scaled(inputs, dtype)
    lowest = torch.finfo(torch.float32).min
    scaled = torch.nn.functional.pad(scaled, (0, 1), value=-math.inf)  # so that there is a column
    label = inputs.label_columns.unsqueeze(1)
    at_label = scaled.gather(1, label.clamp_min(0))
    maximum = scaled.amax(1, keepdim=True).clamp_min(lowest)
    shifted = scaled - maximum
    weights = shifted.exp()
    moments = torch.where(weights > 0, weights * shifted, 0.0)
    sums = [part.sum(1, keepdim=True) for part in (weights, moments)]
    return torch.cat([torch.where(label >= 0, at_label, 0.0), maximum, *sums], dim=1)


def make_coefficients(
    inputs: Inputs, *, has_slope: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Some maximum, constant, slope and at_label, [c] float32 each."""
    _, maximum, total, _ = plain_statistics(inputs, torch.float32).unbind(1)
    generator = torch.Generator().manual_seed(1)
    constant, slope, at_label = torch.randn(
        3, len(maximum), generator=generator, dtype=torch.float32
    ).to(maximum.device)
    scale = total.clamp_min(1)
    return maximum.contiguous(), constant / scale, slope / scale if has_slope else None, at_label


def plain_gradient(
    inputs: Inputs,
    coefficients: tuple[Tensor, Tensor, Tensor | None, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The gradient [c, V] in plain torch."""
    maximum, constant, slope, at_label = (
        None if values is None else values.to(dtype).unsqueeze(1) for values in coefficients
    )
    shifted = plain_scaled(inputs, dtype) - maximum
    factor = constant if slope is None else constant + slope * shifted
    gradient = torch.where(shifted > -math.inf, shifted.exp() * factor, 0.0)
    columns = torch.arange(shifted.shape[1], device=shifted.device)
    is_label = columns == inputs.label_columns.unsqueeze(1)
    return torch.where(is_label, gradient + at_label, gradient)


def check_statistics(inputs: Inputs) -> list[Check]:
    """Every number of every row, relative to 1 + its size."""
    exact = plain_statistics(inputs, torch.float64)
    plain = plain_statistics(inputs, torch.float32)
    checks = []
    for with_moment in (True, False):
        ours = row_statistics(
            inputs.logits,
            inputs.label_columns,
            inputs.temperature,
            with_moment=with_moment,
            kept=inputs.kept,
        )
        names = ("label", "maximum", "total", "moment") if with_moment else ("total_alone",)
        for number, name in enumerate(names, start=4 - len(names) if with_moment else 2):
            scale = 1 + exact[:, number].abs()
            error = _largest(ours[:, number], exact[:, number], scale)
            bound = 2 * _largest(plain[:, number], exact[:, number], scale) + TINY
            checks.append(Check(name, error, bound))
    return checks


def check_gradient(inputs: Inputs, *, has_slope: bool) -> Check:
    """Every element, relative to the largest of its row; what is -inf must become exactly 0."""
    coefficients = make_coefficients(inputs, has_slope=has_slope)
    exact = plain_gradient(inputs, coefficients, torch.float64)
    plain = _narrowed(plain_gradient(inputs, coefficients, torch.float32), inputs.logits.dtype)
    ours = widened_copy(inputs.logits)
    logits_gradient_(
        ours, inputs.label_columns, inputs.temperature, *coefficients, kept=inputs.kept
    )
    largest = torch.nn.functional.pad(exact.abs(), (0, 1)).amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    error, bound = _largest(ours, exact, scale), 2 * _largest(plain, exact, scale) + TINY
    dropped = plain_scaled(inputs, torch.float32) == -math.inf
    columns = torch.arange(dropped.shape[1], device=dropped.device)
    dropped &= columns != inputs.label_columns.unsqueeze(1)
    if bool((ours[dropped] != 0).any()):
        error = math.inf
    return Check("gradient_with_slope" if has_slope else "gradient", error, bound)


def widened_copy(logits: Tensor) -> Tensor:
    """The same numbers in memory of their own, again a slice of wider rows."""
    return torch.cat([logits, logits], dim=1)[:, : logits.shape[1]]


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 rounded to the dtype, as a kernel that stores it does."""
    from slime_loss.kernels.row_kernels import IS_INTERPRETED

    if dtype == torch.bfloat16 and IS_INTERPRETED:
        # Triton's interpreter cuts the digits off, where a GPU rounds to nearest.
        values = (values.view(torch.int32) >> 16 << 16).view(torch.float32)
    return values.to(dtype)


def _largest(values: Tensor, exact: Tensor, scale: Tensor) -> float:
    """The largest difference over a scale; NaN if one is NaN, 0 of nothing."""
    values = values.double()
    apart = torch.where(values == exact, 0.0, (values - exact).abs() / scale)
    return float(apart.max()) if apart.numel() > 0 else 0.0
