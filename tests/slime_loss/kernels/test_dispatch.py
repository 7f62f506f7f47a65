"""Where the kernels are not to be had, torch does the work, and who asks for them is told."""

import sys
from collections.abc import Iterator

import pytest
import torch

from slime_loss import kernels
from slime_loss.kernels import is_supported, logits_gradient_, row_statistics


class OnCuda(torch.Tensor):
    """Says that it is on a CUDA device."""

    is_cuda = True


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels._has_triton.cache_clear()
    yield
    kernels._has_triton.cache_clear()


@pytest.mark.usefixtures("no_triton")
def test_a_missing_triton_is_named() -> None:
    ones = torch.ones(1)
    message = (
        "^triton must be installed for the kernels; it comes with CUDA builds of torch: torch="
    )
    with pytest.raises(RuntimeError, match=message):
        row_statistics(torch.zeros(1, 2), torch.tensor([0]), 1.0, with_moment=False)
    with pytest.raises(RuntimeError, match=message):
        logits_gradient_(torch.zeros(1, 2), torch.tensor([0]), 1.0, ones, ones, None, ones)


@pytest.mark.usefixtures("no_triton")
def test_without_triton_nothing_is_supported() -> None:
    assert not is_supported(torch.zeros(1, 2).as_subclass(OnCuda))


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert is_supported(torch.zeros(1, 2, dtype=dtype).as_subclass(OnCuda))
    assert not is_supported(torch.zeros(1, 2, dtype=torch.float64).as_subclass(OnCuda))
    assert not is_supported(torch.zeros(1, 2))
