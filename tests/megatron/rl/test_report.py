"""How a step was dealt to ranks, as its metrics say it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.rl.arguments import resolve
from megatron.rl.config import RunConfig
from megatron.rl.cost import sample_costs
from megatron.rl.data import check_data, make_source
from megatron.rl.initialize import Grid, World
from megatron.rl.report import packing_scalars, rollout_scalars
from megatron.rl.rollout import Rollout, read_rollout
from megatron.rl.watch import Watch
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, write_rollouts

LENGTHS = (10, 7, 3, 3)


def grid_of(cp_size: int) -> Grid:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: cp_size)
    world = World(0, 0, 2 * cp_size, launched=True)
    return Grid(world, SimpleNamespace(cp=group), torch.device("cpu"), Watch(0, 2))


def planned(tmp_path: Path, flags: str, cp_size: int) -> tuple[RunConfig, Rollout]:
    """Samples of these lengths, half of each its response, as two replicas train them."""
    samples = [
        {"tokens": [1] * length, "response_length": length // 2, "reward": 1.0, "group_index": 0}
        for length in LENGTHS
    ]
    data = write_rollouts(tmp_path / "rollouts.jsonl", samples)
    argv = [*MODEL_FLAGS, *RUN_FLAGS, f"--rollout-data={data}", *flags.split()]
    argv += [f"--context-parallel-size={cp_size}", "--no-shuffle"]
    config = resolve(argv, 2 * cp_size, has_driver=False)
    return config, read_rollout(
        0, make_source(config, check_data(config)).rollout(0, 0), config, dp_rank=0
    )


@pytest.mark.parametrize(
    ("flags", "cp_size", "micro_batches", "ranks", "fill", "rows"),
    [
        ("", 1, 2, [[10, 3], [7, 3]], None, 23),
        ("--qkv-format=bshd --micro-batch-size=2", 1, 1, [[10, 3], [7, 3]], None, 20 + 14),
        ("--use-dynamic-batch-size --max-tokens-per-gpu=16", 1, 1, [[10], [7, 3, 3]], 23 / 32, 23),
        # 10 is padded to 12, and 7, 3 and 3 to 8, 4 and 4
        ("--use-dynamic-batch-size --max-tokens-per-gpu=8", 2, 1, [[10], [7, 3, 3]], 23 / 32, 28),
        # 10 and an empty micro-batch of a row a rank, 7 alone, 3 and 3
        ("--use-dynamic-batch-size --max-tokens-per-gpu=5", 2, 2, [[10], [7, 3, 3]], 23 / 40, 30),
        # slices of 5 and 5, of 7 and 7
        (
            "--use-dynamic-batch-size --max-tokens-per-gpu=8 --allgather-cp",
            2,
            1,
            [[10], [7, 3, 3]],
            23 / 32,
            24,
        ),
    ],
)
def test_fill_balance_and_padding_of_a_step(
    flags: str,
    cp_size: int,
    micro_batches: int,
    ranks: list[list[int]],
    fill: float | None,
    rows: int,
    tmp_path: Path,
) -> None:
    config, rollout = planned(tmp_path, flags, cp_size)
    scalars = packing_scalars(rollout, rollout.steps[0], config, grid_of(cp_size))
    costs = [sum(sample_costs(lengths, config)) for lengths in ranks]
    expected = {
        "perf/micro_batches": micro_batches,
        "perf/rank_imbalance": 2 * max(costs) / sum(costs),
        "perf/padding_share": 1 - 23 / rows,
    }
    if fill is not None:
        expected["perf/packing_fill"] = fill
    assert scalars == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("flags", "cp_size", "lengths"),
    [
        ("--max-position-embeddings=8", 1, [8, 7, 3, 3]),
        ("--use-dynamic-batch-size --max-tokens-per-gpu=6", 1, [6, 6, 3, 3]),
        ("--use-dynamic-batch-size --max-tokens-per-gpu=3", 2, [6, 6, 3, 3]),
        ("--use-dynamic-batch-size --max-tokens-per-gpu=10", 1, [10, 7, 3, 3]),
    ],
)
def test_samples_are_cut_to_the_model_or_the_pack_and_counted(
    flags: str, cp_size: int, lengths: list[int], tmp_path: Path
) -> None:
    _, rollout = planned(tmp_path, f"{flags} --truncate-samples", cp_size)
    assert rollout.rows["total_length"].tolist() == lengths
    num_cut = sum(new < old for new, old in zip(lengths, LENGTHS, strict=True))
    assert dict(rollout_scalars(rollout.rows))["cut_samples"] == num_cut
