"""Masked means masked: whatever an excluded row holds, every result is the same bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_loss import (
    ContiguousLayout,
    KeptIds,
    LossOutput,
    PolicyLossConfig,
    TokenBatch,
    ZigzagLayout,
    loss_weights,
    policy_loss,
    sft_loss,
)
from tests.slime_loss import reference_policy
from tests.slime_loss.correction_configs import ALL
from tests.slime_loss.references import for_config, random_batch

POISONS = [math.nan, math.inf, -math.inf, 1e30, -1e30]
CONFIGS = {
    "plain": PolicyLossConfig(),
    "dual, entropy": PolicyLossConfig(eps_clip_high=0.3, eps_clip_c=1.2, entropy_coef=0.1),
    "engine": PolicyLossConfig(use_rollout_logprobs=True),
    "k1": PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.1),
    "k2": PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2"),
    "k3": PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"),
    "low_var_kl, unbiased": PolicyLossConfig(
        use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_unbiased_kl=True
    ),
    **ALL,
}
FLOATS = ("loss_weight", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")


def filled(stream: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask, stream.detach(), value).requires_grad_(stream.requires_grad)


def poisoned(batch: TokenBatch, value: float, label: int) -> TokenBatch:
    streams = {name: getattr(batch, name) for name in FLOATS if getattr(batch, name) is not None}
    changed = {name: filled(stream, batch.loss_mask, value) for name, stream in streams.items()}
    return replace(
        batch,
        labels=torch.where(batch.loss_mask, batch.labels, label),
        sample_index=torch.where(batch.loss_mask, batch.sample_index, label),
        **changed,
    )


def cut(
    log_probs: Tensor, entropy: Tensor, batch: TokenBatch, kind: type | None
) -> tuple[Tensor, Tensor, TokenBatch]:
    """All rows in a layout with padding rows; leaves as they came from the model."""
    if kind is None:
        return log_probs, entropy, batch
    lengths = batch.sample_index.unique(return_counts=True)[1].tolist()
    layout = kind(lengths, pad_to_multiple_of=7)
    fills = {"labels": -100, "sample_index": -1}
    streams = {
        name: layout.shard(stream, fills.get(name, 0))
        for name, stream in vars(batch).items()
        if isinstance(stream, Tensor) and name != "num_trained_tokens"
    }
    leaves = (layout.shard(leaf.detach()).requires_grad_() for leaf in (log_probs, entropy))
    return *leaves, replace(batch, **streams)


def make_rows(
    config: PolicyLossConfig | None, seed: int, is_on_policy: bool, kind: type | None = None
) -> tuple[Tensor, Tensor, TokenBatch]:
    log_probs, entropy, batch = random_batch(seed, 24)
    batch = batch if config is None else for_config(batch, config)
    batch = replace(batch, old_log_probs=None) if is_on_policy else batch
    return cut(log_probs, entropy, batch, kind)


def run(
    config: PolicyLossConfig | None, log_probs: Tensor, entropy: Tensor, batch: TokenBatch
) -> tuple[LossOutput, list[Tensor]]:
    if config is None:
        output = sft_loss(log_probs, batch)
    else:
        output = policy_loss(log_probs, entropy, batch, config)
    output.loss.backward()
    return output, [leaf.grad for leaf in (log_probs, entropy) if leaf.grad is not None]


def assert_identical(
    dirty_run: tuple[LossOutput, list[Tensor]], clean_run: tuple[LossOutput, list[Tensor]]
) -> None:
    (dirty, dirty_gradients), (clean, clean_gradients) = dirty_run, clean_run
    assert torch.equal(dirty.loss, clean.loss)
    assert clean.loss.isfinite()
    assert len(dirty_gradients) == len(clean_gradients) > 0
    for dirty_gradient, clean_gradient in zip(dirty_gradients, clean_gradients, strict=True):
        assert torch.equal(dirty_gradient, clean_gradient)
        assert clean_gradient.isfinite().all()
    assert dirty.first_nonfinite_row.item() == clean.first_nonfinite_row.item() == -1
    assert list(dirty.metrics) == list(clean.metrics)
    for name, metric in dirty.metrics.items():
        assert torch.equal(metric.value, clean.metrics[name].value), name


@pytest.mark.parametrize("kind", [None, ContiguousLayout, ZigzagLayout])
@pytest.mark.parametrize("is_on_policy", [False, True])
@pytest.mark.parametrize("config", [*CONFIGS.values(), None], ids=[*CONFIGS, "sft"])
def test_poison_at_masked_rows_changes_no_bit(
    config: PolicyLossConfig | None, is_on_policy: bool, kind: type | None
) -> None:
    log_probs, entropy, batch = make_rows(config, 0, is_on_policy, kind)
    results = []
    for value, label in ((0.0, 0), *((poison, 2**40) for poison in POISONS)):
        leaves = [filled(leaf, batch.loss_mask, value) for leaf in (log_probs, entropy)]
        results.append(run(config, *leaves, poisoned(batch, value, label)))
    for dirty in results[1:]:
        assert_identical(dirty, results[0])


REJECTING = {name: config for name, config in ALL.items() if config.use_rs or config.use_opsm}


@pytest.mark.parametrize("config", REJECTING.values(), ids=REJECTING)
def test_poison_at_rejected_rows_changes_no_bit(config: PolicyLossConfig) -> None:
    num_rejected = 0
    for seed in range(3):
        log_probs, entropy, batch = make_rows(config, seed, False)
        expected = run(config, log_probs, entropy, batch)
        accepted = torch.zeros_like(batch.loss_mask)
        accepted[reference_policy.correct(log_probs, batch, config).accepted] = True
        num_rejected += int((batch.loss_mask & ~accepted).sum())
        # What opsm reads to reject a token, it does read.
        names = ["ref_log_probs"] if config.use_opsm else ["ref_log_probs", "advantages"]
        for poison in POISONS:
            streams = {name: filled(getattr(batch, name), accepted, poison) for name in names}
            leaves = [
                leaf.detach().clone().requires_grad_()
                if leaf is log_probs and config.use_opsm
                else filled(leaf, accepted, poison)
                for leaf in (log_probs, entropy)
            ]
            labels = torch.where(accepted, batch.labels, 2**40)
            dirty = replace(batch, labels=labels, **streams)
            assert_identical(run(config, *leaves, dirty), expected)
    assert num_rejected > 0


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean"])
@pytest.mark.parametrize("index", [-(2**40), -1, 0, 2**40])
def test_the_sample_of_a_masked_row_changes_no_weight(aggregation: str, index: int) -> None:
    _, _, batch = random_batch(0, 24)
    mask = batch.loss_mask
    clean = loss_weights(mask, batch.sample_index, aggregation=aggregation)
    poisoned_index = torch.where(mask, batch.sample_index, index)
    assert torch.equal(loss_weights(mask, poisoned_index, aggregation=aggregation), clean)


@pytest.mark.parametrize("label", [-1, -100, 50_000, 2**62, -(2**62)])
def test_a_label_out_of_range_never_leaves_a_masked_row(label: int) -> None:
    _, _, batch = random_batch(0, 24)
    dirty = replace(batch, labels=torch.where(batch.loss_mask, batch.labels, label))
    assert torch.equal(dirty.trained_labels, batch.trained_labels)
    assert (batch.trained_labels == -100).sum() == (~batch.loss_mask).sum()


def test_an_id_out_of_range_in_kept_ids_marks_no_column() -> None:
    ids = torch.tensor([2, 2**40, -(2**40), 1])
    mask = KeptIds(ids, torch.tensor([0, 2, 4])).mask(0, 4)
    assert mask.tolist() == [[False, False, True, False], [False, True, False, False]]
