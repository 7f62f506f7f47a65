"""The first step is the same number on every layout: loss, gradient norm, every metric."""

from collections.abc import Iterator

import pytest

from tests.megatron.rl.running import running
from tests.megatron.rl.tiny import RUN_FLAGS, write_llama, write_qwen3, write_rollouts
from tests.spawn import World

POLICY = ["--use-rollout-logprobs", "--entropy-coef=0.01", "--rollout-batch-size=4"]
ONE_RANK = {
    "by count": ["--micro-batch-size=2"],
    "all at once": ["--micro-batch-size=16"],
    "by tokens": ["--use-dynamic-batch-size", "--max-tokens-per-gpu=64"],
    "bshd": ["--qkv-format=bshd", "--micro-batch-size=3"],
}
TWO_RANKS = {
    "cp2 all-gather": ["--context-parallel-size=2", "--allgather-cp", "--micro-batch-size=3"],
    "cp2 zigzag": ["--context-parallel-size=2", "--micro-batch-size=3"],
    "cp2 dynamic": [
        "--context-parallel-size=2",
        "--allgather-cp",
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu=40",
    ],
    "tp2": ["--tensor-model-parallel-size=2", "--micro-batch-size=4"],
    "tp2 sp": ["--tensor-model-parallel-size=2", "--sequence-parallel", "--micro-batch-size=4"],
    "tp2 sp bshd": [
        "--tensor-model-parallel-size=2",
        "--sequence-parallel",
        "--qkv-format=bshd",
        "--micro-batch-size=3",
    ],
    "pp2": ["--pipeline-model-parallel-size=2", "--micro-batch-size=4"],
    "pp2 interleaved": [
        "--pipeline-model-parallel-size=2",
        "--num-virtual-stages-per-pipeline-rank=2",
        "--micro-batch-size=4",
    ],
    "pp2 recomputed": [
        "--pipeline-model-parallel-size=2",
        "--recompute-granularity=full",
        "--recompute-method=uniform",
        "--recompute-num-layers=1",
        "--micro-batch-size=4",
    ],
    "dp2": ["--micro-batch-size=3"],
    "dp2 distributed optimizer": ["--use-distributed-optimizer", "--micro-batch-size=3"],
    "dp2 overlap": ["--overlap-grad-reduce", "--micro-batch-size=3"],
}


def first_step(rank: int, world_size: int, argv: list[str]) -> dict[str, float]:
    """Loss, metrics and gradient norm of the first step on this layout."""
    with running(rank, world_size, argv) as run:
        result = run.trainee.step(run.micro_batches())
    assert result.updated
    return {**result.metrics, "grad_norm": result.grad_norm}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    with World(1, timeout_s=120) as one, World(2, timeout_s=120) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def flags(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp(request.param)
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return [
        *RUN_FLAGS,
        *POLICY,
        f"--hf-checkpoint={write(folder / 'hf')}",
        f"--rollout-data={write_rollouts(folder / 'rollouts.jsonl')}",
    ]


@pytest.fixture(scope="module")
def reference(worlds: dict[int, World], flags: list[str]) -> dict[str, float]:
    [result] = worlds[1].run(first_step, 1, [*flags, "--micro-batch-size=1"])
    assert result["grad_norm"] > 0.01
    return result


def assert_same(got: dict[str, float], expected: dict[str, float], name: str) -> None:
    assert got.keys() == expected.keys()
    for metric, value in expected.items():
        assert got[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{name}: {metric}"


@pytest.mark.parametrize("name", ONE_RANK)
def test_packing_changes_nothing(
    worlds: dict[int, World], flags: list[str], reference: dict[str, float], name: str
) -> None:
    [result] = worlds[1].run(first_step, 1, [*flags, *ONE_RANK[name]])
    assert_same(result, reference, name)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_layout_changes_nothing(
    worlds: dict[int, World], flags: list[str], reference: dict[str, float], name: str
) -> None:
    for result in worlds[2].run(first_step, 2, [*flags, *TWO_RANKS[name]]):
        assert_same(result, reference, name)
