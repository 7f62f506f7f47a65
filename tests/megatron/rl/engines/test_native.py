"""The model draws by itself what it would be trained on: on every layout, at its own log-probs."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.rl.engines import Completion, EngineError, Request, Sampling
from megatron.rl.engines.native import NativeEngine
from tests.megatron.rl.running import running
from tests.megatron.rl.tiny import RUN_FLAGS, VOCAB_SIZE, write_llama, write_qwen3, write_rollouts
from tests.spawn import World

SAMPLINGS = {
    "plain": Sampling(20),
    "cold, top-p": Sampling(20, temperature=0.7, top_p=0.9),
    "top-k": Sampling(20, temperature=1.3, top_k=5),
}
LAYOUTS = {
    "tp2": ["--tensor-model-parallel-size=2"],
    "tp2 sp": ["--tensor-model-parallel-size=2", "--sequence-parallel"],
    "dp2": [],
    "cp2": ["--context-parallel-size=2", "--allgather-cp"],
    "cp2 zigzag": ["--context-parallel-size=2"],
}


def requests() -> list[Request]:
    """Two prompts with three responses each, one with one; prompts of 1 to 9 tokens."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCAB_SIZE, length) for length in (9, 1, 4)]
    wanted = [prompts[i] for i in (0, 0, 0, 1, 2, 2, 2)]
    return [Request(i, prompt, (5, 0, i)) for i, prompt in enumerate(wanted)]


def generate(
    rank: int, size: int, argv: list[str], sampling: Sampling, batch_size: int = 64
) -> list[Completion]:
    """What the ranks draw with the initial weights."""
    with running(rank, size, argv) as run:
        engine = NativeEngine(run.trainee, batch_size)
        engine.refresh(7)
        return engine.generate(requests(), sampling)


def difference(rank: int, size: int, argv: list[str]) -> float:
    """What the trainer reports of rollouts against itself."""
    with running(rank, size, argv) as run:
        return run.trainee.step(run.micro_batches()).metrics["train_rollout_logprob_abs_diff"]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    with World(1, timeout_s=120) as one, World(2, timeout_s=120) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return write(tmp_path_factory.mktemp(request.param) / "hf")


@pytest.fixture(scope="module")
def flags(model: Path) -> list[str]:
    rollouts = write_rollouts(model.parent / "rollouts.jsonl")
    return [*RUN_FLAGS, f"--hf-checkpoint={model}", f"--rollout-data={rollouts}"]


@pytest.fixture(scope="module")
def stop_token(worlds: dict[int, World], flags: list[str]) -> int:
    """One that the responses hold now and then."""
    [found] = worlds[1].run(generate, 1, flags, Sampling(20))
    tokens, counts = np.unique(np.concatenate([c.tokens for c in found]), return_counts=True)
    return int(tokens[counts.argmax()])


def kept(completion: Completion) -> list[set[int]]:
    """The ids of each token; ids that are nearly as likely may swap places in the order."""
    parts = np.split(completion.kept_ids, completion.kept_offsets[1:-1])
    return [set(part.tolist()) for part in parts]


