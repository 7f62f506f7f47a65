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
    merge_metrics,
    policy_loss,
    sft_loss,
)
from tests.slime_loss import reference_policy, references
from tests.slime_loss.reference_policy import shown
from tests.slime_loss.references import for_config, gradients, random_batch

KL_TYPES = ["k1", "k2", "k3", "low_var_kl"]
CONFIGS = [
    PolicyLossConfig(),
    PolicyLossConfig(eps_clip=0.1, eps_clip_high=0.4, eps_clip_c=1.2, entropy_coef=0.01),
    PolicyLossConfig(use_rollout_logprobs=True, entropy_coef=-0.3),
    PolicyLossConfig(use_kl_loss=True),
    *[PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type=kind) for kind in KL_TYPES],
    PolicyLossConfig(
        use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", use_unbiased_kl=True, eps_clip_c=2.0
    ),
    PolicyLossConfig(
        use_kl_loss=True,
        kl_loss_coef=1.0,
        kl_loss_type="low_var_kl",
        use_unbiased_kl=True,
        use_rollout_logprobs=True,
        entropy_coef=0.5,
    ),
]
BASE_METRICS = [
    "loss",
    "pg_loss",
    "entropy_loss",
    "entropy",
    "ppo_kl",
    "pg_clipfrac",
    "pg_clipfrac_high",
    "pg_clipfrac_low",
    "pg_clipfrac_dual",
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "advantages_mean",
    "advantages_min",
    "advantages_max",
    "advantages_std",
    "ratio",
    "advantages",
    "train_rollout_logprob_abs_diff",
    "train_rollout_logprob_abs_diff_max",
    "train_rollout_kl",
    "active_tokens",
]


def assert_same(
    output: LossOutput, expected: tuple[Tensor, dict[str, float]], *leaves: Tensor
) -> None:
    loss, metrics = expected
    assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(gradients(output.loss, *leaves), gradients(loss, *leaves), rtol=1e-12, atol=1e-12)
    found = shown(output)
    if "loss" not in metrics:
        # No row is left: sums are 0, and there are no other numbers.
        sums = dict.fromkeys((*reference_policy.PARTS, "active_tokens"), 0.0)
        metrics = dict.fromkeys(found, math.nan) | sums | metrics
        metrics = {name: metrics[name] for name in found}
    assert found == pytest.approx(metrics, rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("config", CONFIGS)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(0, 12),
    spread=st.sampled_from([0.1, 0.6, 3.0]),
    has_old=st.booleans(),
    has_rollout=st.booleans(),
    has_entropy=st.booleans(),
)
@settings(derandomize=True, max_examples=25, deadline=None)
def test_loss_gradients_and_metrics_equal_the_loop(
    config: PolicyLossConfig,
    seed: int,
    num_rows: int,
    spread: float,
    has_old: bool,
    has_rollout: bool,
    has_entropy: bool,
) -> None:
    log_probs, entropy, batch = random_batch(seed, num_rows, spread=spread)
    batch = for_config(batch, config)
    if not has_old:
        batch = replace(batch, old_log_probs=None)
    if not has_rollout and not config.use_rollout_logprobs:
        batch = replace(batch, rollout_log_probs=None)
    if not has_entropy and config.entropy_coef == 0:
        entropy = None
    leaves = [log_probs] if entropy is None else [log_probs, entropy]
    output = policy_loss(log_probs, entropy, batch, config)
    assert_same(output, reference_policy.policy_loss(log_probs, entropy, batch, config), *leaves)
    assert output.first_nonfinite_row.item() == -1


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[-1]])
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 16), max_size=3))
@settings(derandomize=True, max_examples=25, deadline=None)
def test_no_cut_into_micro_batches_changes_anything(
    config: PolicyLossConfig, seed: int, cuts: list[int]
) -> None:
    log_probs, entropy, batch = random_batch(seed, 16)
    batch = for_config(batch, config)
    whole = policy_loss(log_probs, entropy, batch, config)
    starts = [0, *sorted(cuts)]
    parts = []
    for i, j in zip(starts, [*starts[1:], 16], strict=True):
        rows = torch.arange(i, j)
        parts.append(policy_loss(log_probs[rows], entropy[rows], batch.select(rows), config))
    loss = torch.stack([part.loss for part in parts]).sum()
    merged = replace(parts[0], metrics=merge_metrics([part.metrics for part in parts]))
    assert_same(whole, (loss, shown(merged)), log_probs, entropy)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_parts_add_up_to_the_loss(config: PolicyLossConfig) -> None:
    log_probs, entropy, batch = random_batch(3, 20)
    output = policy_loss(log_probs, entropy, for_config(batch, config), config)
    metrics = shown(output)
    parts = (
        metrics["pg_loss"]
        - config.entropy_coef * metrics["entropy_loss"]
        + config.kl_loss_coef * metrics.get("kl_loss", 0.0)
    )
    assert metrics["loss"] == pytest.approx(parts, abs=1e-12)
    assert output.loss.item() == pytest.approx(parts, abs=1e-12)


