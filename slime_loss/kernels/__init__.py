"""Triton kernels for the two passes over [rows, columns] logits, for CUDA tensors.

They compute what the torch functions of the same names compute. triton comes with CUDA builds of
torch; without it this package imports all the same, and says what is missing when it is used.
"""

import functools
import importlib.util
import math
from types import ModuleType

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_supported(logits: Tensor) -> bool:
    """Whether the kernels take these logits: on a CUDA device, not float64, triton installed."""
    return logits.is_cuda and logits.dtype in _DTYPES and _has_triton()


def row_statistics(
    logits: Float[Tensor, "rows columns"],
    label_columns: Int64[Tensor, " rows"],
    temperature: float | Float[Tensor, " rows"],
    *,
    with_moment: bool,
    kept: Bool[Tensor, "rows columns"] | None = None,
) -> Float[Tensor, "rows numbers"]:
    """The numbers of each row that log-prob and entropy are made of; u = logits / temperature.

    One pass over the logits, computed in float32. A column that is -inf adds exactly 0.

    Args:
        logits: [c, V], float32, bfloat16 or float16, columns side by side; any row stride, so it
            may be a slice of columns. Not changed.
        label_columns: [c], the column of the row's label; -1, like any number that is no column,
            where it is not among them.
        temperature: Divides the logits: a number, or [c] float32.
        with_moment: Whether the moment is asked for.
        kept: [c, V], any strides; columns that are not kept, save the label's own, count as -inf.

    Returns:
        [c, 3 or 4], float32: u of the label or 0, max u, sum e^(u - max) and, if asked for,
        sum e^(u - max) (u - max). Where every u is -inf: max is the lowest finite number, the
        sums are 0.

    Raises:
        ValueError: A shape, dtype, device or stride that the kernels do not take, or a
            temperature that is a number and not > 0.
        RuntimeError: triton is not installed.
    """
    kernels, label_columns, temperature = _checked(logits, label_columns, temperature, kept)
    statistics = logits.new_empty((logits.shape[0], 4 if with_moment else 3), dtype=torch.float32)
    if logits.shape[0] > 0:
        kernels.launch_statistics(logits, label_columns, temperature, kept, statistics)
    return statistics


def logits_gradient_(  # noqa: PLR0913
    logits: Float[Tensor, "rows columns"],
    label_columns: Int64[Tensor, " rows"],
    temperature: float | Float[Tensor, " rows"],
    maximum: Float[Tensor, " rows"],
    constant: Float[Tensor, " rows"],
    slope: Float[Tensor, " rows"] | None,
    at_label: Float[Tensor, " rows"],
    *,
    kept: Bool[Tensor, "rows columns"] | None = None,
) -> None:
    """Overwrite logits by e^t (constant + slope t) + onehot(label) at_label, t = u - maximum.

    One pass, computed in float32 and rounded once. A column that is -inf becomes exactly 0.

    Args:
        logits: [c, V], as `row_statistics` takes them; becomes the gradient, in the same dtype.
        label_columns: [c], the column of the row's label; -1 where it is not among them.
        temperature: Divides the logits: a number, or [c] float32.
        maximum: [c] float32, max u of the whole row.
        constant: [c] float32.
        slope: [c] float32; None for 0.
        at_label: [c] float32.
        kept: [c, V], any strides; columns that are not kept, save the label's own, count as -inf.

    Raises:
        ValueError: A shape, dtype, device or stride that the kernels do not take, or a
            temperature that is a number and not > 0.
        RuntimeError: triton is not installed.
    """
    kernels, label_columns, temperature = _checked(logits, label_columns, temperature, kept)
    coefficients = (
        _of_rows("maximum", maximum, logits),
        _of_rows("constant", constant, logits),
        None if slope is None else _of_rows("slope", slope, logits),
        _of_rows("at_label", at_label, logits),
    )
    if logits.numel() > 0:
        kernels.launch_gradient(logits, label_columns, temperature, kept, coefficients)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _checked(
    logits: Tensor, label_columns: Tensor, temperature: float | Tensor, kept: Tensor | None
) -> tuple[ModuleType, Tensor, float | Tensor]:
    """The module of the kernels, the label columns and the temperature, if all may be used."""
    kernels = _checked_kernels(logits)
    label_columns = _of_rows("label_columns", label_columns, logits, torch.int64)
    temperature = _checked_temperature(temperature, logits)
    _check_kept(kept, logits)
    return kernels, label_columns, temperature


def _checked_kernels(logits: Tensor) -> ModuleType:
    """The module of the kernels, if they can be run on these logits."""
    if not _has_triton():
        raise RuntimeError(
            "triton must be installed for the kernels; it comes with CUDA builds of torch: "
            f"torch={torch.__version__}"
        )
    from slime_loss.kernels import row_kernels

    if not (logits.is_cuda or row_kernels.IS_INTERPRETED):
        raise ValueError(f"logits must be on a CUDA device: logits.device={logits.device}")
    if logits.dtype not in _DTYPES:
        raise ValueError(
            f"logits must be float32, bfloat16 or float16: logits.dtype={logits.dtype}"
        )
    if logits.dim() != 2:
        raise ValueError(f"logits must be a matrix: logits.shape={tuple(logits.shape)}")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits must have its columns side by side: logits.stride()={logits.stride()}"
        )
    return row_kernels


def _of_rows(
    name: str, values: Tensor, logits: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values, contiguous, if there is one of this dtype for each row of the logits."""
    if values.shape != logits.shape[:1]:
        raise ValueError(
            f"{name} must have one number per row of the logits: "
            f"{name}.shape={tuple(values.shape)}, logits.shape={tuple(logits.shape)}"
        )
    if values.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}: {name}.dtype={values.dtype}")
    _check_device(name, values, logits)
    return values.contiguous()


def _checked_temperature(temperature: float | Tensor, logits: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor):
        return _of_rows("temperature", temperature, logits)
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be finite and > 0: temperature={temperature}")
    return temperature


def _check_kept(kept: Tensor | None, logits: Tensor) -> None:
    if kept is None:
        return
    if kept.dtype != torch.bool or kept.shape != logits.shape:
        raise ValueError(
            "kept must be bool with the shape of the logits: "
            f"kept.dtype={kept.dtype}, kept.shape={tuple(kept.shape)}, "
            f"logits.shape={tuple(logits.shape)}"
        )
    _check_device("kept", kept, logits)


def _check_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(
            f"{name} must be on the device of the logits: "
            f"{name}.device={tensor.device}, logits.device={logits.device}"
        )
