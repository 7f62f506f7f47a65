import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from slime_loss import PolicyLossConfig, clipped_surrogate, importance_log_ratio
from tests.slime_loss import reference_policy
from tests.slime_loss.references import gradients, without_type_checker

CONFIGS = [
    PolicyLossConfig(),
    PolicyLossConfig(eps_clip=0.1, eps_clip_high=0.4),
    PolicyLossConfig(eps_clip_c=1.1),
    PolicyLossConfig(eps_clip=0.3, eps_clip_high=0.28, eps_clip_c=3.0),
    PolicyLossConfig(eps_clip=1.5, eps_clip_high=4.0),
]


def test_dual_clip_bounds_negative_advantages_only() -> None:
    config = PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=1.5)
    log_ratio = torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, -2.0, 2.0], dtype=torch.float64)
    token_loss = clipped_surrogate(log_ratio, advantages, config).token_loss
    assert_close(token_loss, token_loss.new_tensor([-2.4, 3.0, -1.0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
@given(tokens=st.lists(st.tuples(st.floats(-25, 25), st.floats(-3, 3)), max_size=8))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_values_gradients_and_binding_bounds_equal_the_loop(
    config: PolicyLossConfig, tokens: list[tuple[float, float]]
) -> None:
    # Below, the loop's own test for a binding bound drowns in rounding.
    assume(all(advantage == 0 or abs(advantage) > 1e-3 for _, advantage in tokens))
    table = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2)
    log_probs, advantages = table[:, 0].clone().requires_grad_(), table[:, 1]
    old = torch.zeros_like(advantages)
    surrogate = clipped_surrogate(importance_log_ratio(log_probs, old), advantages, config)

    ratios = [reference_policy.importance_log_ratio(x, old[0]).exp() for x in log_probs]
    losses = [
        reference_policy.clipped_loss(ratio, float(advantage), config)
        for ratio, advantage in zip(ratios, advantages, strict=True)
    ]
    bounds = [
        reference_policy.binding_bound(ratio.item(), advantage.item(), config)
        for ratio, advantage in zip(ratios, advantages, strict=True)
    ]
    expected = torch.stack(losses) if losses else log_probs * 1
    assert_close(surrogate.token_loss, expected, rtol=1e-12, atol=1e-12)
    assert_close(
        gradients(surrogate.token_loss.sum(), log_probs),
        gradients(expected.sum(), log_probs),
        rtol=1e-12,
        atol=1e-12,
    )
    assert surrogate.clipped_high.tolist() == [bound == "high" for bound in bounds]
    assert surrogate.clipped_low.tolist() == [bound == "low" for bound in bounds]
    assert surrogate.clipped_dual.tolist() == [bound == "dual" for bound in bounds]


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0, math.inf, -math.inf, 88.8, -88.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_huge_log_ratio_stays_finite(
    config: PolicyLossConfig, dtype: torch.dtype, log_ratio: float, advantage: float
) -> None:
    log_probs = torch.zeros(1, dtype=dtype, requires_grad=True)
    old = torch.full((1,), -log_ratio, dtype=dtype)
    advantages = torch.full((1,), advantage, dtype=dtype)
    surrogate = clipped_surrogate(importance_log_ratio(log_probs, old), advantages, config)
    assert surrogate.token_loss.isfinite().all()
    # Beyond the clamp nothing pulls, up or down.
    assert gradients(surrogate.token_loss.sum(), log_probs)[0].tolist() == [0.0]


def test_a_clip_counts_only_where_it_binds() -> None:
    def bounds(ratio: float, advantage: float) -> tuple[bool, bool, bool]:
        surrogate = clipped_surrogate(
            torch.tensor([ratio]).log(), torch.tensor([advantage]), PolicyLossConfig(eps_clip_c=3.0)
        )
        masks: tuple[Tensor, ...] = (
            surrogate.clipped_high,
            surrogate.clipped_low,
            surrogate.clipped_dual,
        )
        return tuple(bool(mask) for mask in masks)

    assert bounds(1.5, -1.0) == (False, False, False)
    assert bounds(1.5, 1.0) == (True, False, False)
    assert bounds(0.5, 1.0) == (False, False, False)
    assert bounds(0.5, -1.0) == (False, True, False)
    assert bounds(3.5, -1.0) == (False, False, True)
    assert bounds(3.5, 1.0) == (True, False, False)
    assert bounds(9.0, 0.0) == bounds(0.1, 0.0) == (False, False, False)


def test_a_nan_is_not_hidden() -> None:
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    for config in CONFIGS:
        assert clipped_surrogate(importance_log_ratio(nan, one), one, config).token_loss.isnan()
        assert clipped_surrogate(one, nan, config).token_loss.isnan()


def test_nothing_broadcasts() -> None:
    three = torch.zeros(3)
    with (
        without_type_checker(),
        pytest.raises(ValueError, match="old_log_probs must have the shape"),
    ):
        importance_log_ratio(three, three[:1])
    with without_type_checker(), pytest.raises(ValueError, match="advantages must have the shape"):
        clipped_surrogate(three, three[:1], PolicyLossConfig())
