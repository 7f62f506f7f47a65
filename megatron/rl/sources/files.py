"""Rollouts in files: every row is checked once, then any row can be read.

The pass runs on one rank. Its result is small and picklable, so the others receive it instead of
repeating it, and each reads the rows it trains on.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from megatron.rl.samples import BadRowsError, RowRules, Sample
from megatron.rl.sources.bad_rows import BadRowLog
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import RowFile, open_rows
from megatron.rl.sources.index import (
    ROW_DTYPE,
    number_groups,
    number_rows,
    repeated_error,
    repeated_rows,
)
from megatron.rl.sources.paths import expand_paths
from megatron.rl.sources.row import BadFileError, BrokenRuleError
from megatron.rl.sources.rules import check_row, make_sample
from megatron.rl.sources.scan import BadRow, Task, error_of, scan_tasks
from megatron.rl.sources.summary import RolloutSummary

BYTES_PER_WORKER = 32 << 20
"""Below this a process of its own costs more than it saves."""
MAX_WORKERS = 8

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


class RolloutFiles:
    """Checked files of rollout rows, and random access to them.

    Made by `check_rollouts`. Holds an index of the rows, never the rows.

    Attributes:
        paths: The files.
        rows: The index, `ROW_DTYPE` [N]; a position in it names a row from here on.
        rules: What every row was found to obey.
        num_bad_rows: How many rows were skipped.
    """

    def __init__(
        self,
        paths: Sequence[str],
        rows: np.ndarray,
        rules: RowRules,
        *,
        num_bad_rows: int = 0,
        trust_pickle: bool = False,
    ) -> None:
        self.paths = tuple(paths)
        self.rows = rows
        self.rules = rules
        self.num_bad_rows = num_bad_rows
        self._trust_pickle = trust_pickle
        self._cache = UnitCache()

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what was read: another process has its own cache."""
        return self.__dict__ | {"_cache": UnitCache()}

    @property
    def summary(self) -> RolloutSummary:
        """The figures a user looks at first."""
        return RolloutSummary.of(self.rows, len(self.paths), self.num_bad_rows)

    @property
    def fingerprint(self) -> str:
        """The same for the same rows, wherever the files lie; a resumed run compares it."""
        return hashlib.blake2b(self.rows.tobytes(), digest_size=16).hexdigest()

    def read(self, positions: Sequence[int]) -> list[Sample]:
        """The samples at these positions of the index, in this order.

        Raises:
            BadRowsError: A file is not what it was when it was checked.
        """
        of_file: dict[int, list[int]] = defaultdict(list)
        for position in positions:
            of_file[int(self.rows["file"][position])].append(int(position))
        samples: dict[int, Sample] = {}
        for file, wanted in of_file.items():
            samples.update(zip(wanted, self._read_file(self.paths[file], wanted), strict=True))
        return [samples[int(position)] for position in positions]

    def _read_file(self, path: str, positions: list[int]) -> Iterator[Sample]:
        try:
            reader = open_rows(path, self._cache, trust_pickle=self._trust_pickle)
            raws = reader.read([int(self.rows["place"][position]) for position in positions])
        except (BadFileError, OSError, IndexError) as error:
            raise _changed(path, 0, error) from error
        for position, raw in zip(positions, raws, strict=True):
            yield self._sample(reader, path, self.rows[position], raw)

    def _sample(self, reader: RowFile, path: str, entry: np.void, raw: Any) -> Sample:
        line = int(entry["line"])
        try:
            row = reader.decode(raw)
            check_row(row, self.rules)
        except BrokenRuleError as fault:
            raise _changed(path, line, fault) from fault
        lengths = (len(row.tokens), row.response_length)
        if lengths != (entry["total_length"], entry["response_length"]):
            raise _changed(path, line, f"{lengths} tokens and response tokens")
        return make_sample(
            row,
            index=int(entry["index"]),
            group_index=int(entry["group"]),
            reward=float(entry["reward"]),
            origin=f"{path}:{line}",
        )


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
        number_groups(rows),
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
    tasks, sizes = _tasks(files, rules, options, bad)
    total = sum(task.part.num_bytes for task in tasks)
    found = [np.empty(0, ROW_DTYPE)]
    lines: dict[int, int] = defaultdict(int)  # of each file, before the current part
    done = 0
    with _reporting(progress) as report:
        for task, batch in scan_tasks(tasks, _num_workers(options, total, len(tasks))):
            batch.entries["line"] += lines[task.file]
            found.append(batch.entries)
            for row in batch.bad_rows:
                bad.add(_moved(row, lines[task.file]))
            report(done + int(batch.fraction * task.part.num_bytes), total)
            if batch.last:
                lines[task.file] += batch.num_lines
                done += task.part.num_bytes
    for path, size in sizes.items():
        if os.path.getsize(path) != size:
            fault = BadFileError(
                "must not change while it is read", "changed", "let its writer end"
            )
            bad.add(BadRow(error_of(fault, path, 0), -1))
    return np.concatenate(found)


def _tasks(
    files: Sequence[str], rules: RowRules, options: ReadOptions, bad: BadRowLog
) -> tuple[list[Task], dict[str, int]]:
    """The parts of every usable file, and the files' sizes."""
    tasks: list[Task] = []
    sizes: dict[str, int] = {}
    for file, path in enumerate(files):
        try:
            parts = open_rows(path, UnitCache(), trust_pickle=options.trust_pickle).parts()
            sizes[path] = os.path.getsize(path)
        except BadFileError as fault:
            bad.add(BadRow(error_of(fault, path, 0), -1))
            continue
        tasks += [Task(file, path, part, rules, options.trust_pickle) for part in parts]
    return tasks, sizes


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
    with tqdm(desc="checking rollouts", unit="B", unit_scale=True, disable=None, delay=1) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _changed(path: str, line: int, found: object) -> BadRowsError:
    rule = f"must be the file that was checked when the run began ({found})"
    fault = BadFileError(rule, "changed", "keep rollout files as they are while a run reads them")
    return BadRowsError([error_of(fault, path, line)])
