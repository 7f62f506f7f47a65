"""A run trains what an engine elsewhere drops into a folder, each file once, through restarts."""

import signal
from pathlib import Path

import pytest

from tests.end_to_end.job import Job, differences, metrics, run
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, rollout_rows, write_rollouts

FILES = 4


def drop(folder: Path, number: int) -> None:
    """A finished file of two prompts: by a rename, as an engine should."""
    folder.mkdir(exist_ok=True)
    hidden = write_rollouts(folder / ".hidden", rollout_rows(2, 4, seed=number))
    hidden.rename(folder / f"rollout_{number}.jsonl")


def flags(folder: Path, drops: Path) -> list[str]:
    return [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        f"--rollout-watch={drops}",
        "--num-steps-per-rollout=2",
        "--micro-batch-size=2",
        "--save-interval=3",
        "--distributed-timeout-minutes=0.5",
        f"--save={folder}/save",
        f"--load={folder}/save",
        f"--tensorboard-dir={folder}/tb",
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that found every file when it started."""
    folder = tmp_path_factory.mktemp("reference")
    for number in range(FILES):
        drop(folder / "drop", number)
    (folder / "drop" / "END").touch()
    code, said = run(flags(folder, folder / "drop"), ranks=2, log=folder / "log")
    assert code == 0, said
    assert "no further rollout" in said
    return folder


def check_same_run(folder: Path, reference: Path) -> None:
    assert metrics(folder / "tb") == metrics(reference / "tb")
    last = f"save/iter_{2 * FILES:07d}"
    assert not differences(folder / last, reference / last)


def test_every_file_is_trained_once_in_order(reference: Path) -> None:
    rows = metrics(reference / "tb")
    assert [row["step"] for row in rows] == list(range(1, 2 * FILES + 1))
    assert rows[-1]["consumed-samples"] == 8 * FILES
    spool = reference / "save" / "rollouts"
    assert len(list(spool.glob("rollout_*.json"))) == FILES


def test_a_run_that_is_killed_and_stopped_while_files_come_is_the_same_run(
    reference: Path, tmp_path: Path
) -> None:
    drops = tmp_path / "drop"
    drop(drops, 0)
    drop(drops, 1)
    job = Job(flags(tmp_path, drops), ranks=2, log=tmp_path / "log1")
    job.until(lambda: len(metrics(tmp_path / "tb")) >= 4)
    job.workers()[0].kill()  # a step behind its checkpoint, with a file that it has noted
    assert job.wait(60) != 0
    drop(drops, 2)
    job = Job(flags(tmp_path, drops), ranks=2, log=tmp_path / "log2")
    job.until(lambda: "waiting 0 min for the file of rollout 3 behind rollout_2.jsonl" in job.said)
    job.workers()[1].send_signal(signal.SIGTERM)  # while it waits
    assert job.wait(60) != 0
    assert "stopped after step 6: SIGTERM" in job.said
    drop(drops, 3)
    (drops / "END").touch()
    code, said = run(flags(tmp_path, drops), ranks=2, log=tmp_path / "log3")
    assert code == 0, said
    check_same_run(tmp_path, reference)
