"""One rollout, ready to train on: how its samples become optimizer steps.

Every rank makes the whole plan from the same row index, so ranks agree without communication, and
reads no other samples than those it trains; the step guard checks that the plans are the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron.rl.batching import TrainedSample
from megatron.rl.config import DataConfig, RunConfig
from megatron.rl.cost import sample_costs
from megatron.rl.packing import plan_micro_batches, steps_of
from megatron.rl.samples import Sample
from megatron.rl.sources import RolloutRows
from slime_loss import sample_weights


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step.

    Args:
        positions: the step's samples, as positions in the rollout.
        weights: [len(positions)] float64, weight of each trained token of a sample in the loss.
        micro_batches: positions of the samples of each micro-batch, [dp rank][micro-batch].
    """

    positions: tuple[int, ...]
    weights: tuple[float, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every data-parallel rank."""
        return len(self.micro_batches[0])

    @cached_property
    def weight_of(self) -> dict[int, float]:
        """Token weight by position."""
        return dict(zip(self.positions, self.weights, strict=True))


@dataclass(frozen=True)
class Computed:
    """What is computed of a rollout before its first step, [response_length] by position in it.

    It covers this data-parallel rank's samples, on the last pipeline stage; elsewhere, and where
    the run reads none of it, a mapping is empty.

    Args:
        old_log_probs: fp32, nats, where they come from a pass of their own.
        values: fp32, of the critic in training.
        advantages: fp32.
        returns: fp32, what a critic learns.
    """

    old_log_probs: Mapping[int, Tensor] = field(default_factory=dict)
    values: Mapping[int, Tensor] = field(default_factory=dict)
    advantages: Mapping[int, Tensor] = field(default_factory=dict)
    returns: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """Samples, cut into steps.

    Args:
        number: which rollout of the run this is, from 0.
        rows: the samples' records in the row index, whole prompt groups, `ROW_DTYPE` [N].
        steps: every sample is in exactly one of them.
        streams: the optional TokenBatch streams that the rows give and the run reads.
        samples: those that this data-parallel rank trains, by position in `rows`.
        scalars: what its source tells of it, by TensorBoard name.
    """

    number: int
    rows: np.ndarray
    steps: tuple[StepPlan, ...]
    streams: frozenset[str]
    samples: Mapping[int, Sample] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def packs(self, dp_rank: int) -> list[tuple[StepPlan, tuple[int, ...]]]:
        """Every micro-batch of one data-parallel rank, step by step: step and positions."""
        return [(step, pack) for step in self.steps for pack in step.micro_batches[dp_rank]]

    def positions(self, dp_rank: int) -> list[int]:
        """The samples that one data-parallel rank trains, step by step."""
        return [position for _, pack in self.packs(dp_rank) for position in pack]

    def trained(self, step: StepPlan, position: int, computed: Computed) -> TrainedSample:
        """The sample at `position`, with all that is known of it in `step`."""
        return TrainedSample(
            sample=self.samples[position],
            weight=step.weight_of[position],
            advantages=computed.advantages.get(position),
            returns=computed.returns.get(position),
            old_log_probs=computed.old_log_probs.get(position),
            values=computed.values.get(position, self.samples[position].values),
        )

    @cached_property
    def digest(self) -> int:
        """A checksum of all its samples and of where each is trained.

        Tokens take part by the checksum of their record, which reading compares with the row.
        """
        places = repr([(step.positions, step.micro_batches) for step in self.steps])
        return zlib.crc32(places.encode(), zlib.crc32(self.rows.tobytes()))


def read_rollout(number: int, found: RolloutRows, config: RunConfig, dp_rank: int) -> Rollout:
    """One rollout with the samples that a data-parallel rank trains.

    Raises:
        BadRowsError: a file is not what it was when it was checked.
    """
    rollout = plan_rollout(number, found.files.rows[found.places], config)
    own = rollout.positions(dp_rank)
    samples = found.files.read(found.places[own])
    return replace(
        rollout,
        samples=dict(zip(own, samples, strict=True)),
        scalars={"rollout/dropped_samples": found.files.num_bad_rows, **found.scalars},
    )


def plan_rollout(number: int, rows: np.ndarray, config: RunConfig) -> Rollout:
    """Steps, weights and micro-batches of one rollout, from its rows in the index."""
    steps = steps_of(len(rows), step_size(len(rows), config.data))
    return Rollout(
        number=number,
        rows=rows,
        steps=tuple(_plan_step(positions, rows, config) for positions in steps),
        streams=_streams(rows, config),
    )


def step_size(num_samples: int, data: DataConfig) -> int:
    """Samples of each optimizer step of a rollout; the last step may be smaller."""
    return data.global_batch_size or math.ceil(num_samples / (data.num_steps_per_rollout or 1))


def num_steps(num_samples: int, data: DataConfig) -> int:
    """Optimizer steps of a rollout."""
    return math.ceil(num_samples / step_size(num_samples, data))


def _streams(rows: np.ndarray, config: RunConfig) -> frozenset[str]:
    """What the flags ask for; the engine's log-probs also where they are a metric alone."""
    loss_type = config.loss.loss_type
    is_policy = loss_type in ("policy_loss", "custom_loss")
    has_values = loss_type == "custom_loss" and bool(rows["has_values"].all())
    is_read = {
        "rollout_log_probs": is_policy and bool(rows["has_rollout_log_probs"].all()),
        "ref_log_probs": config.loss.use_kl_loss,
        "kept_ids": config.replays_kept_ids,
        "values": has_values,
    }
    return frozenset(name for name, read in is_read.items() if read)


def _plan_step(positions: Iterable[int], rows: np.ndarray, config: RunConfig) -> StepPlan:
    positions = tuple(positions)
    chosen = rows[list(positions)]
    weights = sample_weights(
        torch.tensor(chosen["num_trained_tokens"].tolist()),
        aggregation=config.aggregation.aggregation,
        count_masked_samples=config.aggregation.count_masked_samples,
        rollout_index=torch.tensor(chosen["rollout"].tolist()),
        group_index=torch.tensor(chosen["group"].tolist()),
        constant=config.aggregation.loss_aggregation_constant,
    )
    dynamic = config.data.use_dynamic_batch_size
    lengths = chosen["total_length"].tolist()
    plan = plan_micro_batches(
        lengths,
        dp_size=config.layout.data_parallel,
        costs=sample_costs(lengths, config),
        max_tokens=config.layout.tokens_per_pack if dynamic else None,
        micro_batch_size=None if dynamic else config.data.micro_batch_size,
        multiple_of=config.layout.micro_batch_multiple,
    )
    return StepPlan(
        positions=positions,
        weights=tuple(weights.tolist()),
        micro_batches=tuple(
            tuple(tuple(positions[i] for i in pack) for pack in rank) for rank in plan
        ),
    )
