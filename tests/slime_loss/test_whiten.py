import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed
from torch.testing import assert_close

from slime_loss import masked_whiten
from tests.slime_loss import references
from tests.slime_loss.references import without_type_checker
from tests.spawn import World

NAN, INF = math.nan, math.inf


def doubles(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def flags(mask: list[int] | list[bool]) -> Tensor:
    return torch.tensor(mask, dtype=torch.bool)


@given(
    tokens=st.lists(
        st.tuples(st.one_of(st.sampled_from([0.0, 0.7]), st.floats(-5, 5)), st.booleans()),
        max_size=12,
    ),
    shift_mean=st.booleans(),
    eps=st.sampled_from([1e-8, 1e-3]),
)
@settings(derandomize=True, max_examples=120, deadline=None)
def test_equals_the_loop(tokens: list[tuple[float, bool]], shift_mean: bool, eps: float) -> None:
    values, mask = [value for value, _ in tokens], [is_in for _, is_in in tokens]
    found = masked_whiten(doubles(values), flags(mask), shift_mean=shift_mean, eps=eps)
    expected = references.masked_whiten(values, mask, shift_mean, eps)
    assert_close(found, doubles(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_fewer_than_two_tokens_are_unchanged(shift_mean: bool) -> None:
    one = masked_whiten(torch.tensor([7.0, 3, 7]), flags([0, 1, 0]), shift_mean=shift_mean)
    assert one.tolist() == [0, 3, 0]
    none = masked_whiten(torch.tensor([7.0, NAN]), flags([0, 0]), shift_mean=shift_mean)
    assert none.tolist() == [0, 0]
    assert masked_whiten(torch.zeros(0), flags([]), shift_mean=shift_mean).tolist() == []


def test_two_tokens() -> None:
    found = masked_whiten(torch.tensor([1.0, 3]), flags([1, 1]))
    assert found.tolist() == pytest.approx([-0.7071067811865476, 0.7071067811865476], abs=1e-6)
    found = masked_whiten(torch.tensor([1.0, 3]), flags([1, 1]), shift_mean=False)
    assert found.tolist() == pytest.approx([2 - 0.7071067811865476, 2.7071067811865476], abs=1e-6)


@pytest.mark.parametrize("value", [0.7, 1e-30, -1e4, 1e30])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_equal_tokens_are_zero_however_many(value: float, eps: float) -> None:
    stream = torch.full((70001,), value)
    assert not masked_whiten(stream, torch.ones(70001, dtype=torch.bool), eps=eps).any()


def test_a_large_common_offset_costs_no_digits() -> None:
    # The offset leaves the differences exact; E[x^2] - E[x]^2 would have lost them all.
    stream, mask = doubles([0.5, 0.25, 1.0, 0.0]), flags([1, 1, 1, 1])
    assert_close(
        masked_whiten(stream + 2.0**40, mask), masked_whiten(stream, mask), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_what_a_masked_token_holds_is_never_read(poison: float) -> None:
    mask = flags([1, 0, 1])
    for shift_mean in (True, False):
        clean, dirty = (
            masked_whiten(torch.tensor([1.0, value, 5]), mask, shift_mean=shift_mean)
            for value in (0.0, poison)
        )
        assert torch.equal(clean, dirty)
        assert dirty[1] == 0


def test_the_result_is_fp32_without_gradient_and_the_stream_is_untouched() -> None:
    mask = flags([1, 0, 1])
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        stream = torch.tensor([1.0, 2, 5], dtype=dtype, requires_grad=True)
        whitened = masked_whiten(stream, mask)
        assert (whitened.dtype, whitened.requires_grad) == (expected, False)
        assert stream.tolist() == [1, 2, 5]


# Each rank's tokens, over the kinds of step: uneven, one rank idle or masked or empty, one token
# or none in all.
STEPS = [
    [([1.0, 2.5, -3.0], [1, 0, 1]), ([0.25], [1])],
    [([1.0, 2.5, -3.0], [1, 1, 1]), ([NAN, INF], [0, 0])],
    [([], []), ([2.0, 0.1, 0.7, -1.0], [1, 1, 1, 1])],
    [([4.0], [1]), ([NAN], [0])],
    [([4.0], [1]), ([5.0], [1])],
    [([NAN], [0]), ([], [])],
]


def whiten_on_a_rank(rank: int, shift_mean: bool) -> list[list[float]]:
    return [
        masked_whiten(
            doubles(step[rank][0]),
            flags(step[rank][1]),
            group=distributed.group.WORLD,
            shift_mean=shift_mean,
        ).tolist()
        for step in STEPS
    ]


@pytest.mark.parametrize("shift_mean", [True, False])
def test_two_ranks_equal_one(two_ranks: World, shift_mean: bool) -> None:
    first, second = two_ranks.run(whiten_on_a_rank, shift_mean)
    for step, on_first, on_second in zip(STEPS, first, second, strict=True):
        (stream, mask), (more, more_mask) = step
        whole = masked_whiten(
            doubles(stream + more), flags(mask + more_mask), shift_mean=shift_mean
        )
        assert_close(doubles(on_first + on_second), whole, rtol=1e-12, atol=1e-12)
        assert [len(on_first), len(on_second)] == [len(stream), len(more)]


def test_wrong_arguments_are_refused() -> None:
    stream, mask = torch.tensor([1.0, 2.0]), flags([1, 1])
    with pytest.raises(ValueError, match=r"^eps must be >= 0: eps=-1.0$"):
        masked_whiten(stream, mask, eps=-1.0)
    with without_type_checker():
        with pytest.raises(ValueError, match=r"mask.shape=\(1,\), stream.shape=\(2,\)"):
            masked_whiten(stream, mask[:1])
        with pytest.raises(ValueError, match=r"^stream must be floating point: .*torch.int64"):
            masked_whiten(stream.long(), mask)
        with pytest.raises(ValueError, match=r"^mask must be torch.bool: mask.dtype=torch.int64"):
            masked_whiten(stream, mask.long())
