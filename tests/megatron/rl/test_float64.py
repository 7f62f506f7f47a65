"""What asks for float32 within a run in float64 gets float64, and nothing is left of it after."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.rl.float64 import float64_throughout

THIRD = torch.tensor(1.0, dtype=torch.float64) / 3

ASKS_FOR_FLOAT32: dict[str, Callable[[], Tensor]] = {
    "float": lambda: THIRD.float(),
    "to": lambda: THIRD.to(torch.float32),
    "to, by name": lambda: THIRD.to(dtype=torch.float32),
    "softmax": lambda: torch.softmax(THIRD.repeat(2), 0, dtype=torch.float32),
    "sum": lambda: THIRD.repeat(2).sum(dtype=torch.float32),
    "zeros": lambda: torch.zeros(1, dtype=torch.float32),
    "tensor": lambda: torch.tensor([1 / 3], dtype=torch.float32),
    "as_tensor": lambda: torch.as_tensor([1 / 3], dtype=torch.float32),
    "new_zeros": lambda: THIRD.new_zeros(1, dtype=torch.float32),
    "integers": lambda: torch.arange(3).float(),
    "default": lambda: torch.tensor([1 / 3]),
}


@pytest.mark.parametrize("name", ASKS_FOR_FLOAT32)
def test_float32_means_float64(name: str) -> None:
    ask = ASKS_FOR_FLOAT32[name]
    rounded = ask()
    assert rounded.dtype == torch.float32
    with float64_throughout():
        precise = ask()
    assert precise.dtype == torch.float64
    torch.testing.assert_close(precise.float(), rounded, rtol=1e-6, atol=0)
    assert ask().dtype == torch.float32


def test_other_dtypes_are_left_alone() -> None:
    with float64_throughout():
        assert torch.zeros(1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.zeros(1, dtype=torch.int32).to(torch.int64).dtype == torch.int64
        assert THIRD.bfloat16().dtype == torch.bfloat16


class Backward(torch.autograd.Function):
    """A backward that asks for float32, as a recomputed layer does."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        found.append(torch.zeros(1, dtype=torch.float32).dtype)
        return gradient


found: list[torch.dtype] = []


@pytest.mark.parametrize(
    "run",
    [
        lambda y, _: y.backward(),
        lambda y, _: torch.autograd.backward(y),
        lambda y, x: torch.autograd.grad(y, x),
    ],
)
def test_a_backward_is_in_float64_too(run: Callable[[Tensor, Tensor], object]) -> None:
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    found.clear()
    with float64_throughout():
        run(Backward.apply(x).sum(), x)
    run(Backward.apply(x).sum(), x)
    assert found == [torch.float64, torch.float32]


def test_gradients_are_not_rounded() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    torch.softmax(logits, 0)[0].backward()
    exact, logits.grad = logits.grad, None
    with float64_throughout():
        torch.softmax(logits.float(), 0, dtype=torch.float32)[0].backward()
    assert torch.equal(logits.grad, exact)


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), float64_throughout():
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32
    assert THIRD.float().dtype == torch.float32


def test_bytes_are_what_they_are() -> None:
    data = torch.tensor([0.5, 2.0], dtype=torch.float32).view(torch.uint8)
    with float64_throughout():
        assert data.view(dtype=torch.float32).tolist() == [0.5, 2.0]
        assert torch.frombuffer(data.numpy(), dtype=torch.float32).tolist() == [0.5, 2.0]
