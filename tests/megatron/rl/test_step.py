"""A step that is not finite leaves the weights alone and names the sample it came from."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.megatron.rl.running import running
from tests.megatron.rl.tiny import (
    MODEL_FLAGS,
    RUN_FLAGS,
    rollout_rows,
    write_llama,
    write_rollouts,
)
from tests.spawn import World

POISONED_TOKEN = 299
LAYOUTS = {
    "dp2": ["--micro-batch-size=2"],
    "cp2": ["--context-parallel-size=2", "--allgather-cp", "--micro-batch-size=3"],
    "pp2": ["--pipeline-model-parallel-size=2", "--micro-batch-size=4"],
    "pp2 in two chunks each": [
        "--pipeline-model-parallel-size=2",
        "--num-virtual-stages-per-pipeline-rank=2",
        "--micro-batch-size=4",
    ],
    "dp2 overlapped": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--ddp-bucket-size=4000",
        "--micro-batch-size=2",
    ],
    "tp2": ["--tensor-model-parallel-size=2", "--micro-batch-size=16"],
}


def step_twice(rank: int, argv: list[str]) -> list[tuple[str | None, bool, dict[str, float], bool]]:
    """For each of two steps: culprit, updated, metrics, and whether the weights moved."""
    outcomes = []
    with running(rank, 2, argv) as run:
        weights = [p for chunk in run.trainee.chunks for p in chunk.parameters()]
        for step in (0, 1):
            before = [weight.detach().clone() for weight in weights]
            result = run.trainee.step(run.micro_batches(step))
            moved = not all(
                torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
                for old, new in zip(before, weights, strict=True)
            )
            outcomes.append((result.culprit, result.updated, result.metrics, moved))
    return outcomes


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of one token is NaN, untied so that only that token's rows are."""
    directory = write_llama(tmp_path_factory.mktemp("llama") / "hf", tied=False)
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISONED_TOKEN] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def flags(checkpoint: Path, rollouts: Path) -> list[str]:
    return [
        *RUN_FLAGS,
        "--no-shuffle",
        "--rollout-batch-size=4",
        "--global-batch-size=8",
        f"--hf-checkpoint={checkpoint}",
        f"--rollout-data={rollouts}",
    ]


def rows_without_the_token() -> list[dict[str, Any]]:
    rows = rollout_rows()
    for row in rows:
        row["tokens"] = [min(token, POISONED_TOKEN - 1) for token in row["tokens"]]
    return rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_is_not_finite_names_sample_line_and_row(
    two_ranks: World, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    rows = rows_without_the_token()
    prompt_length = len(rows[5]["tokens"]) - rows[5]["response_length"]
    rows[5]["tokens"][prompt_length - 1] = POISONED_TOKEN
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", rows)
    for first, second in two_ranks.run(step_twice, [*flags(checkpoint, rollouts), *LAYOUTS[name]]):
        culprit, updated, metrics, moved = first
        assert culprit is not None
        weights, _, row = culprit.partition("; ")
        assert re.fullmatch(
            r"rank [01], embedding\S+weight has weights that are not finite", weights
        )
        assert row[:8] in ("rank 0, ", "rank 1, ")
        assert row[8:] == f"loss of sample 5 ({rollouts}:6), row {prompt_length - 1}"
        assert not updated
        assert not moved
        assert metrics["loss"] != metrics["loss"]
        assert second[:2] == (None, True)
        assert second[3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gradient_that_is_not_finite_names_the_samples(
    two_ranks: World, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    rows = rows_without_the_token()
    for row in rows:
        row["reward"] = float(row["index"] == 2) * 3e37
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", rows)
    argv = [*flags(checkpoint, rollouts), "--advantage-estimator=dr_grpo", *LAYOUTS[name]]
    for first, second in two_ranks.run(step_twice, argv):
        culprit, updated, metrics, moved = first
        assert abs(metrics["loss"]) < float("inf")
        assert not updated
        assert not moved
        assert culprit is not None
        assert re.match(r"rank [01], gradient of ", culprit)
        assert any(f"{rollouts}:{line})" in culprit for line in (1, 2, 3, 4))
        assert second[1]


def trained_outputs_of(rank: int, argv: list[str]) -> list[int]:
    with running(rank, 2, argv) as run:
        micro_batches = run.micro_batches()
        outputs = run.trainee.outputs(micro_batches)
        assert run.trainee.step(micro_batches).updated
    return [len(values) for of_pack in outputs for values in of_pack]


def test_a_model_with_experts_scores_and_trains(two_ranks: World, tmp_path: Path) -> None:
    rows = rollout_rows()
    argv = [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        "--num-experts=4",
        "--moe-ffn-hidden-size=16",
        "--moe-router-topk=2",
        "--expert-model-parallel-size=2",
        "--rollout-batch-size=4",
        f"--rollout-data={write_rollouts(tmp_path / 'rollouts.jsonl', rows)}",
    ]
    lengths = two_ranks.run(trained_outputs_of, argv)
    assert sorted(lengths[0] + lengths[1]) == sorted(row["response_length"] for row in rows)
