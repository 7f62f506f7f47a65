"""The loop closes: the model draws, is rewarded, learns, and is the same run after a kill."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.job import Job, differences, metrics, run
from tests.megatron.rl.tiny import MODEL_FLAGS

STEPS = 14
ON_POLICY = "train/train_rollout_logprob_abs_diff"
REWARD = "rollout/raw_reward/mean"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A bandit: small ids are rewarded."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt_ids': [i, 2 * i]})}\n" for i in range(16)))
    return [
        *MODEL_FLAGS,
        "--device=cpu",
        "--lr=2e-2",
        "--rollout-engine=native",
        f"--prompt-data={prompts}",
        "--tokenizer-type=NullTokenizer",
        "--rollout-max-response-len=8",
        "--reward=tests.megatron.rl.engines.bandit:small_ids",
        "--reward-workers=1",
        "--rollout-batch-size=8",
        "--n-samples-per-prompt=8",
        f"--num-rollout={STEPS}",
        "--micro-batch-size=16",
        "--context-parallel-size=2",
        "--allgather-cp",
        "--save-interval=4",
        "--distributed-timeout-minutes=1",
    ]


def places(folder: Path) -> list[str]:
    return [f"--save={folder}/save", f"--load={folder}/save", f"--tensorboard-dir={folder}/tb"]


@pytest.fixture(scope="module")
def reference(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    code, said = run([*flags, *places(folder)], ranks=2, log=folder / "log")
    assert code == 0, said
    return folder


def test_the_model_learns_from_its_own_rollouts(reference: Path) -> None:
    rows = metrics(reference / "tb")
    assert len(rows) == STEPS
    assert rows[0][REWARD] < 0.6
    assert rows[-1][REWARD] > 0.9
    # rollouts are made one at a time, with the weights they train
    assert all(row["rollout/staleness/max"] == 0 for row in rows)
    assert max(row[ON_POLICY] for row in rows) < 1e-5


def test_a_killed_run_draws_and_trains_the_same(
    flags: list[str], reference: Path, tmp_path: Path
) -> None:
    job = Job([*flags, *places(tmp_path)], ranks=2, log=tmp_path / "log")
    job.until(lambda: len(metrics(tmp_path / "tb")) >= 6)
    job.workers()[1].kill()
    assert job.wait(90) != 0
    code, said = run([*flags, *places(tmp_path)], ranks=2, log=tmp_path / "log2")
    assert code == 0, said
    assert metrics(tmp_path / "tb") == metrics(reference / "tb")
    last = f"save/iter_{STEPS:07d}"
    assert not differences(tmp_path / last, reference / last)
