"""A disk that fills during a save ends the run by name and leaves what was saved before."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatron.rl.checkpoint_files import find_checkpoint, read_tracker, steps_in
from megatron.rl.checkpoint_manifest import damage, garbled
from tests.end_to_end.forked import ForkedJob
from tests.end_to_end.job import run
from tests.end_to_end.kills import compare, places, run_flags
from tests.megatron.rl.tiny import write_rollouts

ROOM = 2_500_000
"""Bytes: a few checkpoints of the tiny model, and not all of them."""
LARGEST_FILE = 100_000
"""Bytes: less than a file of tensors, more than the run's log."""


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own at the folder; False where none may be mounted."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def limit_files(job: ForkedJob, folder: Path) -> None:
    """After the first save no rank may write a large file: as full a disk as anyone may have."""
    job.until(lambda: read_tracker(folder) is not None and len(job.workers()) == 2)
    for worker in job.workers():
        with suppress(ProcessLookupError):
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_flags(write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"))


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    code, said = run([*flags, *places(folder)], ranks=2, log=folder / "log", kind=ForkedJob)
    assert code == 0, said
    return folder


@pytest.mark.parametrize("more", [[], ["--async-save"]])
@pytest.mark.parametrize("may_mount", [True, False])
def test_a_full_disk(
    flags: list[str], whole: Path, tmp_path: Path, more: list[str], may_mount: bool
) -> None:
    argv, save = [*flags, *places(tmp_path), *more], tmp_path / "save"
    if may_mount:
        with small_disk(save) as mounted:
            if mounted:
                job = ForkedJob(argv, ranks=2, log=tmp_path / "log")
                check_ended_by_name(job, save, "No space left on device")
                enlarge = ["mount", "-o", "remount,size=100m", str(save)]
                subprocess.run(enlarge, check=True)
                check_goes_on(argv, tmp_path, whole)
                return
        save.rmdir()
    job = ForkedJob(argv, ranks=2, log=tmp_path / "log")
    limit_files(job, save)
    check_ended_by_name(job, save, "the checkpoint of step")
    check_goes_on(argv, tmp_path, whole)


def check_ended_by_name(job: ForkedJob, save: Path, cause: str) -> None:
    assert job.wait() not in (0, 75)
    assert cause in job.said
    assert job.said.count("the checkpoint of step") == 1
    assert "Traceback" not in job.said
    complete = steps_in(save)
    assert complete
    assert not any(damage(path) or garbled(path) for path in complete.values())
    assert find_checkpoint(save).name == f"iter_{read_tracker(save):07d}"


def check_goes_on(argv: list[str], folder: Path, whole: Path) -> None:
    code, said = run(argv, ranks=2, log=folder / "log2", kind=ForkedJob)
    assert code == 0, said
    assert not compare(folder, whole)
