"""The numbers of one step under the names that TensorBoard and metrics.jsonl show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from megatron.rl.batching import layout_of
from megatron.rl.config import RunConfig
from megatron.rl.cost import sample_costs
from megatron.rl.initialize import Grid
from megatron.rl.logging import ConsoleLine, memory_scalars
from megatron.rl.packing import balance_of
from megatron.rl.rollout import Rollout, StepPlan
from megatron.rl.sources.row import STATUSES
from megatron.rl.step import StepResult

CONSOLE_LOSSES = ("loss", "pg_loss", "kl_loss", "entropy", "train_rollout_logprob_abs_diff")


def step_scalars(
    result: StepResult,
    rows: np.ndarray,
    seconds: Mapping[str, float],
    grid: Grid,
) -> dict[str, float]:
    """Everything but the console line's own numbers.

    Args:
        result: what the step did.
        rows: the step's samples, of all ranks, as the row index has them.
        seconds: wall time by phase, `train_time` among them.
        grid: this rank.

    Returns:
        `train/*` from the loss, `rollout/*` from the samples, `perf/*`, memory of this rank.
    """
    tokens = int(rows["total_length"].sum())
    perf = dict(seconds)
    perf["step_time"] = sum(seconds.values())
    perf["tokens_per_gpu_per_sec"] = tokens / perf["step_time"] / grid.world.world_size
    return {
        **{f"train/{name}": value for name, value in result.metrics.items()},
        **{f"rollout/{name}": value for name, value in rollout_scalars(rows)},
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
    lengths = rollout.rows["total_length"].tolist()
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


def rollout_scalars(rows: np.ndarray) -> Iterator[tuple[str, float]]:
    """Rewards, lengths and masks of the samples of a step, `ROW_DTYPE` [N]."""
    yield from _spread("raw_reward", rows["reward"])
    yield from _spread("response_len", rows["response_length"])
    yield from _spread("total_len", rows["total_length"])
    yield "truncated_ratio", float((rows["status"] == STATUSES.index("truncated")).mean())
    yield "cut_samples", int((rows["num_cut_tokens"] > 0).sum())
    response_tokens = rows["response_length"].sum()
    yield "trained_token_ratio", float(rows["num_trained_tokens"].sum() / response_tokens)
    yield "zero_std_group_ratio", _share_of_equal_groups(rows["group"], rows["reward"])


def _spread(name: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    yield f"{name}/mean", float(values.mean())
    yield f"{name}/std", float(values.std(ddof=1)) if len(values) > 1 else 0.0
    yield f"{name}/min", float(values.min())
    yield f"{name}/max", float(values.max())


def _share_of_equal_groups(groups: np.ndarray, rewards: np.ndarray) -> float:
    """Share of prompt groups whose rewards are all equal: they teach nothing."""
    order = np.lexsort((rewards, groups))
    _, first, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    lowest, highest = rewards[order][first], rewards[order][first + sizes - 1]
    return float((lowest == highest).mean())


def console_line(
    result: StepResult,
    rows: np.ndarray,
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
        global_batch_size=len(rows),
        losses={n: result.metrics[n] for n in CONSOLE_LOSSES if n in result.metrics},
        grad_norm=result.grad_norm,
        num_skipped=int(not result.updated),
        num_nan=int(not finite),
        tokens_per_second=int(rows["total_length"].sum()) / seconds,
    )
