import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from slime_loss import (
    ContiguousLayout,
    SequenceLayout,
    ZigzagLayout,
    gae,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_returns,
    token_rewards,
)
from tests.slime_loss import references
from tests.slime_loss.references import without_type_checker

NAN, INF = math.nan, math.inf
numbers = st.floats(-5, 5)
shares = st.sampled_from([0.0, 0.5, 0.95, 1.0])
# (reward, group, [(kl or reward, value, does it train)])
samples_in = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 0.2, 1.0]), numbers),
        st.integers(0, 2),
        st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=9),
    ),
    max_size=5,
)
Samples = list[tuple[float, int, list[tuple[float, float, bool]]]]


def doubles(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def flags(mask: list[int] | list[bool]) -> Tensor:
    return torch.tensor(mask, dtype=torch.bool)


def columns(samples: Samples) -> tuple[list[list[float]], list[list[float]], list[list[bool]]]:
    first = [[token[0] for token in tokens] for _, _, tokens in samples]
    second = [[token[1] for token in tokens] for _, _, tokens in samples]
    return first, second, [[token[2] for token in tokens] for _, _, tokens in samples]


def assert_equal_lists(streams: list[Tensor], expected: list[list[float]]) -> None:
    assert len(streams) == len(expected)
    for stream, numbers in zip(streams, expected, strict=True):
        assert_close(stream, doubles(numbers), rtol=1e-12, atol=1e-12)


@given(samples=samples_in, kl_coef=st.sampled_from([0.0, 0.1]), gamma=shares)
@settings(derandomize=True, max_examples=80, deadline=None)
def test_reinforce_plus_plus_equals_the_loop(
    samples: Samples, kl_coef: float, gamma: float
) -> None:
    kl, _, masks = columns(samples)
    rewards, groups = [reward for reward, _, _ in samples], [group for _, group, _ in samples]
    streams = [doubles(row) for row in kl], [flags(row) for row in masks]
    returns = reinforce_plus_plus_returns(doubles(rewards), *streams, kl_coef=kl_coef, gamma=gamma)
    for discount, found in (
        (gamma, returns),
        (0.0, token_rewards(doubles(rewards), *streams, kl_coef=kl_coef)),
    ):
        expected = [
            references.reinforce_plus_plus_returns(*sample, kl_coef, discount)
            for sample in zip(rewards, kl, masks, strict=True)
        ]
        assert_equal_lists(found, expected)
    assert_equal_lists(
        reinforce_plus_plus_baseline(
            doubles(rewards), torch.tensor(groups, dtype=torch.int64), *streams, kl_coef=kl_coef
        ),
        references.reinforce_plus_plus_baseline(rewards, groups, kl, masks, kl_coef),
    )


@given(samples=samples_in, gamma=shares, lambd=shares)
@settings(derandomize=True, max_examples=80, deadline=None)
def test_gae_equals_the_loop(samples: Samples, gamma: float, lambd: float) -> None:
    rewards, values, masks = columns(samples)
    found = gae(
        [doubles(row) for row in rewards],
        [doubles(row) for row in values],
        [flags(row) for row in masks],
        gamma=gamma,
        lambd=lambd,
    )
    expected = [
        references.gae(*sample, gamma, lambd) for sample in zip(rewards, values, masks, strict=True)
    ]
    assert_equal_lists(found[0], [advantages for advantages, _ in expected])
    assert_equal_lists(found[1], [returns for _, returns in expected])


@pytest.mark.parametrize("discount", [1.0, 0.999, 0.1])
def test_a_long_response_equals_the_loop(discount: float) -> None:
    generator = torch.Generator().manual_seed(3)
    kl = torch.randn(3001, generator=generator, dtype=torch.float64)
    mask = torch.rand(3001, generator=generator) < 0.7
    options = {"kl_coef": 0.1, "gamma": discount}
    (returns,) = reinforce_plus_plus_returns(doubles([1.5]), [kl], [mask], **options)
    expected = references.reinforce_plus_plus_returns(1.5, kl.tolist(), mask.tolist(), **options)
    assert_equal_lists([returns], [expected])


@pytest.mark.parametrize("num_masked", [0, 1, 5, 40])
def test_gae_over_a_tool_call_of_any_length(num_masked: int) -> None:
    mask = flags([1] + [0] * num_masked + [1])
    zeros = torch.zeros(num_masked + 2, dtype=torch.float64)
    rewards = token_rewards(doubles([2.0]), [zeros], [mask], kl_coef=0.0)
    (advantages,), (returns,) = gae(rewards, [zeros], [mask], gamma=0.9, lambd=0.5)
    expected = [0.9] + [0.0] * num_masked + [2.0]
    assert_equal_lists([advantages, returns], [expected, expected])


def test_gae_of_a_masked_tail() -> None:
    mask, zeros = flags([1, 1, 0]), torch.zeros(3, dtype=torch.float64)
    rewards = token_rewards(doubles([1.0]), [zeros], [mask], kl_coef=0.0)
    (advantages,), _ = gae(rewards, [zeros], [mask], gamma=0.0, lambd=1.0)
    assert advantages.tolist() == [0, 1, 0]


def test_an_observation_neither_discounts_nor_resets() -> None:
    mask, zeros = flags([1, 1, 0, 0, 1]), torch.zeros(5, dtype=torch.float64)
    (returns,) = reinforce_plus_plus_returns(
        doubles([2.0]), [zeros], [mask], kl_coef=0.0, gamma=0.5
    )
    assert returns.tolist() == [0.5, 1, 0, 0, 2]


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_sample_without_a_trainable_token_gets_zeros(length: int) -> None:
    mask, poison = [torch.zeros(length, dtype=torch.bool)], [torch.full((length,), NAN)]
    rewards, groups = torch.tensor([1.0]), torch.tensor([0])
    options = {"kl_coef": 0.1}
    for streams in (
        token_rewards(rewards, poison, mask, **options),
        reinforce_plus_plus_returns(rewards, poison, mask, gamma=1.0, **options),
        reinforce_plus_plus_baseline(rewards, groups, poison, mask, **options),
        *gae(poison, poison, mask, gamma=1.0, lambd=1.0),
    ):
        assert [stream.tolist() for stream in streams] == [[0.0] * length]


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_what_a_masked_token_holds_is_never_read(poison: float) -> None:
    mask = [flags([1, 0, 1, 0])]
    clean, dirty = ([torch.tensor([0.5, value, -0.25, value])] for value in (0.0, poison))
    rewards, groups = torch.tensor([1.0]), torch.tensor([0])
    for estimate in (
        lambda kl: reinforce_plus_plus_returns(rewards, kl, mask, kl_coef=0.1, gamma=0.9),
        lambda kl: reinforce_plus_plus_baseline(rewards, groups, kl, mask, kl_coef=0.1),
        lambda kl: gae(kl, kl, mask, gamma=0.9, lambd=0.9)[0],
        lambda kl: gae(kl, kl, mask, gamma=0.9, lambd=0.9)[1],
    ):
        assert torch.equal(estimate(dirty)[0], estimate(clean)[0])


def test_a_coefficient_of_zero_does_not_read_the_kl() -> None:
    rewards, mask, kl = torch.tensor([1.0]), [flags([1, 1])], [torch.tensor([INF, NAN])]
    options = {"kl_coef": 0.0}
    assert token_rewards(rewards, kl, mask, **options)[0].tolist() == [0, 1]
    groups = torch.tensor([0])
    (advantages,) = reinforce_plus_plus_baseline(rewards, groups, kl, mask, **options)
    assert advantages.tolist() == [0, 0]


@pytest.mark.parametrize("layout", [ContiguousLayout, ZigzagLayout])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("mask", "row"), [([1, 1, 1], 7), ([1, 1, 0], 6), ([1, 0, 0], 5)])
def test_the_terminal_reward_is_on_the_last_trainable_token_whichever_rank_owns_it(
    layout: type[SequenceLayout], cp_size: int, mask: list[int], row: int
) -> None:
    # 6 tokens of prompt and 3 of response: response token p is predicted by row p - 1.
    rewards = token_rewards(doubles([4.0]), [doubles([0, 0, 0])], [flags(mask)], kl_coef=0.0)
    pack = torch.zeros(9, dtype=torch.float64)
    pack[5:8] = rewards[0]
    owners = 0
    for rank in range(cp_size):
        local = layout([9], cp_rank=rank, cp_size=cp_size)
        is_last = local.token_index == row
        assert local.shard(pack).tolist() == (4.0 * is_last).tolist()
        owners += int(is_last.sum())
    assert owners == 1


