"""Samples become micro-batches: whole-pack streams, made once and cut for this rank by a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.rl.attention import PackedRows
from megatron.rl.config import RunConfig
from megatron.rl.initialize import Grid
from megatron.rl.model import rotary_of
from megatron.rl.samples import Sample
from slime_loss import (
    IGNORED_LABEL,
    ContiguousLayout,
    KeptIds,
    PaddedLayout,
    SequenceLayout,
    TokenBatch,
    ZigzagLayout,
)


@dataclass(frozen=True)
class TrainedSample:
    """A sample and what is known of it by the time it is trained on.

    Args:
        sample: the rollout row.
        weight: of every one of its trained tokens in the step's loss (loss = sum of weight * x).
        advantages: [response_length] fp32; these four are None where nothing reads them.
        returns: [response_length] fp32.
        old_log_probs: [response_length] fp32.
        values: [response_length] fp32.
    """

    sample: Sample
    weight: float
    advantages: Tensor | None = None
    returns: Tensor | None = None
    old_log_probs: Tensor | None = None
    values: Tensor | np.ndarray | None = None


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank.

    Args:
        samples: the pack's samples, in order.
        layout: which pack row each local row holds.
        input_ids: [b, s] int64.
        position_ids: [b, s] int64.
        rows: what attention must know.
        batch: what the head must know; local rows.
    """

    samples: tuple[TrainedSample, ...]
    layout: SequenceLayout
    input_ids: Tensor
    position_ids: Tensor
    rows: PackedRows
    batch: TokenBatch

    def sample_at(self, local_row: int) -> tuple[Sample, int]:
        """The sample that a local row belongs to, and the row's position in it."""
        pack_row = int(self.layout.token_index[local_row])
        for trained in self.samples:
            if pack_row < trained.sample.total_length:
                return trained.sample, pack_row
            pack_row -= trained.sample.total_length
        raise AssertionError(f"local row {local_row} is padding")

    def per_sample(self, stream: Tensor) -> list[Tensor]:
        """Cut a whole-pack stream [pack rows] into each sample's response [response_length]."""
        parts = stream.split(list(self.layout.total_lengths))
        return [
            part[t.sample.prompt_length - 1 : t.sample.total_length - 1]
            for part, t in zip(parts, self.samples, strict=True)
        ]


def layout_of(total_lengths: Sequence[int], config: RunConfig, grid: Grid) -> SequenceLayout:
    """The row layout that the flags name, for this rank and these samples."""
    multiple = config.layout.row_multiple
    if config.model.qkv_format == "bshd":
        return PaddedLayout(total_lengths, pad_to_multiple_of=multiple)
    kind = ContiguousLayout if config.model.allgather_cp or grid.cp_size == 1 else ZigzagLayout
    return kind(
        total_lengths, cp_rank=grid.cp_rank, cp_size=grid.cp_size, pad_to_multiple_of=multiple
    )


def build_micro_batch(
    samples: Sequence[TrainedSample], streams: frozenset[str], config: RunConfig, grid: Grid
) -> MicroBatch:
    """Lay samples end to end and cut this rank's rows out of every stream.

    Args:
        samples: the pack; may be empty.
        streams: the optional streams of TokenBatch to build. Every rank must name the same ones,
            whatever samples it holds, since the metrics depend on them.
        config: the run.
        grid: this rank.
    """
    layout = layout_of([t.sample.total_length for t in samples], config, grid)
    positions = layout.shard(_concatenate([torch.arange(t.sample.total_length) for t in samples]))
    input_ids = layout.shard(_concatenate([torch.from_numpy(t.sample.tokens) for t in samples]))
    rows = PackedRows.of(
        layout, config.model.qkv_format, rotary_of(config).table(positions), grid.device
    )
    return MicroBatch(
        samples=tuple(samples),
        layout=layout,
        input_ids=_as_batch(input_ids, layout).to(grid.device),
        position_ids=_as_batch(positions, layout).to(grid.device),
        rows=rows,
        batch=_token_batch(samples, streams, layout, grid.device),
    )


def _as_batch(stream: Tensor, layout: SequenceLayout) -> Tensor:
    """[local rows] as core's [b, s]: one long row for thd, a row a sample for bshd."""
    if isinstance(layout, PaddedLayout):
        return stream.view(layout.seq_length, layout.batch_size).T.contiguous()
    return stream[None]


def _token_batch(
    samples: Sequence[TrainedSample],
    streams: frozenset[str],
    layout: SequenceLayout,
    device: torch.device,
) -> TokenBatch:
    rows = [t.sample for t in samples]
    values = {
        "loss_weight": [t.weight for t in samples],
        "advantages": [t.advantages for t in samples],
        "returns": [t.returns for t in samples],
        "old_log_probs": [t.old_log_probs for t in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in rows],
        "ref_log_probs": [s.ref_log_probs for s in rows],
        "values": [t.values for t in samples],
    }
    labels = _concatenate([_next_tokens(sample) for sample in rows])
    owners = _concatenate([torch.full((s.total_length,), i) for i, s in enumerate(rows)])
    loss_mask = _responses(rows, [sample.loss_mask for sample in rows], False)
    return TokenBatch(
        labels=layout.shard(labels, IGNORED_LABEL).to(device),
        loss_mask=layout.shard(loss_mask, False).to(device),
        sample_index=layout.shard(owners, -1).to(device),
        num_trained_tokens=torch.tensor(
            [sample.num_trained_tokens for sample in rows], dtype=torch.int64, device=device
        ),
        kept_ids=_kept_ids(rows, layout, device) if "kept_ids" in streams else None,
        **{
            name: layout.shard(_responses(rows, value, 0.0), 0.0).to(device)
            for name, value in values.items()
            if name == "loss_weight" or name in streams
        },
    )


def _concatenate(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _next_tokens(sample: Sample) -> Tensor:
    tokens = torch.from_numpy(sample.tokens)
    return torch.cat([tokens[1:], tokens.new_full((1,), IGNORED_LABEL)])


def _responses(
    samples: Sequence[Sample], values: Sequence[Tensor | np.ndarray | float], fill: float | bool
) -> Tensor:
    """A whole-pack stream that holds each response token's value on the row that predicts it."""
    dtype = torch.bool if isinstance(fill, bool) else torch.float32
    stream = torch.full((sum(s.total_length for s in samples),), fill, dtype=dtype)
    start = 0
    for sample, value in zip(samples, values, strict=True):
        rows = slice(start + sample.prompt_length - 1, start + sample.total_length - 1)
        stream[rows] = torch.as_tensor(value, dtype=dtype)
        start += sample.total_length
    return stream


def _kept_ids(samples: Sequence[Sample], layout: SequenceLayout, device: torch.device) -> KeptIds:
    counts = [np.zeros(sample.total_length, dtype=np.int64) for sample in samples]
    for sample, count in zip(samples, counts, strict=True):
        count[sample.prompt_length - 1 : sample.total_length - 1] = np.diff(sample.kept_offsets)
    ids = np.concatenate([np.zeros(0, np.int64), *(sample.kept_ids for sample in samples)])
    offsets = np.concatenate([[0], *counts]).cumsum()
    local = KeptIds(torch.from_numpy(ids), torch.from_numpy(offsets)).select(layout.token_index)
    return KeptIds(local.ids.to(device), local.offsets.to(device))