def same(got: list[Completion], expected: list[Completion]) -> None:
    assert [c.index for c in got] == [c.index for c in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.status == other.status
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert (one.kept_ids is None) == (other.kept_ids is None)
        if one.kept_ids is not None:
            assert one.kept_offsets.tolist() == other.kept_offsets.tolist()
            assert kept(one) == kept(other)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_layout_draws_the_same(
    worlds: dict[int, World], flags: list[str], stop_token: int, name: str
) -> None:
    sampling = SAMPLINGS[name]
    sampling = Sampling(20, sampling.temperature, sampling.top_p, sampling.top_k, (stop_token,))
    [expected] = worlds[1].run(generate, 1, flags, sampling)
    assert [c.index for c in expected] == list(range(7))
    assert {c.status for c in expected} <= {"completed", "truncated"}
    assert all(c.weight_version == 7 for c in expected)
    for layout, extra in LAYOUTS.items():
        parts = worlds[2].run(generate, 2, [*flags, *extra], sampling)
        if layout.startswith("tp"):
            assert parts[1] == []
        else:
            assert [len(part) for part in parts] == [3, 4]
        same([completion for part in parts for completion in part], expected)


def test_a_stop_token_ends_a_response_and_belongs_to_it(
    worlds: dict[int, World], flags: list[str], stop_token: int
) -> None:
    [whole] = worlds[1].run(generate, 1, flags, Sampling(20))
    [stopped] = worlds[1].run(generate, 1, flags, Sampling(20, stop_token_ids=(stop_token,)))
    assert {c.status for c in whole} == {"truncated"}
    assert "completed" in {c.status for c in stopped}
    for one, other in zip(stopped, whole, strict=True):
        tokens = other.tokens.tolist()
        if stop_token in tokens:
            assert one.status == "completed"
            tokens = tokens[: tokens.index(stop_token) + 1]
        assert one.tokens.tolist() == tokens


def test_a_response_does_not_depend_on_what_is_drawn_beside_it(
    worlds: dict[int, World], flags: list[str]
) -> None:
    [expected] = worlds[1].run(generate, 1, flags, Sampling(20))
    for batch_size in (1, 2, 3):
        [found] = worlds[1].run(generate, 1, flags, Sampling(20), batch_size)
        same(found, expected)


def test_temperature_zero_is_greedy_search(
    worlds: dict[int, World], flags: list[str], model: Path
) -> None:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    [found] = worlds[1].run(generate, 1, flags, Sampling(12, temperature=0.0, max_length=16))
    for request, completion in zip(requests(), found, strict=True):
        tokens = torch.tensor(request.prompt_ids)[None]
        for _ in range(min(12, 16 - tokens.shape[1])):
            with torch.no_grad():
                following = hf(tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, following.view(1, 1)], dim=1)
        assert completion.tokens.tolist() == tokens[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_trainer_finds_the_log_probs_that_were_drawn_with(
    worlds: dict[int, World], flags: list[str], tmp_path: Path, name: str
) -> None:
    sampling = SAMPLINGS[name]
    [found] = worlds[1].run(generate, 1, flags, sampling)
    asked = {request.index: request for request in requests()}
    rows = [
        {
            "index": c.index,
            "group_index": int(c.index > 3),
            "tokens": [*asked[c.index].prompt_ids.tolist(), *c.tokens.tolist()],
            "response_length": len(c.tokens),
            "rollout_log_probs": c.log_probs.tolist(),
            "reward": c.index % 2,
        }
        | (
            {}
            if c.kept_ids is None
            else {
                "rollout_top_p_token_ids": c.kept_ids.tolist(),
                "rollout_top_p_token_offsets": c.kept_offsets.tolist(),
            }
        )
        for c in found
    ]
    path = tmp_path / "drawn.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [flag for flag in flags if not flag.startswith("--rollout-data")]
    argv += [
        f"--rollout-data={path}",
        f"--rollout-temperature={sampling.temperature}",
        f"--rollout-top-p={1.0 if sampling.keeps_all else 0.9}",
        "--micro-batch-size=7",
    ]
    [found_difference] = worlds[1].run(difference, 1, argv)
    assert found_difference < 1e-5
    for layout in ("tp2 sp", "cp2"):
        assert max(worlds[2].run(difference, 2, [*argv, *LAYOUTS[layout]])) < 1e-5


def test_a_prompt_that_leaves_no_room_is_named(worlds: dict[int, World], flags: list[str]) -> None:
    with pytest.raises(Exception, match="the prompt of sample 0 must be shorter than 9 tokens: 9"):
        worlds[1].run(generate, 1, flags, Sampling(5, max_length=9))
    assert issubclass(EngineError, Exception)
