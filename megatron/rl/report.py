"""The numbers of one step under the names that TensorBoard and metrics.jsonl show."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megatron.rl.batching import layout_of
from megatron.rl.config import RunConfig
from megatron.rl.cost import sample_costs
from megatron.rl.initialize import Grid
from megatron.rl.logging import ConsoleLine, memory_scalars
from megatron.rl.packing import balance_of
from megatron.rl.rollout import Rollout, StepPlan
from megatron.rl.samples import Sample
from megatron.rl.step import StepResult

CONSOLE_LOSSES = ("loss", "pg_loss", "kl_loss", "entropy", "train_rollout_logprob_abs_diff")


def step_scalars(
    result: StepResult,
    samples: Sequence[Sample],
    seconds: Mapping[str, float],
    num_bad_rows: int,
    grid: Grid,
) -> dict[str, float]:
    """Everything but the console line's own numbers.

    Args:
        result: what the step did.
        samples: the step's samples, of all ranks.
        seconds: wall time by phase, `train_time` among them.
        num_bad_rows: rows of the rollout files that --bad-rows skip left out.
        grid: this rank.

    Returns:
        `train/*` from the loss, `rollout/*` from the samples, `perf/*`, memory of this rank.
    """
    tokens = sum(sample.total_length for sample in samples)
    perf = dict(seconds)
    perf["step_time"] = sum(seconds.values())
    perf["tokens_per_gpu_per_sec"] = tokens / perf["step_time"] / grid.world.world_size
    return {
        **{f"train/{name}": value for name, value in result.metrics.items()},
        **{f"rollout/{name}": value for name, value in rollout_scalars(samples)},
        "rollout/dropped_samples": num_bad_rows,
        **{f"perf/{name}": value for name, value in perf.items()},
        **memory_scalars(grid.device),
    }


def packing_scalars(
    rollout: Rollout, step: StepPlan, config: RunConfig, grid: Grid
) -> dict[str, float]:
    """How evenly the step is dealt to ranks, and how much of what they compute is no token.

    Returns:
        `perf/micro_batches`, `perf/rank_imbalance`, `perf/padding_share`, and with a token budget
        `perf/packing_fill`.
    """
    lengths = [sample.total_length for sample in rollout.samples]
    balance = balance_of(
        step.micro_batches, lengths, sample_costs(lengths, config), config.layout.tokens_per_pack
    )
    packs = [[lengths[i] for i in pack] for rank in step.micro_batches for pack in rank]
    rows = sum(layout_of(pack, config, grid).num_rows * grid.cp_size for pack in packs)
    scalars = {
        "perf/micro_batches": balance.micro_batches,
        "perf/rank_imbalance": balance.rank_imbalance,
        "perf/padding_share": 1 - sum(map(sum, packs)) / rows,
    }
    return scalars if balance.fill is None else {**scalars, "perf/packing_fill": balance.fill}


def rollout_scalars(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    """Rewards, lengths and masks of the samples of a step."""
    yield from _spread("raw_reward", [sample.reward for sample in samples])
    yield from _spread("response_len", [sample.response_length for sample in samples])
    yield from _spread("total_len", [sample.total_length for sample in samples])
    response_tokens = sum(sample.response_length for sample in samples)
    trained_tokens = sum(sample.num_trained_tokens for sample in samples)
    truncated = sum(sample.status == "truncated" for sample in samples)
    yield "truncated_ratio", truncated / len(samples)
    yield "cut_samples", sum(sample.num_cut_tokens > 0 for sample in samples)
    yield "trained_token_ratio", trained_tokens / response_tokens
    yield "zero_std_group_ratio", _share_of_equal_groups(samples)


def _spread(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    yield f"{name}/mean", statistics.fmean(values)
    yield f"{name}/std", statistics.stdev(values) if len(values) > 1 else 0.0
    yield f"{name}/min", min(values)
    yield f"{name}/max", max(values)


def _share_of_equal_groups(samples: Sequence[Sample]) -> float:
    """Share of prompt groups whose rewards are all equal: they teach nothing."""
    rewards = defaultdict(set)
    for sample in samples:
        rewards[sample.group_index].add(sample.reward)
    return sum(len(group) == 1 for group in rewards.values()) / len(rewards)


def console_line(
    result: StepResult,
    samples: Sequence[Sample],
    *,
    consumed_samples: int,
    learning_rate: float,
    seconds: float,
) -> ConsoleLine:
    """What the console shows of the step."""
    finite = math.isfinite(result.metrics["loss"]) and math.isfinite(result.grad_norm)
    return ConsoleLine(
        consumed_samples=consumed_samples,
        elapsed_ms=1000 * seconds,
        learning_rate=learning_rate,
        global_batch_size=len(samples),
        losses={n: result.metrics[n] for n in CONSOLE_LOSSES if n in result.metrics},
        grad_norm=result.grad_norm,
        num_skipped=int(not result.updated),
        num_nan=int(not finite),
        tokens_per_second=sum(sample.total_length for sample in samples) / seconds,
    )