def test_the_metrics_depend_on_config_and_streams_alone() -> None:
    for seed, num_rows in ((0, 9), (1, 1), (2, 0)):
        log_probs, entropy, batch = random_batch(seed, num_rows)
        output = policy_loss(log_probs, entropy, batch, PolicyLossConfig())
        assert list(output.metrics) == BASE_METRICS
        output = policy_loss(log_probs, entropy, batch, PolicyLossConfig(use_kl_loss=True))
        assert set(output.metrics) == {*BASE_METRICS, "kl_loss"}
        lean = replace(batch, rollout_log_probs=None)
        output = policy_loss(log_probs, None, lean, PolicyLossConfig())
        absent = {name for name in BASE_METRICS if name.startswith(("entropy", "train_rollout"))}
        assert set(output.metrics) == {*BASE_METRICS} - absent


def one_token(ratio: float, advantage: float, **streams: Tensor) -> tuple[Tensor, TokenBatch]:
    log_probs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, dtype=torch.float64)
    batch = TokenBatch(
        labels=torch.zeros(1, dtype=torch.int64),
        loss_mask=torch.ones(1, dtype=torch.bool),
        loss_weight=ones,
        sample_index=torch.zeros(1, dtype=torch.int64),
        advantages=ones * advantage,
        old_log_probs=log_probs.detach() - math.log(ratio),
    )
    return log_probs, replace(batch, **streams)


def test_dual_clip_reaches_the_loss() -> None:
    config = PolicyLossConfig(eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=1.5)
    for ratio, advantage, loss in ((2.0, 2.0, -2.4), (2.0, -2.0, 3.0), (0.5, 2.0, -1.0)):
        log_probs, batch = one_token(ratio, advantage)
        assert policy_loss(log_probs, None, batch, config).loss.item() == pytest.approx(
            loss, abs=1e-12
        )


def test_a_clip_that_does_not_bind_is_not_counted() -> None:
    log_probs, batch = one_token(1.5, -1.0)
    metrics = shown(policy_loss(log_probs, None, batch, PolicyLossConfig()))
    assert {value for name, value in metrics.items() if "clipfrac" in name} == {0.0}
    log_probs, batch = one_token(1.5, 1.0)
    metrics = shown(policy_loss(log_probs, None, batch, PolicyLossConfig()))
    assert metrics["pg_clipfrac"] == metrics["pg_clipfrac_high"] == 1.0


