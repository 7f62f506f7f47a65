"""A run that is killed or stopped and resumed is the run that never was."""

import random
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.job import Job, metrics, run
from tests.end_to_end.kills import LAYOUTS as ALL_LAYOUTS
from tests.end_to_end.kills import STEPS, Chain, compare, places, run_all, run_chain, run_flags
from tests.megatron.rl.tiny import write_rollouts

SAMPLES = 16


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_flags(write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"))


@pytest.fixture(scope="module")
def two_ranks(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    code, said = run([*flags, *places(folder)], ranks=2, log=folder / "log")
    assert code == 0, said
    assert len(metrics(folder / "tb")) == STEPS
    return folder


def test_the_uninterrupted_run_trains_every_sample(two_ranks: Path) -> None:
    rows = metrics(two_ranks / "tb")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["batch-size"] for row in rows] == [3, 3, 2] * 6
    assert rows[-1]["consumed-samples"] == 3 * SAMPLES
    # the first step of a rollout is on policy, the later ones are not
    assert all(row["train/ppo_kl"] == 0 for row in rows[::3])
    assert any(row["train/ppo_kl"] != 0 for row in rows[1::3])


def test_kill_and_resume_is_bit_identical(
    flags: list[str], two_ranks: Path, tmp_path: Path
) -> None:
    job = Job([*flags, *places(tmp_path)], ranks=2, log=tmp_path / "log")
    job.until(lambda: len(metrics(tmp_path / "tb")) >= 6)
    job.workers()[1].kill()
    assert job.wait(60) != 0
    assert "rank 0, step" in job.said
    assert len(metrics(tmp_path / "tb")) < STEPS
    code, said = run([*flags, *places(tmp_path)], ranks=2, log=tmp_path / "log2")
    assert code == 0, said
    assert not compare(tmp_path, two_ranks)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_and_resume_is_bit_identical(
    flags: list[str], two_ranks: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Stopped in the middle of a rollout: its old log-probs come back from the checkpoint."""
    job = Job([*flags, *places(tmp_path)], ranks=2, log=tmp_path / "log")
    job.until(lambda: len(metrics(tmp_path / "tb")) >= 7)
    for worker in job.workers():
        worker.send_signal(number)
    assert job.wait(60) != 0
    assert f": {number.name}" in job.said
    assert "exitcode  : 75" in job.said
    code, said = run([*flags, *places(tmp_path)], ranks=2, log=tmp_path / "log2")
    assert code == 0, said
    assert not compare(tmp_path, two_ranks)


def test_a_run_cut_at_the_end_of_an_epoch_is_bit_identical(
    flags: list[str], two_ranks: Path, tmp_path: Path
) -> None:
    argv = [*flags, *places(tmp_path), "--exit-interval=6"]
    code, said = run(argv, ranks=2, log=tmp_path / "log")
    assert code == 0, said
    assert len(metrics(tmp_path / "tb")) == STEPS // 3
    for steps in (12, STEPS):
        code, said = run(argv, ranks=2, log=tmp_path / f"log{steps}")
        assert code == 0, said
    assert not compare(tmp_path, two_ranks)


def test_random_kills_and_crashes_in_a_row_are_bit_identical(
    flags: list[str], two_ranks: Path, tmp_path: Path
) -> None:
    """Four kills, in the background's writing too; `slow` has the fifty in all layouts."""
    chain = Chain("dp2", in_background=True)
    run_chain(chain, flags, tmp_path, random.Random(3), kills=4)
    assert not chain.failures
    assert not compare(tmp_path, two_ranks)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_kills_in_all_layouts_are_bit_identical(tmp_path: Path) -> None:
    chains = list(run_all(50, 1, tmp_path, list(ALL_LAYOUTS), minutes=100))
    assert sum(len(chain.kills) for chain in chains) >= 50
    assert not [chain.failures for chain in chains if chain.failures]


@pytest.mark.slow
def test_torchrun_starts_killed_workers_again_and_the_run_is_bit_identical(
    flags: list[str], two_ranks: Path, tmp_path: Path
) -> None:
    argv = [*flags, *places(tmp_path)]
    job = Job(argv, ranks=2, log=tmp_path / "log", restarts=3)
    for rank, steps in ((1, 6), (0, 10)):
        job.until(lambda steps=steps: len(metrics(tmp_path / "tb")) >= steps)
        killed = job.workers()[rank]
        killed.kill()
        job.until(lambda killed=killed: not killed.is_running())
    assert job.wait(180) == 0, job.said
    assert job.said.count("so that rank ") == 2
    assert "going on at step 5" in job.said
    assert "going on at step 9" in job.said
    assert not compare(tmp_path, two_ranks)


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_job_ends(flags: list[str], tmp_path: Path) -> None:
    argv = [*flags, *places(tmp_path), "--distributed-timeout-minutes=0.2"]
    job = Job(argv, ranks=2, log=tmp_path / "log")
    job.until(lambda: len(metrics(tmp_path / "tb")) >= 6)
    job.workers()[1].suspend()
    assert job.wait(120) != 0
    assert "ERROR: rank 1 gives no sign of life since " in job.said
    assert "\n  so that rank 0, step " in job.said
