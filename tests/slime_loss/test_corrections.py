import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from slime_loss import (
    LossOutput,
    PolicyLossConfig,
    TokenBatch,
    make_objective,
    policy_loss,
    reduce_metrics,
)
from tests.slime_loss import reference_policy
from tests.slime_loss.correction_configs import ALL, OBJECTIVES
from tests.slime_loss.places import Place, Topology
from tests.slime_loss.recording import recorded_collectives
from tests.slime_loss.reference_policy import shown
from tests.slime_loss.references import for_config, gradients, random_batch
from tests.slime_loss.simulated_ranks import simulate


def assert_equals_loop(
    log_probs: Tensor, entropy: Tensor, batch: TokenBatch, config: PolicyLossConfig
) -> LossOutput:
    output = policy_loss(log_probs, entropy, batch, config)
    loss, metrics = reference_policy.policy_loss(log_probs, entropy, batch, config)
    leaves = log_probs, entropy
    assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(gradients(output.loss, *leaves), gradients(loss, *leaves), rtol=1e-12, atol=1e-12)
    found = shown(output)
    if "loss" in metrics:
        assert found == pytest.approx(metrics, rel=1e-12, abs=1e-12, nan_ok=True)
    else:
        assert found["active_tokens"] == found["loss"] == 0.0
        of_loop = {name: found[name] for name in metrics}
        assert of_loop == pytest.approx(metrics, rel=1e-12, abs=1e-12, nan_ok=True)
    return output


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(0, 12),
    spread=st.sampled_from([0.1, 0.6, 3.0, 40.0]),
    has_old=st.booleans(),
)
@settings(derandomize=True, max_examples=12, deadline=None)
def test_loss_gradients_and_metrics_equal_the_loop(
    config: PolicyLossConfig, seed: int, num_rows: int, spread: float, has_old: bool
) -> None:
    log_probs, entropy, batch = random_batch(seed, num_rows, spread=spread)
    batch = for_config(batch, config)
    batch = batch if has_old else replace(batch, old_log_probs=None)
    assert assert_equals_loop(log_probs, entropy, batch, config).loss.requires_grad


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_what_looks_at_whole_samples_makes_one_all_reduce_each_way(
    config: PolicyLossConfig,
) -> None:
    looks = not make_objective(config).is_row_separable
    for num_rows in (0, 7):
        log_probs, entropy, batch = random_batch(0, num_rows)
        batch = replace(for_config(batch, config), num_trained_tokens=torch.ones(3).long())
        with recorded_collectives() as calls:
            output = policy_loss(log_probs, entropy, batch, config)
        # The number of samples is the same on every rank, whatever rows it holds.
        assert [(name, shape[1:]) for name, shape in calls] == [("all_reduce_sum_", (3,))] * looks
        with recorded_collectives() as calls:
            output.loss.backward()
        assert len(calls) == (config.objective == "gspo")
        if looks:
            batch = replace(batch, num_trained_tokens=None)
            with pytest.raises(ValueError, match=r"^num_trained_tokens is needed by \w+"):
                policy_loss(log_probs, entropy, batch, config)


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_a_row_separable_loss_is_a_sum_over_any_selection_of_rows(config: PolicyLossConfig) -> None:
    objective = make_objective(config)
    if not objective.is_row_separable:
        return
    log_probs, entropy, batch = random_batch(1, 20)
    batch = for_config(batch, config)
    whole = objective.function(log_probs, entropy, batch).loss
    rows = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    parts = [
        objective.function(log_probs[part], entropy[part], batch.select(part)).loss
        for part in (rows[:3], rows[3:3], rows[3:])
    ]
    leaves = log_probs, entropy
    assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
    assert_close(gradients(sum(parts), *leaves), gradients(whole, *leaves), rtol=1e-12, atol=1e-12)


