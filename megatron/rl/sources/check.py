"""The one pass over every row of every file, before anything is trained.

One rank runs it. What it returns is small and picklable: the others receive it instead of repeating
it, and each reads rows through it.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from tqdm import tqdm

from megatron.rl.samples import RowRules, printable
from megatron.rl.sources.bad_rows import BadRowLog
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.files import RolloutFiles
from megatron.rl.sources.formats import open_rows
from megatron.rl.sources.index import (
    ROW_DTYPE,
    number_rows,
    number_units,
    repeated_error,
    repeated_rows,
)
from megatron.rl.sources.paths import expand_paths
from megatron.rl.sources.row import BadFileError
from megatron.rl.sources.scan import BadRow, Task, scan_tasks, unreadable

BYTES_PER_WORKER = 32 << 20
"""Below this a process of its own costs more than it saves."""
MAX_WORKERS = 8
BAR_DELAY = 1.0
"""Seconds before a bar is shown: short work needs none."""

_MESSAGES = logging.getLogger("megatron.rl.sources")

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class ReadOptions:
    """How files are read, as opposed to what their rows must be."""

    bad_rows: Literal["error", "skip"] = "error"
    """skip: count bad rows, write them aside and go on; a bad file is an error all the same."""
    bad_rows_path: str | None = None
    """Where skipped rows are written (None: nowhere)."""
    trust_pickle: bool = False
    """Let slime's dumps run code while they are read."""
    num_workers: int | None = None
    """Processes that check rows (None: by the size of the files, at most one per core)."""
    keep_errors: int = 1000
    """How many errors are kept with their details; all are counted."""


def check_rollouts(
    paths: Sequence[str],
    rules: RowRules,
    options: ReadOptions | None = None,
    *,
    progress: Progress | None = None,
) -> RolloutFiles:
    """Check every row of every file, once, in bounded memory.

    Args:
        paths: Files, globs and folders.
        rules: What the run demands of a row.
        options: How to read.
        progress: Told how far the pass is; by default a bar on a terminal, nothing in a log file.

    Returns:
        The files, ready to be read.

    Raises:
        BadRowsError: A file cannot be used, a row is bad (unless skipped), or nothing is left.
    """
    options = options or ReadOptions()
    skip = options.bad_rows == "skip"
    aside = options.bad_rows_path if skip else None
    bad = BadRowLog(options.keep_errors, aside, trust_pickle=options.trust_pickle)
    usable = False
    try:
        files, path_errors = expand_paths(paths)
        for error in path_errors:
            bad.add(BadRow(error, -1))
        rows = _scan(files, rules, options, bad, progress)
        rows = _without_repeated(number_rows(rows), files, bad)
        usable = not bad.num_files and len(rows) > 0 and (skip or not bad.num_rows)
        if not usable:
            bad.raise_all()
    finally:
        bad.close(keep_aside=usable)
    return RolloutFiles(
        files,
        number_units(rows),
        rules,
        num_bad_rows=bad.num_rows,
        trust_pickle=options.trust_pickle,
    )


def _scan(
    files: Sequence[str],
    rules: RowRules,
    options: ReadOptions,
    bad: BadRowLog,
    progress: Progress | None,
) -> np.ndarray:
    """The index of all good rows, lines counted in their files."""
    tasks, states = _tasks(files, rules, options, bad)
    total = sum(task.part.num_bytes for task in tasks)
    found = [np.empty(0, ROW_DTYPE)]
    blank = set(states)
    lines: dict[int, int] = defaultdict(int)  # of each file, before the current part
    done = 0
    with _reporting(progress) as report:
        for task, batch in scan_tasks(tasks, _num_workers(options, total, len(tasks))):
            batch.entries["line"] += lines[task.file]
            found.append(batch.entries)
            if len(batch.entries) or batch.bad_rows:
                blank.discard(task.path)
            for row in batch.bad_rows:
                bad.add(_moved(row, lines[task.file]))
            _warn_of_names(task.path, batch.near_misses)
            report(done + int(batch.fraction * task.part.num_bytes), total)
            if batch.last:
                lines[task.file] += batch.num_lines
                done += task.part.num_bytes
    for path, state in states.items():
        if path in blank:
            bad.add_file(path, BadFileError("must hold rows", "blank", "write the rows"))
        if _state_of(path) != state:
            rule = "must not change while it is read"
            bad.add_file(path, BadFileError(rule, "changed", "let its writer end first"))
    return np.concatenate(found)


def _tasks(
    files: Sequence[str], rules: RowRules, options: ReadOptions, bad: BadRowLog
) -> tuple[list[Task], dict[str, tuple[int, int] | None]]:
    """The parts of every usable file, and the state each file is in."""
    tasks: list[Task] = []
    states: dict[str, tuple[int, int] | None] = {}
    for file, path in enumerate(files):
        try:
            state = _state_of(path)
            parts = open_rows(path, UnitCache(), trust_pickle=options.trust_pickle).parts()
        except BadFileError as fault:
            bad.add_file(path, fault)
            continue
        except OSError as error:
            bad.add_file(path, unreadable(error))
            continue
        states[path] = state
        tasks += [Task(file, path, part, rules, options.trust_pickle) for part in parts]
    return tasks, states


def _state_of(path: str) -> tuple[int, int] | None:
    """Bytes and time of the last change, of which one differs once a file is written to."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _warn_of_names(path: str, near_misses: dict[str, str]) -> None:
    """Fields of any name are allowed, so a misspelt one is no error."""
    for name, meant in near_misses.items():
        _MESSAGES.warning(
            f"{printable(path)}: field {printable(name)} is not read; did you mean {meant}?"
        )


def _moved(bad: BadRow, lines: int) -> BadRow:
    """Count the line in the file, not in its part."""
    if not bad.error.line:
        return bad
    return replace(bad, error=replace(bad.error, line=bad.error.line + lines))


def _without_repeated(rows: np.ndarray, files: Sequence[str], bad: BadRowLog) -> np.ndarray:
    """Refuse a row whose index an earlier row of its file has."""
    first_lines = repeated_rows(rows)
    for position in np.flatnonzero(first_lines):
        row, path = rows[position], files[rows["file"][position]]
        error = repeated_error(path, row, int(first_lines[position]))
        bad.add(BadRow(error, int(row["place"])))
    return rows[first_lines == 0]


def _num_workers(options: ReadOptions, num_bytes: int, num_tasks: int) -> int:
    if options.num_workers is not None:
        return min(options.num_workers, num_tasks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(num_bytes // BYTES_PER_WORKER, num_tasks, cores or 1, MAX_WORKERS)


@contextmanager
def _reporting(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    with tqdm(
        desc="checking rollouts", unit="B", unit_scale=True, disable=None, delay=BAR_DELAY
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
