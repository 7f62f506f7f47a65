"""Long responses and groups without a signal, against loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.rl.reward_rules import (
    in_differing_groups,
    soft_overlong_penalty,
    without_truncated,
)


def penalty_by_cases(length: int, max_length: int, cache_length: int) -> float:
    """Equation 13 as the paper writes it."""
    if length <= max_length - cache_length:
        return 0.0
    if length <= max_length:
        return ((max_length - cache_length) - length) / cache_length
    return -1.0


@given(
    lengths=st.lists(st.integers(0, 60), max_size=20),
    cache_length=st.integers(1, 20),
    rest=st.integers(0, 20),
)
def test_soft_overlong_penalty(lengths: list[int], cache_length: int, rest: int) -> None:
    max_length = cache_length + rest
    found = soft_overlong_penalty(np.array(lengths, np.int64), max_length, cache_length)
    expected = [penalty_by_cases(length, max_length, cache_length) for length in lengths]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_papers_lengths() -> None:
    found = soft_overlong_penalty(np.array([16384, 18432, 20480, 20481]), 20480, 4096)
    assert found.tolist() == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("cache_length", [0, 101, -1])
def test_a_cache_that_cannot_be(cache_length: int) -> None:
    rule = rf"cache_length must be in \[1, max_length=100\]: cache_length={cache_length}"
    with pytest.raises(ValueError, match=rule):
        soft_overlong_penalty(np.array([1]), 100, cache_length)


def test_truncated_responses_train_nothing() -> None:
    masks = [np.array([True, False]), np.array([True]), np.array([True, True])]
    found = without_truncated(masks, ["completed", "truncated", "aborted"])
    assert [mask.tolist() for mask in found] == [[True, False], [False], [True, True]]
    assert masks[1].tolist() == [True]


def differing_by_loop(rewards: list[float], groups: list[int]) -> list[bool]:
    kept = []
    for reward, group in zip(rewards, groups, strict=True):
        seen = {
            other
            for other, its_group in zip(rewards, groups, strict=True)
            if its_group == group and not math.isnan(other)
        }
        kept.append(not math.isnan(reward) and len(seen) > 1)
    return kept


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, -0.5, float("nan")]), st.integers(-2, 5)), max_size=25
    )
)
def test_groups_that_differ(samples: list[tuple[float, int]]) -> None:
    rewards = [reward for reward, _ in samples]
    groups = [group for _, group in samples]
    found = in_differing_groups(np.array(rewards, np.float64), np.array(groups, np.int64))
    assert found.tolist() == differing_by_loop(rewards, groups)
