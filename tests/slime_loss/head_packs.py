"""Packs of samples with every stream, and the head's loss on them by loops."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_loss import (
    HeadConfig,
    KeptIds,
    LossOutput,
    PolicyLossConfig,
    RLHead,
    TokenBatch,
    policy_loss,
    sft_loss,
)
from slime_loss.layout import SequenceLayout
from tests.slime_loss.reference_log_probs import EXACT, log_probs_of_rows

VOCAB, PADDED_VOCAB, HIDDEN = 11, 16, 5
HEAD = HeadConfig(rollout_temperature=0.7)
CONFIGS = {
    "metric": PolicyLossConfig(),
    "entropy": PolicyLossConfig(entropy_coef=0.01, eps_clip_c=3.0),
    "kl": PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"),
    "sft": PolicyLossConfig(loss_type="sft_loss"),
}


@dataclass
class Pack:
    """A pack of samples: hidden states, the head's weight and every stream."""

    lengths: list[int]
    hidden: Tensor
    weight: Tensor
    batch: TokenBatch

    def local(self, layout: SequenceLayout) -> tuple[Tensor, TokenBatch]:
        """A rank's rows of it."""
        streams = {
            name: layout.shard(stream, fill=-100 if name == "labels" else 0)
            for name, stream in vars(self.batch).items()
            if isinstance(stream, Tensor)
        }
        kept_ids = self.batch.kept_ids.select(layout.token_index)
        return layout.shard(self.hidden), TokenBatch(**streams, kept_ids=kept_ids)


def make_pack(samples: list[tuple[int, int]], *, dtype: torch.dtype = torch.float64) -> Pack:
    """Samples of (total_length, response_length); response 0 is a sample that does not train."""
    generator = torch.Generator().manual_seed(len(samples))
    lengths = [total for total, _ in samples]
    num_rows = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, VOCAB, (num_rows,), generator=generator)
    loss_mask = torch.zeros(num_rows, dtype=torch.bool)
    for sample, (total, response) in enumerate(samples):
        end = sum(lengths[: sample + 1])
        labels[end - 1] = -100
        loss_mask[end - 1 - response : end - 1] = True
        assert response < total
    is_kept = torch.rand(num_rows, VOCAB, generator=generator) < 0.6
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), is_kept.sum(1).cumsum(0)])
    batch = TokenBatch(
        labels=labels,
        loss_mask=loss_mask,
        loss_weight=torch.rand(num_rows, generator=generator, dtype=torch.float64),
        sample_index=torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths).long()),
        advantages=normal(num_rows),
        old_log_probs=0.3 * normal(num_rows) - math.log(VOCAB),
        rollout_log_probs=0.3 * normal(num_rows) - math.log(VOCAB),
        ref_log_probs=0.3 * normal(num_rows) - math.log(VOCAB),
        kept_ids=KeptIds(is_kept.nonzero()[:, 1].contiguous(), offsets),
    )
    hidden = normal(num_rows, HIDDEN).to(dtype).requires_grad_()
    weight = (0.3 * normal(PADDED_VOCAB, HIDDEN)).to(dtype).requires_grad_()
    return Pack(lengths, hidden, weight, batch)


PACKS = {
    "usual": [(9, 4), (2, 1), (30, 20), (5, 1)],
    "shorter than two chunks a rank": [(2, 1)],
    "first sample alone trains": [(6, 3), (26, 0)],
    "last sample alone trains": [(26, 0), (6, 3)],
    "nothing trains": [(4, 0), (7, 0)],
    "empty": [],
}


def head_for(config: PolicyLossConfig, **groups: Any) -> RLHead:
    return RLHead(HEAD, config, vocab_size=VOCAB, **groups)


def by_loops(pack: Pack, config: PolicyLossConfig) -> LossOutput:
    mask = pack.batch.kept_ids.mask(0, PADDED_VOCAB)
    log_probs, entropy = log_probs_of_rows(
        pack.hidden @ pack.weight.t(),
        pack.batch.trained_labels,
        vocab_size=VOCAB,
        temperature=0.7,
        keep_mask=mask,
    )
    if config.loss_type == "sft_loss":
        return sft_loss(log_probs, pack.batch)
    return policy_loss(log_probs, entropy, pack.batch, config)


def assert_same_metrics(ours: LossOutput, theirs: LossOutput) -> None:
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, metric in theirs.metrics.items():
        assert ours.metrics[name].reduction == metric.reduction
        found = ours.metrics[name].value
        torch.testing.assert_close(found, metric.value, equal_nan=True, **EXACT)