def test_absent_old_log_probs_mean_on_policy() -> None:
    log_probs, entropy, batch = random_batch(5, 10)
    batch = replace(batch, old_log_probs=None)
    output = policy_loss(log_probs, entropy, batch, PolicyLossConfig(eps_clip_c=2.0))
    weighted = torch.where(batch.loss_mask, -batch.loss_weight * batch.advantages, 0.0)
    assert_close(output.loss, weighted.sum(), rtol=1e-12, atol=1e-12)
    assert_close(gradients(output.loss, log_probs), [weighted], rtol=1e-12, atol=1e-12)
    metrics = shown(output)
    assert (metrics["ratio_min"], metrics["ratio_max"], metrics["ppo_kl"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("use_rollout", "has_old", "difference"),
    [(True, False, 3), (False, False, 3), (False, True, 2)],
)
def test_which_log_probs_are_compared_with_the_engine(
    use_rollout: bool, has_old: bool, difference: float
) -> None:
    # The engine gave -4, the policy that began the step -2, the current one gives -1.
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, dtype=torch.float64)
    _, batch = one_token(
        1.0, 1.0, old_log_probs=-2 * ones if has_old else None, rollout_log_probs=-4 * ones
    )
    config = PolicyLossConfig(use_rollout_logprobs=use_rollout)
    metrics = shown(policy_loss(log_probs, None, batch, config))
    assert metrics["train_rollout_logprob_abs_diff"] == difference
    assert metrics["train_rollout_logprob_abs_diff_max"] == difference
    kl = math.exp(difference) - 1 - difference
    assert metrics["train_rollout_kl"] == pytest.approx(kl, rel=1e-12)
    ratio = math.exp(3) if use_rollout else math.exp(1) if has_old else 1.0
    assert metrics["ratio_mean"] == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", CONFIGS)
def test_huge_log_ratios_stay_finite(config: PolicyLossConfig, dtype: torch.dtype) -> None:
    extremes = [1000.0, -1000.0, math.inf, -math.inf, 1000.0, -1000.0, math.inf, -math.inf]
    log_ratio = torch.tensor([*extremes, 1000.0], dtype=dtype)
    log_probs = torch.full_like(log_ratio, -1.0).requires_grad_()
    entropy = torch.ones_like(log_ratio).requires_grad_()
    batch = TokenBatch(
        labels=torch.zeros(9, dtype=torch.int64),
        loss_mask=torch.ones(9, dtype=torch.bool),
        loss_weight=torch.ones_like(log_ratio),
        sample_index=torch.zeros(9, dtype=torch.int64),
        advantages=torch.tensor([1.0] * 4 + [-1.0] * 4 + [0.0], dtype=dtype),
        old_log_probs=None if config.use_rollout_logprobs else -1.0 - log_ratio,
        rollout_log_probs=-1.0 - log_ratio,
        ref_log_probs=torch.linspace(-1000, 1000, 9, dtype=dtype),
    )
    output = policy_loss(log_probs, entropy, batch, config)
    assert output.loss.isfinite()
    assert output.first_nonfinite_row.item() == -1
    for gradient in gradients(output.loss, log_probs, entropy):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["log_probs", "advantages", "ref_log_probs", "loss_weight"])
def test_the_first_trained_row_that_is_not_finite_is_named(name: str, bad: float) -> None:
    config = PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.1)
    log_probs, entropy, batch = random_batch(7, 12)
    log_probs = log_probs.detach()
    batch = replace(batch, loss_mask=torch.arange(12) % 3 != 1)
    # Rows 1 and 4 do not train; of the others, row 6 is the first bad one.
    for row in (1, 4, 6, 8):
        target = log_probs if name == "log_probs" else getattr(batch, name)
        target[row] = bad
    output = policy_loss(log_probs.requires_grad_(), entropy, batch, config)
    assert output.first_nonfinite_row.dtype == torch.int64
    assert output.first_nonfinite_row.item() == 6
    if name in ("log_probs", "loss_weight"):
        assert sft_loss(log_probs, batch).first_nonfinite_row.item() == 6


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_named_even_where_the_clamp_hides_it(bad: float) -> None:
    log_probs, batch = one_token(1.0, 1.0)
    with torch.no_grad():
        log_probs.fill_(bad)
    output = policy_loss(log_probs, None, batch, PolicyLossConfig())
    assert output.loss.isfinite()
    assert output.first_nonfinite_row.item() == 0


