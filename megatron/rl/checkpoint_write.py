"""How a checkpoint gets onto the disk: whole or not at all, at once or in the background.

All of it is written under another name, `iter_N.partial-...`, and renamed when every rank is done;
then the tracker moves, and then what need not stay is deleted. A kill at any moment leaves the
former checkpoints and the tracker as they were, or the new ones. Files are written by a thread of
each rank, so that nothing writes on after a rank that was killed.
"""

from __future__ import annotations

import queue
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron.rl.checkpoint_files import CONFIG, CheckpointError, step_directory
from megatron.rl.checkpoint_keep import Keep, clear_leftovers, publish
from megatron.rl.checkpoint_manifest import FileMark, mark, write_manifest
from megatron.rl.core_versions import CORES_OWN_WRITER
from megatron.rl.initialize import Grid
from megatron.rl.logging import log_info


@dataclass
class _Written:
    """What this rank's thread has to show: marks of its files, or what went wrong."""

    marks: dict[str, FileMark] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class _Pending:
    step: int
    partial: Path
    request: AsyncRequest
    thread: Thread
    written: _Written


@dataclass
class Saver:
    """Writes the checkpoints of one run, one after the other; all ranks call it together.

    Args:
        root: directory of the checkpoints.
        grid: this rank.
        config_yaml: the run's flags, which lie beside the weights.
        keep: which checkpoints stay.
        in_background: whether training goes on while files are written.
    """

    root: Path
    grid: Grid
    config_yaml: str
    keep: Keep
    in_background: bool
    _pending: _Pending | None = field(init=False, default=None)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; in the background, return as soon as `state` may change again.

        Raises:
            CheckpointError: this checkpoint, or the former one that was still being written,
                cannot be written; on every rank.
        """
        self.finish()
        partial = self._on_writer(lambda: self._new_directory(step), step)
        # core's own queue is served by a process that would outlive a killed rank
        filesystem_async._results_queue = queue.Queue()
        request = dist_checkpointing.save(
            state, str(partial), async_sharded_save=True, **CORES_OWN_WRITER
        )
        assert request is not None
        written = _Written()
        buckets = _staged(request, copy=self.in_background)
        thread = Thread(target=_write, args=(request, buckets, written), daemon=True)
        self._pending = _Pending(step, partial, request, thread, written)
        thread.start()
        if not self.in_background:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint that is being written, if every rank has written its files.

        Raises:
            CheckpointError: a rank cannot write its files; on every rank.
        """
        if self._pending is None:
            return
        is_done = torch.tensor(not self._pending.thread.is_alive(), device=self.grid.device).int()
        dist.all_reduce(is_done, op=dist.ReduceOp.MIN)
        if is_done.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and complete it.

        Raises:
            CheckpointError: a rank cannot write its files; on every rank.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.thread.join()
        marks = self._everyones_marks(pending)
        for function in pending.request.finalize_fns:
            function()
        final = self._on_writer(lambda: self._complete(pending, marks), pending.step)
        log_info(f"saved {final}")

    def _new_directory(self, step: int) -> Path:
        clear_leftovers(self.root)
        final = step_directory(self.root, step)
        partial = final.with_name(f"{final.name}.partial-{secrets.token_hex(4)}")
        partial.mkdir(parents=True)
        return partial

    def _everyones_marks(self, pending: _Pending) -> dict[str, FileMark]:
        everyone: list[Any] = [None] * self.grid.world.world_size
        dist.all_gather_object(everyone, pending.written)
        errors = [f"rank {rank}: {w.error}" for rank, w in enumerate(everyone) if w.error]
        if errors:
            if self.grid.is_writer:
                shutil.rmtree(pending.partial, ignore_errors=True)
            raise self._failure(pending.step, "; ".join(errors))
        return {name: file_mark for w in everyone for name, file_mark in w.marks.items()}

    def _complete(self, pending: _Pending, marks: dict[str, FileMark]) -> Path:
        (pending.partial / CONFIG).write_text(self.config_yaml)
        write_manifest(pending.partial, marks)
        final = publish(pending.partial, self.root, pending.step)
        self.keep.retire(self.root, pending.step)
        return final

    def _on_writer(self, function: Callable[[], Path], step: int) -> Path:
        """Rank 0's answer, or its failure, on every rank."""
        answer: list[Any] = [None]
        if self.grid.is_writer:
            try:
                answer[0] = function()
            except (OSError, CheckpointError) as error:
                answer[0] = f"rank 0: {error}"
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], str):
            raise self._failure(step, answer[0])
        return answer[0]

    def _failure(self, step: int, cause: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} cannot be written to {self.root}: {cause}; earlier "
            "checkpoints are as they were; fix: make room there, or --save to another directory"
        )


def _staged(request: AsyncRequest, *, copy: bool) -> list[Any]:
    """This rank's tensors in host memory, by file; copies of those that training goes on to change.

    Args:
        request: core's.
        copy: also of tensors that are in host memory already.
    """
    if request.async_fn is None:
        return []
    staged = request.preload_fn()
    if not copy:
        return staged
    return [
        (path, key, (plain, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (plain, tensors) in staged
    ]


def _write(request: AsyncRequest, buckets: list[Any], written: _Written) -> None:
    """Write and mark this rank's files, and leave core's results where its last step looks."""
    if request.async_fn is None:
        return
    transforms, results = request.async_fn.args[0], request.async_fn_args[2]
    outcome: dict[int, Any] = {}
    try:
        for number, bucket in enumerate(buckets):
            answers, counts = queue.Queue(), queue.Queue()
            counts.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, number, bucket, answers, counts, use_fsync=True
            )
            _, outcome[number] = answers.get_nowait()
            if isinstance(outcome[number], Exception):
                raise outcome[number]
            path = Path(bucket[0])
            written.marks[path.name] = mark(path)
    except Exception as caught:  # whatever it is, all ranks must hear of it
        error: BaseException = caught
        while error.__context__ is not None:  # torch reports its own surprise on top
            error = error.__context__
        written.error = f"{type(error).__name__}: {error}"
    results.put(outcome)
