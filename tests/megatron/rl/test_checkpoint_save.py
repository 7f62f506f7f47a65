"""What stays, what is written while training goes on, and what cannot be written."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from megatron.rl import checkpoint_write
from megatron.rl.checkpoint import Progress
from megatron.rl.checkpoint_files import TRACKER, CheckpointError, read_tracker
from tests.megatron.rl.checkpoints import (
    LAYOUTS,
    Outcome,
    load_and_go_on,
    old_outputs,
    run_flags,
    save_steps,
    third_step,
    with_everyones_old,
)
from tests.megatron.rl.running import running
from tests.spawn import World


def save_in_the_background(rank: int, argv: list[str], root: Path) -> Outcome:
    """As save_after_two, where no file is written before the third step is taken."""
    with running(rank, 2, argv) as run, held_back() as go_on:
        for step in (0, 1):
            run.trainee.step(run.micro_batches(step))
            run.checkpointer.scheduler.step(increment=1)
        progress = Progress(step=2, rollout=0, step_in_rollout=2, consumed_samples=10)
        run.checkpointer.save(progress, old_outputs(run.computed))
        run.checkpointer.saver.poll()
        assert read_tracker(root) is None
        outcome = third_step(run, progress, run.computed)
        go_on.set()
        run.checkpointer.saver.finish()
        return outcome


def save_twice_in_the_background(
    rank: int, argv: list[str], root: Path
) -> tuple[int | None, int | None, int | None]:
    """The tracker while the first is held back, after the second began, and after its end."""
    with running(rank, 2, argv) as run:
        with held_back() as go_on:
            run.checkpointer.save(Progress(step=1), {})
            first = read_tracker(root)
            dist.barrier()
            go_on.set()
            run.checkpointer.save(Progress(step=2), {})
        second = read_tracker(root)
        dist.barrier()
        run.checkpointer.saver.finish()
        return first, second, read_tracker(root)


@contextmanager
def held_back() -> Iterator[Event]:
    """Writers wait for the event; later ones find it set."""
    go_on, write = Event(), checkpoint_write._write

    def write_later(*args: Any) -> None:
        assert go_on.wait(60)
        write(*args)

    checkpoint_write._write = write_later
    try:
        yield go_on
    finally:
        checkpoint_write._write = write


def failure_to_write(rank: int, argv: list[str]) -> str:
    """Save step 2, and then step 4 with no room for rank 1."""
    with running(rank, 2, argv) as run:
        try:
            run.checkpointer.save(Progress(step=2), {})
            run.checkpointer.saver.finish()
            with no_room(rank == 1):
                run.checkpointer.save(Progress(step=4), {})
                run.checkpointer.saver.finish()
        except CheckpointError as error:
            return str(error)
    return ""


@contextmanager
def no_room(applies: bool) -> Iterator[None]:
    writer = checkpoint_write.FileSystemWriterAsync
    write = writer.write_preloaded_data

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if applies:
        writer.write_preloaded_data = fail
    try:
        yield
    finally:
        writer.write_preloaded_data = staticmethod(write)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_flags(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=120) as world:
        yield world


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ([], [1, 2, 3, 4, 5]),
        (["--save-retain-interval=3"], [3, 5]),
        (["--save-keep-last=2"], [4, 5]),
        (["--save-keep-last=1"], [5]),
        (["--save-retain-interval=2", "--save-keep-last=2"], [2, 4, 5]),
    ],
)
def test_what_is_kept(
    two_ranks: World, flags: list[str], tmp_path: Path, keep: list[str], kept: list[int]
) -> None:
    argv = [*flags, f"--save={tmp_path}", "--save-interval=1", *keep]
    two_ranks.run(save_steps, argv, [1, 2, 3, 4, 5])
    assert sorted(tmp_path.iterdir()) == [
        *(tmp_path / f"iter_{step:07d}" for step in kept),
        tmp_path / TRACKER,
    ]


@pytest.mark.parametrize("name", ["tp2 sp", "dp2", "dp2 distributed optimizer", "dp2 overlapped"])
def test_training_goes_on_while_files_are_written(
    two_ranks: World, flags: list[str], tmp_path: Path, name: str
) -> None:
    """What is written is what was there at the save, and nobody sees it before it is whole."""
    argv = [*flags, *LAYOUTS[name], f"--save={tmp_path}", f"--load={tmp_path}"]
    saved = two_ranks.run(save_in_the_background, [*argv, "--async-save"], tmp_path)
    expected = with_everyones_old(saved)
    assert read_tracker(tmp_path) == 2
    assert two_ranks.run(load_and_go_on, argv) == expected


def test_a_second_save_completes_the_first(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    argv = [*flags, f"--save={tmp_path}", "--async-save", "--save-interval=1"]
    assert two_ranks.run(save_twice_in_the_background, argv, tmp_path) == [(None, 1, 2)] * 2


def test_what_cannot_be_written_is_named_on_all_ranks(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    argv = [*flags, f"--save={tmp_path}"]
    for more in ([], ["--async-save"]):
        for message in two_ranks.run(failure_to_write, [*argv, *more]):
            assert "the checkpoint of step 4 cannot be written" in message
            assert "rank 1: OSError: [Errno 28] No space left on device" in message
    assert read_tracker(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", TRACKER]
