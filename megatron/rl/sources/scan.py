"""The pass over every row: parts of files, checked here or by worker processes, in a fixed order.

Workers are plain child processes that read their work from stdin and answer on stdout: no fork of
this process, no second import of its main script. So the pass is safe in a launcher's worker, with
threads running and before any process group exists.
"""

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from megatron.rl.samples import RowError, RowRules
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import Part, open_rows
from megatron.rl.sources.index import ROW_DTYPE, entry_of
from megatron.rl.sources.names import near_misses
from megatron.rl.sources.row import BadFileError, BrokenRuleError
from megatron.rl.sources.rules import check_row

BATCH_ROWS = 1024
_WORKER = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from megatron.rl.sources.scan import serve; serve()"
)


@dataclass(frozen=True)
class Task:
    """One part of one file, and what to demand of its rows."""

    file: int
    path: str
    part: Part
    rules: RowRules
    trust_pickle: bool


@dataclass(frozen=True)
class BadRow:
    """A refused row and its place in the file (-1 for the file itself)."""

    error: RowError
    place: int


@dataclass(frozen=True)
class RowBatch:
    """What the pass found in some consecutive rows. Lines are counted from 1 in the part."""

    entries: np.ndarray
    bad_rows: list[BadRow]
    num_lines: int
    """Lines of the part so far."""
    fraction: float
    """How much of the part is done, in [0, 1]."""
    last: bool
    near_misses: dict[str, str] = field(default_factory=dict)
    """Fields that are not read, and what they may mean; told at the end of a file's first part."""


def scan_part(task: Task) -> Iterator[RowBatch]:
    """Check every row of a part, a bounded number of rows at a time."""
    entries: list[tuple] = []
    bad_rows: list[BadRow] = []
    near: dict[str, str] = {}
    line = 0

    def batch(fraction: float, *, last: bool) -> RowBatch:
        index = np.array(entries, ROW_DTYPE)
        found = RowBatch(index, list(bad_rows), line, fraction, last, near if last else {})
        entries.clear()
        bad_rows.clear()
        return found

    try:
        rows = open_rows(task.path, UnitCache(), trust_pickle=task.trust_pickle)
        for line, (place, raw) in enumerate(rows.scan(task.part), start=1):
            if raw is None:
                continue
            try:
                row = rows.decode(raw)
                num_cut = check_row(row, task.rules)
                origin = {"file": task.file, "place": place, "line": line}
                entries.append(entry_of(row, task.rules, num_cut_tokens=num_cut, **origin))
            except BrokenRuleError as fault:
                bad_rows.append(BadRow(error_of(fault, task.path, line), place))
            if len(entries) + len(bad_rows) >= BATCH_ROWS:
                yield batch(_fraction(place, task.part), last=False)
        near = near_misses(rows.names() if task.part.start == 0 else ())
    except BadFileError as fault:
        bad_rows.append(BadRow(error_of(fault, task.path, 0), -1))
    except (OSError, MemoryError) as error:
        bad_rows.append(BadRow(error_of(unreadable(error), task.path, 0), -1))
    yield batch(1.0, last=True)


def error_of(fault: BrokenRuleError, path: str, line: int) -> RowError:
    """A fault with the file and line it was found at."""
    return RowError(path, line, fault.field, fault.rule, fault.value, fault.fix)


def unreadable(error: OSError | MemoryError) -> BadFileError:
    """What a failed read is to the user."""
    if isinstance(error, MemoryError):
        return BadFileError("must fit into memory", "too large", "write it in smaller files")
    return BadFileError("must be readable", error.strerror or error, "check the disk it is on")


def scan_tasks(tasks: Sequence[Task], num_workers: int) -> Iterator[tuple[Task, RowBatch]]:
    """Every batch of every task, in the order of the tasks whatever the number of workers."""
    if num_workers <= 1:
        for task in tasks:
            for batch in scan_part(task):
                yield task, batch
        return
    workers = [_start(tasks[first::num_workers]) for first in range(num_workers)]
    try:
        for position, task in enumerate(tasks):
            for batch in _answers(workers[position % num_workers], task):
                yield task, batch
    finally:
        for worker in workers:
            worker.kill()
            with worker:  # closes its pipes and waits for its end
                pass


def serve() -> None:
    """A worker: take tasks from stdin, write their batches to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    for task in pickle.load(sys.stdin.buffer):
        for batch in scan_part(task):
            pickle.dump(batch, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _start(tasks: Sequence[Task]) -> subprocess.Popen:
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None, "it was asked for"
    with suppress(BrokenPipeError):  # it ended at once; whoever reads its answers says so
        pickle.dump(sys.path, worker.stdin)
        pickle.dump(list(tasks), worker.stdin)
        worker.stdin.close()
    return worker


def _answers(worker: subprocess.Popen, task: Task) -> Iterator[RowBatch]:
    """The batches of one task; a pipe holds little, so a worker that is ahead waits.

    A worker ends early where a file breaks its reader or the machine has no memory left.
    """
    last = False
    while not last:
        try:
            batch = pickle.load(worker.stdout)
        except (EOFError, pickle.UnpicklingError):
            rule, fix = "must be readable to its end", "check memory, then the file"
            fault = BadFileError(rule, f"exit code {worker.wait()} of its reader", fix)
            bad = BadRow(error_of(fault, task.path, 0), -1)
            batch = RowBatch(np.empty(0, ROW_DTYPE), [bad], 0, 1.0, last=True)
        last = batch.last
        yield batch


def _fraction(place: int, part: Part) -> float:
    return min(1.0, (place + 1 - part.start) / max(1, part.stop - part.start))
