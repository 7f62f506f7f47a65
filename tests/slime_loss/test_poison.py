"""Masked means masked: whatever an excluded row holds, every result is the same bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_loss import (
    KeptIds,
    LossOutput,
    PolicyLossConfig,
    TokenBatch,
    loss_weights,
    policy_loss,
    sft_loss,
)
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


def run(
    config: PolicyLossConfig | None, seed: int, value: float, label: int, is_on_policy: bool
) -> tuple[LossOutput, list[Tensor]]:
    log_probs, entropy, batch = random_batch(seed, 24)
    batch = batch if config is None else for_config(batch, config)
    batch = replace(batch, old_log_probs=None) if is_on_policy else batch
    log_probs = filled(log_probs, batch.loss_mask, value)
    entropy = filled(entropy, batch.loss_mask, value)
    batch = poisoned(batch, value, label)
    if config is None:
        output = sft_loss(log_probs, batch)
    else:
        output = policy_loss(log_probs, entropy, batch, config)
    output.loss.backward()
    return output, [leaf.grad for leaf in (log_probs, entropy) if leaf.grad is not None]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("is_on_policy", [False, True])
@pytest.mark.parametrize("config", [*CONFIGS.values(), None], ids=[*CONFIGS, "sft"])
def test_poison_at_masked_rows_changes_no_bit(
    config: PolicyLossConfig | None, is_on_policy: bool, poison: float
) -> None:
    for seed in range(3):
        clean, clean_gradients = run(config, seed, 0.0, 0, is_on_policy)
        dirty, dirty_gradients = run(config, seed, poison, 2**40, is_on_policy)
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
