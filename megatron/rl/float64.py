"""A run in float64: every place that names float32 means float64.

megatron-core names float32 where bf16 needs it: in the router's softmax, in what the optimizers
accept, in the gradient norm. Rounding there would hide a layout's mistake behind its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Compute in float64 what asks for float32, or for no dtype, in this thread."""
    default, run_backward = torch.get_default_dtype(), torch.autograd._engine_run_backward
    mode = _Float64()

    def run_backward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with mode:  # torch leaves a mode for the time of `backward`, which recomputes layers
            return run_backward(*args, **kwargs)

    torch.set_default_dtype(torch.float64)
    torch.autograd._engine_run_backward = run_backward_in_float64
    try:
        with mode:
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward
        torch.set_default_dtype(default)


_BYTES_AS = (Tensor.view, torch.frombuffer)
"""Whose dtype says what bytes are, such as those of a file of weights."""


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # core's optimizers sort parameters by this name and know none of float64
            return func(*args).replace("DoubleTensor", "FloatTensor")
        if kwargs.get("dtype") is torch.float32 and func not in _BYTES_AS:
            kwargs["dtype"] = torch.float64
        if func is Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)