def test_results_are_fp32_without_gradient_and_arguments_are_untouched() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    mask = [flags([1, 0]), flags([1])]
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        kl = [torch.tensor(row, dtype=dtype).requires_grad_() for row in ([0.5, 0.25], [2.0])]
        before = [row.detach().clone() for row in kl]
        results = [
            token_rewards(rewards, kl, mask, kl_coef=0.1),
            reinforce_plus_plus_returns(rewards, kl, mask, kl_coef=0.1, gamma=0.9),
            reinforce_plus_plus_baseline(rewards, groups, kl, mask, kl_coef=0.1),
            *gae(kl, kl, mask, gamma=0.9, lambd=0.9),
        ]
        for stream in (stream for result in results for stream in result):
            assert (stream.dtype, stream.requires_grad) == (expected, False)
        assert all(torch.equal(*pair) for pair in zip(kl, before, strict=True))
    assert rewards.tolist() == [1, 0]
    assert [row.tolist() for row in mask] == [[True, False], [True]]


def test_wrong_arguments_are_refused() -> None:
    rewards, mask = torch.tensor([1.0, 2.0]), [flags([1, 1]), flags([1])]
    kl, long = [torch.zeros(2), torch.zeros(1)], [torch.zeros(2), torch.zeros(3)]
    options = {"kl_coef": 0.0, "gamma": 1.0}
    with pytest.raises(ValueError, match=r"kl\[1\].shape=\(3,\), loss_mask\[1\].shape=\(1,\)"):
        reinforce_plus_plus_returns(rewards, long, mask, **options)
    with pytest.raises(ValueError, match=r"values\[1\].shape=\(3,\), loss_mask\[1\].shape=\(1,\)"):
        gae(kl, long, mask, gamma=1.0, lambd=1.0)
    with pytest.raises(ValueError, match=r"len\(rewards\)=1, len\(loss_mask\)=2"):
        reinforce_plus_plus_returns(rewards[:1], kl, mask, **options)
    with pytest.raises(ValueError, match=r"len\(kl\)=1, len\(loss_mask\)=2"):
        reinforce_plus_plus_baseline(rewards, torch.tensor([0, 0]), kl[:1], mask, kl_coef=0.0)
    with pytest.raises(ValueError, match=r"^rewards must be finite: rewards\[1\]=nan$"):
        token_rewards(torch.tensor([1.0, NAN]), kl, mask, kl_coef=0.0)
    for bad in (-0.1, NAN, INF):
        with pytest.raises(ValueError, match=rf"^kl_coef must be >= 0 and finite: kl_coef={bad}$"):
            token_rewards(rewards, kl, mask, kl_coef=bad)
    for bad in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match=rf"^gamma must be in \[0, 1\]: gamma={bad}$"):
            reinforce_plus_plus_returns(rewards, kl, mask, kl_coef=0.0, gamma=bad)
        with pytest.raises(ValueError, match=rf"^lambd must be in \[0, 1\]: lambd={bad}$"):
            gae(kl, kl, mask, gamma=1.0, lambd=bad)
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=r"^loss_mask\[0\] must be torch.bool: .*dtype=torch.int64"),
    ):
        token_rewards(rewards, kl, [row.long() for row in mask], kl_coef=0.0)
