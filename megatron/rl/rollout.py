"""One rollout, ready to train on: how its samples become optimizer steps.

Every rank makes the whole plan from the same samples, so ranks agree without communication; the
step guard checks that they do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron.rl.batching import TrainedSample
from megatron.rl.config import DataConfig, RunConfig
from megatron.rl.cost import sample_costs
from megatron.rl.packing import plan_micro_batches, steps_of
from megatron.rl.samples import Sample
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
        samples: whole prompt groups.
        steps: every sample is in exactly one of them.
        streams: the optional TokenBatch streams that the rows give and the run reads.
    """

    number: int
    samples: tuple[Sample, ...]
    steps: tuple[StepPlan, ...]
    streams: frozenset[str]

    def packs(self, dp_rank: int) -> list[tuple[StepPlan, tuple[int, ...]]]:
        """Every micro-batch of one data-parallel rank, step by step: step and positions."""
        return [(step, pack) for step in self.steps for pack in step.micro_batches[dp_rank]]

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

    def digest(self, step: StepPlan) -> int:
        """A checksum of the step's samples and of where each is trained."""
        ids = [np.asarray(step.positions)]
        ids += [self.samples[position].tokens for position in step.positions]
        ids += [
            np.asarray([rank, *pack])
            for rank, packs in enumerate(step.micro_batches)
            for pack in packs
        ]
        checksum = 0
        for part in ids:
            checksum = zlib.crc32(part.astype(np.int64).tobytes(), checksum)
        return checksum


def plan_rollout(number: int, samples: Sequence[Sample], config: RunConfig) -> Rollout:
    """Steps, weights and micro-batches of one rollout."""
    steps = steps_of(len(samples), step_size(len(samples), config.data))
    return Rollout(
        number=number,
        samples=tuple(samples),
        steps=tuple(_plan_step(positions, samples, config) for positions in steps),
        streams=_streams(samples, config),
    )


def step_size(num_samples: int, data: DataConfig) -> int:
    """Samples of each optimizer step of a rollout; the last step may be smaller."""
    return data.global_batch_size or math.ceil(num_samples / (data.num_steps_per_rollout or 1))


def num_steps(num_samples: int, data: DataConfig) -> int:
    """Optimizer steps of a rollout."""
    return math.ceil(num_samples / step_size(num_samples, data))


def _streams(samples: Sequence[Sample], config: RunConfig) -> frozenset[str]:
    """What the flags ask for; the engine's log-probs also where they are a metric alone."""
    loss_type = config.loss.loss_type
    is_policy = loss_type in ("policy_loss", "custom_loss")
    has_values = loss_type == "custom_loss" and have(samples, "values")
    is_read = {
        "rollout_log_probs": is_policy and have(samples, "rollout_log_probs"),
        "ref_log_probs": config.loss.use_kl_loss,
        "kept_ids": config.data.rollout_top_p < 1,
        "values": has_values,
    }
    return frozenset(name for name, read in is_read.items() if read)


def have(samples: Sequence[Sample], stream: str) -> bool:
    """Whether every sample of the rollout has the optional stream."""
    return all(getattr(sample, stream) is not None for sample in samples)


def _plan_step(positions: Iterable[int], samples: Sequence[Sample], config: RunConfig) -> StepPlan:
    positions = tuple(positions)
    chosen = [samples[position] for position in positions]
    weights = sample_weights(
        torch.tensor([sample.num_trained_tokens for sample in chosen]),
        aggregation=config.aggregation.aggregation,
        count_masked_samples=config.aggregation.count_masked_samples,
        rollout_index=torch.tensor([sample.rollout_index for sample in chosen]),
        group_index=torch.tensor([sample.group_index for sample in chosen]),
        constant=config.aggregation.loss_aggregation_constant,
    )
    dynamic = config.data.use_dynamic_batch_size
    lengths = [sample.total_length for sample in chosen]
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
