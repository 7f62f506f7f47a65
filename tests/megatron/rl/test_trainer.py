"""One rollout of each estimator, objective, correction and aggregation through the whole loop."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.rl import cpu_backend, initialize
from megatron.rl.arguments import resolve
from megatron.rl.build import build_trainer
from megatron.rl.initialize import process_grid
from tests.megatron.rl.objectives import HERE
from tests.megatron.rl.tiny import (
    MODEL_FLAGS,
    RUN_FLAGS,
    near_uniform,
    with_every_field,
    write_rollouts,
)
from tests.spawn import World

TIS = ["--use-tis", "--tis-clip=1.5", "--tis-clip-low=0.1"]
REJECTION = ["--use-rs", "--rs-upper-bound=3"]
RUNS = {
    **{
        name: [f"--advantage-estimator={name}"]
        for name in ("grpo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce_plus_plus", "ppo")
    },
    "baseline with kl": [
        "--advantage-estimator=reinforce_plus_plus_baseline",
        "--kl-coef=0.1",
        "--kl-loss-type=k2",
        "--normalize-advantages",
    ],
    "kl in one step": [
        "--advantage-estimator=reinforce_plus_plus",
        "--kl-coef=0.1",
        "--global-batch-size=16",
    ],
    "kl from the engine's": [
        "--advantage-estimator=ppo",
        "--kl-coef=0.1",
        "--use-rollout-logprobs",
    ],
    "reinforce": ["--policy-objective=reinforce"],
    "dual clip": ["--eps-clip-c=3"],
    "kl loss": ["--use-kl-loss", "--kl-loss-coef=0.1", "--use-unbiased-kl"],
    "own advantages": [f"--custom-advantage-function-path={HERE}:growing", "--gamma=0.5"],
    "own numbers": [f"--custom-advantage-function-path={HERE}:reward_above_half"],
    "own loss": ["--loss-type=custom_loss", f"--custom-loss-function-path={HERE}:likelihood"],
    "imitation": ["--loss-type=sft_loss"],
    "tis": TIS,
    "icepop": [*TIS, "--tis-mode=icepop"],
    "sequence tis": [*TIS, "--tis-level=sequence"],
    "geometric tis": [*TIS, "--tis-level=geometric"],
    "own weights": ["--use-tis", f"--custom-tis-function-path={HERE}:halved"],
    "rejection": REJECTION,
    "rejection of samples": [*REJECTION, "--rs-level=geometric", "--rs-veto-threshold=1e-6"],
    "opsm": ["--use-opsm", "--opsm-delta=0.01"],
    "rollout mean": ["--loss-aggregation=rollout_mean"],
    "prompt mean": ["--loss-aggregation=prompt_mean"],
    "token mean": ["--calculate-per-token-loss"],
    "constant": ["--loss-aggregation=constant", "--loss-aggregation-constant=24"],
}


def train(rank: int, argv: list[str]) -> tuple[int, int]:
    """The whole run in this process; its exit code and the steps taken."""
    cpu_backend.install()
    config = resolve(argv, 1, has_driver=False)
    world = initialize.World(rank, rank, 1, launched=True)
    with process_grid(config, world, torch.device("cpu")) as grid:
        trainer = build_trainer(config, grid)
        return trainer.run(), trainer.progress.step


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    with World(1, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    return [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        "--rollout-batch-size=4",
        "--global-batch-size=8",
        "--micro-batch-size=4",
        f"--rollout-data={write_rollouts(data, near_uniform(with_every_field()))}",
    ]


@pytest.mark.parametrize("name", RUNS)
def test_a_rollout_is_trained(one_rank: World, flags: list[str], tmp_path: Path, name: str) -> None:
    argv = [*flags, *RUNS[name], f"--tensorboard-dir={tmp_path}"]
    [(code, steps)] = one_rank.run(train, argv)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    num_steps = 1 if "--global-batch-size=16" in argv else 2
    assert (code, steps, len(rows)) == (0, num_steps, num_steps)
    for row in rows:
        assert row["skipped-iterations"] == 0
        assert 0 < row["grad-norm"] < 1e3
        assert math.isfinite(row["train/loss"])
        assert row["rollout/dropped_samples"] == 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    has_ratio = not {"imitation", "own loss"} & {name}
    assert ("train/ratio" in events.Tags()["distributions"]) == has_ratio
    assert not any(isinstance(value, dict | list) for row in rows for value in row.values())
