import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from slime_loss import group_relative_advantages
from tests.slime_loss import references

SETTINGS = [
    {"scale": scale, "leave_one_out": leave_one_out}
    for scale in ("std", "none")
    for leave_one_out in (False, True)
]
# Few distinct values, so that equal rewards and whole groups of them are common.
rewards_in = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 0.35, 1.0, -1.0]), st.floats(-5, 5))
samples = st.lists(st.tuples(rewards_in, st.integers(0, 3)), max_size=12)


def as_tensors(
    rewards: list[float], groups: list[int], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rewards, dtype=dtype), torch.tensor(groups, dtype=torch.int64)


@pytest.mark.parametrize("options", SETTINGS)
@given(samples=samples)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_interleaved_groups_of_any_size_equal_the_loop(
    options: dict[str, object], samples: list[tuple[float, int]]
) -> None:
    rewards, groups = [reward for reward, _ in samples], [group for _, group in samples]
    advantages = group_relative_advantages(*as_tensors(rewards, groups), **options)
    expected = references.group_relative_advantages(rewards, groups, **options)
    assert_close(advantages, advantages.new_tensor(expected), rtol=1e-12, atol=1e-12)


def test_groups_are_found_by_index() -> None:
    rewards, groups = as_tensors([1, 1, 1, 1, 5, 5, 5], [0, 0, 0, 0, 1, 1, 1])
    assert group_relative_advantages(rewards, groups).tolist() == [0.0] * 7


def test_a_group_of_one_has_advantage_zero() -> None:
    rewards, groups = as_tensors([3.0, 1, 2], [9, 4, 4])
    for options in SETTINGS:
        assert group_relative_advantages(rewards, groups, **options)[0].item() == 0.0
    advantages = group_relative_advantages(rewards, groups)
    expected = [0, -0.7071057811879616, 0.7071057811879616]
    assert_close(advantages, advantages.new_tensor(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.2, 0.1, 1 / 3, 1e-30, 1e30, -7.7])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 16])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(
    options: dict[str, object], dtype: torch.dtype, reward: float, size: int
) -> None:
    rewards, groups = as_tensors([reward] * size, [0] * size, dtype)
    for eps in (1e-6, 0.0):
        advantages = group_relative_advantages(rewards, groups, eps=eps, **options)
        assert advantages.tolist() == [0.0] * size


def test_leave_one_out_of_a_nearly_constant_group() -> None:
    rewards, groups = as_tensors([0.35] * 7 + [0], [0] * 8)
    advantages = group_relative_advantages(rewards, groups, scale="none", leave_one_out=True)
    expected = advantages.new_tensor([0.05] * 7 + [-0.35])
    assert_close(advantages, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", SETTINGS)
def test_an_offset_of_the_whole_group_changes_nothing(options: dict[str, object]) -> None:
    # The offset leaves the differences exact, so not a digit may be lost.
    rewards, groups = as_tensors([0.5, 0.25, 1.0, 0.0, 2.0], [3, 3, 3, 1, 1])
    shifted = group_relative_advantages(rewards + 2.0**45, groups, **options)
    plain = group_relative_advantages(rewards, groups, **options)
    assert_close(shifted, plain, rtol=1e-12, atol=0)


def test_advantages_are_fp32_without_gradient_and_rewards_are_untouched() -> None:
    rewards, groups = as_tensors([1.0, 0.0, 0.5], [0, 0, 0], torch.float32)
    before = rewards.clone()
    advantages = group_relative_advantages(rewards.requires_grad_(), groups)
    assert (advantages.dtype, advantages.requires_grad) == (torch.float32, False)
    assert torch.equal(rewards, before)
    assert group_relative_advantages(rewards.bfloat16(), groups).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    rewards, groups = as_tensors([1.0, bad, 1.0], [0, 0, 0])
    with pytest.raises(ValueError, match=rf"^rewards must be finite: rewards\[1\]={bad}$"):
        group_relative_advantages(rewards, groups)


def test_wrong_arguments_are_refused() -> None:
    rewards, groups = as_tensors([1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match="scale must be one of std, none: scale='var'"):
        group_relative_advantages(rewards, groups, scale="var")
    with pytest.raises(ValueError, match="eps must be >= 0: eps=-1"):
        group_relative_advantages(rewards, groups, eps=-1.0)
    with (
        references.without_type_checker(),
        pytest.raises(ValueError, match=r"group_index.shape=\(1,\), rewards.shape=\(2,\)"),
    ):
        group_relative_advantages(rewards, groups[:1])