def test_a_coefficient_of_zero_keeps_its_term_out_of_the_loss() -> None:
    log_probs, entropy, batch = random_batch(8, 6)
    with torch.no_grad():
        entropy.fill_(math.inf)
    batch = replace(batch, ref_log_probs=torch.full_like(batch.advantages, math.nan))
    output = policy_loss(log_probs, entropy, batch, PolicyLossConfig(use_kl_loss=True))
    assert output.loss.isfinite()
    assert output.first_nonfinite_row.item() == -1
    assert gradients(output.loss, log_probs)[0].isfinite().all()


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_a_rank_without_a_trained_row_stays_connected(num_rows: int, entropy_coef: float) -> None:
    log_probs, entropy, batch = random_batch(9, num_rows)
    batch = replace(batch, loss_mask=torch.zeros(num_rows, dtype=torch.bool))
    config = PolicyLossConfig(entropy_coef=entropy_coef)
    for output in (policy_loss(log_probs, entropy, batch, config), sft_loss(log_probs, batch)):
        assert output.loss.item() == 0.0
        assert output.loss.requires_grad
        [gradient] = torch.autograd.grad(output.loss, log_probs, retain_graph=True)
        assert torch.equal(gradient, torch.zeros(num_rows, dtype=torch.float64))
        assert output.first_nonfinite_row.item() == -1
        assert shown(output)["active_tokens"] == 0.0


def test_streams_follow_the_dtype_of_the_log_probs_and_stay_untouched() -> None:
    log_probs, _, batch = random_batch(10, 8)
    before = batch.select(torch.arange(8))
    narrow = log_probs.detach().float().requires_grad_()
    output = policy_loss(narrow, None, batch, PolicyLossConfig())
    output.loss.backward()
    assert output.loss.dtype == narrow.grad.dtype == torch.float32
    for name in ("advantages", "old_log_probs", "rollout_log_probs", "loss_weight", "labels"):
        assert torch.equal(getattr(batch, name), getattr(before, name))


def test_no_gradient_reaches_a_stream_of_the_batch() -> None:
    config = PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.5, use_unbiased_kl=True)
    log_probs, entropy, batch = random_batch(11, 8)
    names = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "loss_weight")
    streams = {name: getattr(batch, name).requires_grad_() for name in names}
    policy_loss(log_probs, entropy, replace(batch, **streams), config).loss.backward()
    assert log_probs.grad.abs().sum() > 0
    assert all(stream.grad is None for stream in streams.values())


def test_a_missing_or_superfluous_stream_is_named() -> None:
    log_probs, entropy, batch = random_batch(12, 4)
    rollout, kl = PolicyLossConfig(use_rollout_logprobs=True), PolicyLossConfig(use_kl_loss=True)
    on_policy = replace(batch, old_log_probs=None)
    for message, wrong, config in (
        ("advantages is needed by policy_loss", replace(batch, advantages=None), kl),
        ("ref_log_probs is needed by use_kl_loss", replace(batch, ref_log_probs=None), kl),
        ("old_log_probs must be None under use_rollout_logprobs", batch, rollout),
        (
            "rollout_log_probs is needed by use_rollout_logprobs: rollout_log_probs=None",
            replace(on_policy, rollout_log_probs=None),
            rollout,
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            policy_loss(log_probs, entropy, wrong, config)


def test_entropy_in_the_loss_must_have_a_gradient() -> None:
    log_probs, entropy, batch = random_batch(13, 4)
    config = PolicyLossConfig(entropy_coef=0.1)
    for wrong, state in ((None, "entropy=None"), (entropy.detach(), "requires_grad=False")):
        with pytest.raises(ValueError, match=rf"^entropy must be given, with gradient.*{state}"):
            policy_loss(log_probs, wrong, batch, config)
    frozen = policy_loss(log_probs.detach(), entropy.detach(), batch, config)
    assert_close(frozen.loss, policy_loss(log_probs, entropy, batch, config).loss)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    log_probs, entropy, batch = random_batch(14, 4)
    config = PolicyLossConfig()
    for message, args in (
        ("log_probs must have the shape of labels", (log_probs[:1], entropy)),
        ("log_probs must be floating point", (log_probs.detach().long(), entropy)),
        ("entropy must have the shape of labels", (log_probs, entropy[:1])),
    ):
        with references.without_type_checker(), pytest.raises(ValueError, match=message):
            policy_loss(*args, batch, config)
