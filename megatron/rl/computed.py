"""What is computed of a rollout before its first step.

The model's old outputs (log-probs, or a critic's values), then advantages and returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from megatron.rl.batching import MicroBatch, build_micro_batch
from megatron.rl.config import RunConfig
from megatron.rl.initialize import Grid
from megatron.rl.rollout import Computed, Rollout, StepPlan
from megatron.rl.step import Trainee
from slime_loss import AdvantageInputs, approximate_kl, compute_advantages


def old_is_engines(config: RunConfig) -> bool:
    """Whether the engine's log-probs are the old policy's: by flag, or for a critic's rewards."""
    return config.loss.use_rollout_logprobs or (config.is_critic and config.advantage.kl_coef > 0)


def needs_pass(rollout: Rollout, config: RunConfig) -> bool:
    """Whether a forward pass gives the old outputs: always of a critic, whose values are rewarded.

    Not of a policy where the engine's log-probs stand for the old ones, and not where a rollout is
    one step, unless its rewards pay for the distance from the reference model: in one step the old
    policy is the current one.
    """
    return config.is_critic or (
        config.loss.loss_type in ("policy_loss", "custom_loss")
        and not config.loss.use_rollout_logprobs
        and (len(rollout.steps) > 1 or config.advantage.kl_coef > 0)
    )


def needs_values(config: RunConfig) -> bool:
    """Whether the rows must bring a critic's values."""
    return config.advantage.advantage_estimator == "ppo" and not config.is_critic


def computed_streams(rollout: Rollout, config: RunConfig) -> frozenset[str]:
    """The streams of TokenBatch that `Computed` gives, the same on every last stage."""
    loss_type, advantage = config.loss.loss_type, config.advantage
    gives_returns = advantage.advantage_estimator == "ppo" and not advantage.is_custom
    is_given = {
        "old_log_probs": not config.is_critic and needs_pass(rollout, config),
        "values": config.is_critic,
        "advantages": loss_type in ("policy_loss", "custom_loss"),
        "returns": loss_type != "sft_loss" and gives_returns,
    }
    return frozenset(name for name, given in is_given.items() if given)


def micro_batch_of(
    rollout: Rollout,
    step: StepPlan,
    pack: tuple[int, ...],
    computed: Computed,
    trainee: Trainee,
) -> MicroBatch:
    """One micro-batch of a step, with every stream that the loss reads on this rank."""
    streams = rollout.streams
    if trainee.grid.is_last_stage:
        streams |= computed_streams(rollout, trainee.config)
    samples = [rollout.trained(step, position, computed) for position in pack]
    return build_micro_batch(samples, streams, trainee.config, trainee.grid)


def old_outputs_of(rollout: Rollout, trainee: Trainee) -> dict[int, Tensor]:
    """The forward-only pass over the whole rollout, under the current weights.

    Gives the log-probs of the response tokens, or of a critic their values, by position.
    Communicates over the pipeline, tensor- and context-parallel groups.
    """
    packs = rollout.packs(trainee.grid.dp_rank)
    micro_batches = [
        build_micro_batch(
            [rollout.trained(step, position, Computed()) for position in pack],
            rollout.streams & {"kept_ids"},
            trainee.config,
            trainee.grid,
        )
        for step, pack in packs
    ]
    outputs = trainee.outputs(micro_batches)
    return {
        position: output
        for (_, pack), of_pack in zip(packs, outputs, strict=bool(outputs))
        for position, output in zip(pack, of_pack, strict=True)
    }


def compute(
    rollout: Rollout, old_outputs: Mapping[int, Tensor], config: RunConfig, grid: Grid
) -> Computed:
    """Advantages and returns of this rank's samples, from old outputs that are known.

    The same inputs on the same ranks give the same bits, so a run that is resumed within a rollout
    computes them again. Communicates over the data-parallel group, without context parallelism:
    ranks that share a sample all know it whole.

    Args:
        rollout: every rank knows all of its rows, and has its own samples.
        old_outputs: as `old_outputs_of` gives them; needed where `needs_pass`.
        config: the run.
        grid: this rank.
    """
    if config.loss.loss_type == "sft_loss" or not grid.is_last_stage:
        return Computed(old_outputs)
    own = rollout.positions(grid.dp_rank)
    inputs = _inputs(rollout, own, old_outputs, config, grid)
    found = compute_advantages(inputs, config.advantage, group=grid.groups.dp)
    returns = found.returns or []
    return Computed(
        {} if config.is_critic else old_outputs,
        old_outputs if config.is_critic else {},
        dict(zip(own, found.advantages, strict=True)),
        dict(zip(own, returns, strict=found.returns is not None)),
    )


def _inputs(
    rollout: Rollout,
    own: list[int],
    old_outputs: Mapping[int, Tensor],
    config: RunConfig,
    grid: Grid,
) -> AdvantageInputs:
    on_device = partial(torch.as_tensor, device=grid.device)
    mine = [rollout.samples[position] for position in own]
    values = None
    if config.is_critic:
        values = [on_device(old_outputs[position]) for position in own]
    elif rollout.rows["has_values"].all():
        values = [on_device(sample.values) for sample in mine]
    return AdvantageInputs(
        rewards=on_device(rollout.rows["reward"].tolist(), dtype=torch.float32),
        group_index=on_device(rollout.rows["group"].tolist()),
        own=on_device(own, dtype=torch.int64),
        loss_mask=[on_device(sample.loss_mask) for sample in mine],
        kl=_kl(rollout, own, old_outputs, config, grid) if config.advantage.kl_coef > 0 else None,
        values=values,
    )


def _kl(
    rollout: Rollout,
    own: list[int],
    old_log_probs: Mapping[int, Tensor],
    config: RunConfig,
    grid: Grid,
) -> list[Tensor]:
    """The KL estimate of the old policy against the reference model, for each own sample."""
    estimates = []
    for position in own:
        sample = rollout.samples[position]
        old = sample.rollout_log_probs if old_is_engines(config) else old_log_probs[position]
        old, reference = (
            torch.as_tensor(stream, device=grid.device) for stream in (old, sample.ref_log_probs)
        )
        estimates.append(approximate_kl(old, reference, config.loss.kl_loss_type))
    return estimates