def test_which_objectives_are_row_separable() -> None:
    separable = {name for name, config in ALL.items() if make_objective(config).is_row_separable}
    alone = {"ppo", "cispo", "reinforce"}
    by_token = {"truncate token", "icepop token", "rs token"}
    assert separable == alone | {f"{name}, {rule}" for name in alone for rule in by_token}
    assert make_objective(PolicyLossConfig(loss_type="sft_loss")).is_row_separable
    with pytest.raises(ValueError, match=r"^loss_type must be a loss of log-probs"):
        make_objective(PolicyLossConfig(loss_type="value_loss"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_huge_log_ratios_stay_finite(config: PolicyLossConfig, dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([1000.0, -1000.0, math.inf, -math.inf] * 3, dtype=dtype)
    log_probs = torch.full_like(log_ratio, -1.0).requires_grad_()
    entropy = torch.ones_like(log_ratio).requires_grad_()
    batch = TokenBatch(
        labels=torch.zeros(12, dtype=torch.int64),
        loss_mask=torch.ones(12, dtype=torch.bool),
        loss_weight=torch.ones_like(log_ratio),
        # One sample a row: the mean of inf and -inf is no number, and must not be made one.
        sample_index=torch.arange(12),
        num_trained_tokens=torch.ones(12, dtype=torch.int64),
        advantages=torch.tensor([0.0] * 4 + [1.0] * 4 + [-1.0] * 4, dtype=dtype),
        old_log_probs=None if config.use_rollout_logprobs else -1.0 - log_ratio,
        rollout_log_probs=torch.where(log_ratio.isinf(), -1.0, 1.0) - log_ratio.clamp(-900, 900),
        ref_log_probs=torch.linspace(-1000, 1000, 12, dtype=dtype),
    )
    output = policy_loss(log_probs, entropy, batch, config)
    assert output.loss.isfinite()
    for gradient in gradients(output.loss, log_probs, entropy):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_a_nan_is_not_rejected_away(config: PolicyLossConfig) -> None:
    log_probs, entropy, batch = random_batch(2, 12)
    batch = for_config(batch, config)
    row = int(batch.loss_mask.nonzero()[0])
    with torch.no_grad():
        log_probs[row] = math.nan
    output = policy_loss(log_probs, entropy, replace(batch, old_log_probs=None), config)
    assert output.loss.isnan()
    assert output.first_nonfinite_row.item() == row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_low_precision_follows_the_log_probs(config: PolicyLossConfig, dtype: torch.dtype) -> None:
    log_probs, entropy, batch = random_batch(3, 30, spread=0.1)
    batch = for_config(batch, config)
    exact = policy_loss(log_probs, entropy, batch, config)
    narrow, narrow_entropy = (
        leaf.detach().to(dtype).requires_grad_() for leaf in (log_probs, entropy)
    )
    output = policy_loss(narrow, narrow_entropy, batch, config)
    output.loss.backward()
    assert output.loss.dtype == narrow.grad.dtype == dtype
    assert narrow.grad.isfinite().all()
    if dtype == torch.float32:
        assert output.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_corrections_read_no_gradient_from_the_engine_or_the_weights(objective: str) -> None:
    log_probs, entropy, batch = random_batch(4, 12)
    rollout = batch.rollout_log_probs.requires_grad_()
    config = ALL[f"{objective}, everything"]
    batch = replace(batch, rollout_log_probs=rollout, old_log_probs=None)
    policy_loss(log_probs, entropy, batch, config).loss.backward()
    assert rollout.grad is None


def test_dropped_samples_are_counted_once_on_all_ranks_together() -> None:
    log_probs, entropy, batch = random_batch(5, 30)
    config = ALL["ppo, rs geometric"]
    whole = shown(policy_loss(log_probs, entropy, batch, config))["dropped_samples"]
    assert 0 < whole < 10

    def on_rank(place: Place) -> float:
        rows = torch.arange(place.cp_rank, 30, 3)
        part = policy_loss(
            log_probs[rows], entropy[rows], batch.select(rows), config, cp_group=place.cp_group
        )
        return reduce_metrics(part.metrics, place.cp_group).scalars["dropped_samples"]

    found, _ = simulate(Topology(cp_size=3), on_rank)
    assert found == [whole] * 3


def test_a_missing_stream_is_named_with_what_needs_it() -> None:
    log_probs, entropy, batch = random_batch(6, 4)
    batch = replace(batch, rollout_log_probs=None)
    for name, flag in (("ppo, truncate token", "use_tis"), ("ppo, rs token", "use_rs")):
        with pytest.raises(ValueError, match=f"^rollout_log_probs is needed by {flag}: "):
            policy_loss(log_probs, entropy, batch, ALL[name])
