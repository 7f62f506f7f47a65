"""The first step is the same number on every layout: loss, gradient norm, every metric."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.rl.model import unwrap
from tests.megatron.rl.running import running
from tests.megatron.rl.tiny import (
    RUN_FLAGS,
    rollout_rows,
    with_every_field,
    write_llama,
    write_qwen3,
    write_rollouts,
)
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

REWARDED = ["--kl-coef=0.1", "--gamma=0.95", "--kl-loss-type=k2"]
VARIANTS = {
    "gspo": ["--advantage-estimator=gspo", "--use-rollout-logprobs"],
    "opsm": ["--use-opsm", "--opsm-delta=0.1", "--use-rollout-logprobs"],
    "sequence tis": ["--use-tis", "--tis-level=sequence", "--tis-clip=1e6"],
    "returns with kl": ["--advantage-estimator=reinforce_plus_plus", *REWARDED],
    "gae": ["--advantage-estimator=ppo", "--lambd=0.9", *REWARDED],
    "normalized": ["--normalize-advantages", "--use-rollout-logprobs"],
    "rollout mean": ["--loss-aggregation=rollout_mean", "--use-rollout-logprobs"],
}
VARIANT_LAYOUTS = ("cp2 all-gather", "cp2 zigzag", "dp2", "pp2")


def first_step(rank: int, world_size: int, argv: list[str]) -> dict[str, float]:
    """Loss, metrics and gradient norm of the first step on this layout."""
    with running(rank, world_size, argv) as run:
        result = run.trainee.step(run.micro_batches())
    assert result.updated
    return {**result.metrics, "grad_norm": result.grad_norm}


def critic_step(rank: int, world_size: int, argv: list[str]) -> dict[str, float]:
    """The same of a critic whose head is not zero, which would teach the layers nothing."""
    with running(rank, world_size, argv) as run:
        if run.trainee.grid.is_last_stage:
            weight = unwrap(run.trainee.chunks[-1]).output_layer.weight
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))
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
def varied(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run whose rows have every field, and whose engine is not far from the policy."""
    folder = tmp_path_factory.mktemp("varied")
    model = write_llama(folder / "hf")
    rows = with_every_field(near(rollout_rows(), model))
    return [
        *RUN_FLAGS,
        "--entropy-coef=0.01",
        "--rollout-batch-size=4",
        f"--hf-checkpoint={model}",
        f"--rollout-data={write_rollouts(folder / 'rollouts.jsonl', rows)}",
    ]


def near(rows: list[dict], directory: Path) -> list[dict]:
    """The rows with log-probs that are the model's own, and some noise."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    noise = torch.Generator().manual_seed(2)
    found = []
    for row in rows:
        tokens, length = torch.tensor(row["tokens"]), row["response_length"]
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        own = log_probs[:-1].gather(1, tokens[1:, None]).squeeze(1)[-length:]
        moved = own + 0.2 * torch.randn(length, generator=noise)
        found.append(row | {"rollout_log_probs": moved.clamp(max=0).tolist()})
    return found


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


@pytest.mark.parametrize("name", VARIANTS)
def test_layout_changes_no_variant(worlds: dict[int, World], varied: list[str], name: str) -> None:
    argv = [*varied, *VARIANTS[name]]
    [expected] = worlds[1].run(first_step, 1, [*argv, "--micro-batch-size=1"])
    assert expected["grad_norm"] > 0.01
    for layout in VARIANT_LAYOUTS:
        for result in worlds[2].run(first_step, 2, [*argv, *TWO_RANKS[layout]]):
            assert_same(result, expected, f"{name}, {layout}")


CRITIC = ["--loss-type=value_loss", "--advantage-estimator=ppo", "--lambd=0.9", "--gamma=0.95"]


@pytest.fixture(scope="module")
def critic(worlds: dict[int, World], flags: list[str]) -> dict[str, float]:
    [result] = worlds[1].run(critic_step, 1, [*of_critic(flags), "--micro-batch-size=1"])
    assert result["value_loss"] == result["loss"]
    assert result["grad_norm"] > 0.01
    return result


def of_critic(flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag not in POLICY[:2]] + CRITIC


@pytest.mark.parametrize(
    "name", [name for name in TWO_RANKS if name not in ("cp2 dynamic", "pp2 recomputed")]
)
def test_a_critic_is_the_same_on_every_layout(
    worlds: dict[int, World], flags: list[str], critic: dict[str, float], name: str
) -> None:
    for result in worlds[2].run(critic_step, 2, [*of_critic(flags), *TWO_RANKS[name]]):
        assert_same(result, critic, name)


def gradients(
    rank: int, world_size: int, argv: list[str], into_main_grad: bool
) -> dict[str, torch.Tensor]:
    """The gradients of the first step, with or without the head adding its own to main_grad."""
    with running(rank, world_size, argv) as run:
        run.trainee.head.accumulate_into_main_grad = into_main_grad
        run.trainee.step(run.micro_batches())
        return {
            name: parameter.main_grad.clone()
            for chunk in run.trainee.chunks
            for name, parameter in chunk.named_parameters()
        }


@pytest.mark.parametrize("name", ["dp2", "dp2 overlap", "dp2 distributed optimizer", "pp2", "tp2"])
def test_the_head_adds_to_main_grad_what_autograd_would(
    worlds: dict[int, World], flags: list[str], name: str
) -> None:
    argv = [*flags, *TWO_RANKS[name]]
    found, expected = (worlds[2].run(gradients, 2, argv, into) for into in (True, False))
    for got, wanted in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(
                got[parameter], gradient, rtol=0, atol=1e-6 * largest, msg=parameter
            )
