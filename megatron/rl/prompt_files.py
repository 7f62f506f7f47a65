"""Files of prompts: one checked pass, then random access by an index of places.

The pass makes every prompt once, ids included, so that a row which cannot be used ends the run
before its first step. What stays in memory is 32 bytes a prompt.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from megatron.rl.prompts import LongPromptError, Prompt, PromptConfig, PromptMaker
from megatron.rl.samples import BadRowsError
from megatron.rl.sources.bad_rows import BadRowLog
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.files import changed_error
from megatron.rl.sources.formats import open_rows
from megatron.rl.sources.paths import expand_paths
from megatron.rl.sources.row import MAX_ROW_BYTES, BadFileError, BrokenRuleError
from megatron.rl.sources.scan import BadRow, error_of, unreadable
from megatron.rl.text import TextTokenizer

KEEP_ERRORS = 1000
PROMPT_DTYPE = np.dtype(
    [
        ("file", np.int32),  # position in PromptFiles.paths
        ("place", np.int64),  # byte offset or row number
        ("line", np.int64),  # from 1, in its file
        ("length", np.int64),  # ids
        ("checksum", np.uint32),  # of all that a prompt has
    ]
)


class PromptFiles:
    """Checked files of prompts; a `PromptSet`. Made by `check_prompts`.

    Args:
        paths: The files.
        rows: The index, `PROMPT_DTYPE` [N].
        maker: Makes prompts of rows, the same way as in the pass.
        num_long: Prompts that were dropped since they are too long.
        num_bad_rows: Bad rows that were skipped.
    """

    def __init__(
        self,
        paths: Sequence[str],
        rows: np.ndarray,
        maker: PromptMaker,
        *,
        num_long: int = 0,
        num_bad_rows: int = 0,
    ) -> None:
        self.paths = tuple(paths)
        self.rows = rows
        self.num_long = num_long
        self.num_bad_rows = num_bad_rows
        self._maker = maker
        self._cache = UnitCache()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """The same for the same prompts in the same order, wherever the files lie."""
        content = np.stack([self.rows["length"], self.rows["checksum"].astype(np.int64)])
        return hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()

    def read(self, positions: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions of the index, in this order.

        Raises:
            BadRowsError: A file is not what it was when it was checked.
        """
        of_file: dict[int, list[int]] = defaultdict(list)
        for position in positions:
            of_file[int(self.rows["file"][position])].append(int(position))
        prompts: dict[int, Prompt] = {}
        for file, wanted in of_file.items():
            prompts.update(zip(wanted, self._read_file(self.paths[file], wanted), strict=True))
        return [prompts[int(position)] for position in positions]

    def _read_file(self, path: str, positions: list[int]) -> Iterator[Prompt]:
        try:
            reader = open_rows(path, self._cache, columns=self._maker.config.columns)
            raws = reader.read([int(self.rows["place"][position]) for position in positions])
        except (BadFileError, OSError, IndexError) as error:
            raise changed_error(path, 0, error) from error
        for position, raw in zip(positions, raws, strict=True):
            entry = self.rows[position]
            try:
                prompt = self._maker.from_record(_record(raw), f"{path}:{entry['line']}")
            except BrokenRuleError as fault:
                raise changed_error(path, int(entry["line"]), fault) from fault
            if _checksum(prompt) != entry["checksum"]:
                raise changed_error(path, int(entry["line"]), "another prompt")
            yield prompt


def check_prompts(
    paths: Sequence[str], config: PromptConfig, tokenizer: TextTokenizer
) -> PromptFiles:
    """Make every prompt of every file once, in bounded memory.

    Args:
        paths: Files (JSONL or Parquet), globs and folders.
        config: How they are read.
        tokenizer: Makes their ids.

    Returns:
        The files, ready to be read.

    Raises:
        BadRowsError: A file cannot be used, a row is bad or too long (unless these are to be left
            out), or nothing is left.
    """
    maker = PromptMaker(config, tokenizer)
    bad = BadRowLog(KEEP_ERRORS, None, trust_pickle=False)
    files, path_errors = expand_paths(paths)
    for error in path_errors:
        bad.add(BadRow(error, -1))
    found, num_long = [np.empty(0, PROMPT_DTYPE)], 0
    for file, path in enumerate(files):
        scan = _Scan(maker, file, path, bad)
        found.append(scan.run())
        num_long += scan.num_long
    rows = np.concatenate(found)
    if bad.num_files or (bad.num_rows and config.bad_rows == "error"):
        raise BadRowsError(bad.errors, bad.num_rows + bad.num_files, "prompt data")
    if len(rows) == 0:
        left = f"none ({num_long} too long, {bad.num_rows} bad)"
        fault = BadFileError("must leave a prompt", left, "check --input-key and the limits")
        errors = [*bad.errors, error_of(fault, ", ".join(map(str, paths)), 0)]
        raise BadRowsError(errors, bad.num_rows + 1, "prompt data")
    return PromptFiles(files, rows, maker, num_long=num_long, num_bad_rows=bad.num_rows)


class _Scan:
    """The pass over one file."""

    def __init__(self, maker: PromptMaker, file: int, path: str, bad: BadRowLog) -> None:
        self.num_long = 0
        self._maker = maker
        self._file = file
        self._path = path
        self._bad = bad

    def run(self) -> np.ndarray:
        """The index of the file's good prompts; what is not good is told to the log."""
        line, before = 0, self._bad.num_rows
        index = [np.empty(0, PROMPT_DTYPE)]
        try:
            if self._path.endswith(".pt"):
                fix = "write prompts as JSONL or Parquet"
                raise BadFileError("must end in .jsonl or .parquet", self._path, fix)
            reader = open_rows(self._path, UnitCache(), columns=self._maker.config.columns)
            for part in reader.parts():
                entries, line = self._part(reader.scan(part), line)
                index.append(entries)
        except BadFileError as fault:
            self._bad.add_file(self._path, fault)
        except (OSError, MemoryError) as error:
            self._bad.add_file(self._path, unreadable(error))
        rows = np.concatenate(index)
        if line and not len(rows) and not self.num_long and self._bad.num_rows == before:
            self._bad.add_file(self._path, BadFileError("must hold rows", "blank", "write them"))
        return rows

    def _part(self, raws: Iterator[tuple[int, Any]], line: int) -> tuple[np.ndarray, int]:
        entries: list[tuple[int, int, int, int, int]] = []
        for place, raw in raws:
            line += 1
            if raw is None:
                continue
            try:
                prompt = self._maker.from_record(_record(raw), f"{self._path}:{line}")
                length, checksum = len(prompt.prompt_ids), _checksum(prompt)
                entries.append((self._file, place, line, length, checksum))
            except BrokenRuleError as fault:
                self._fault(fault, line, place)
        return np.array(entries, PROMPT_DTYPE), line

    def _fault(self, fault: BrokenRuleError, line: int, place: int) -> None:
        if isinstance(fault, LongPromptError) and self._maker.config.long_prompts == "drop":
            self.num_long += 1
        else:
            self._bad.add(BadRow(error_of(fault, self._path, line), place))


def _record(raw: Any) -> dict[str, Any]:
    """One row: a line of JSON, or what Parquet gave."""
    if isinstance(raw, dict):
        return raw
    text = raw[:80].decode(errors="backslashreplace")
    if len(raw) > MAX_ROW_BYTES:
        raise BrokenRuleError("line", f"must be at most {MAX_ROW_BYTES} bytes long", text)
    try:
        record = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenRuleError("line", f"must be one whole JSON object ({error})", text) from None
    if not isinstance(record, dict):
        raise BrokenRuleError("line", "must be a JSON object", record)
    return record


def _checksum(prompt: Prompt) -> int:
    """What tells a prompt from another one of its length."""
    ids = zlib.crc32(prompt.prompt_ids.astype("<i8").tobytes())
    try:
        rest = msgspec.msgpack.encode([prompt.label, prompt.metadata], order="deterministic")
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"must hold values that JSON has ({error})"
        fix = "leave the value out"
        raise BrokenRuleError("metadata", rule, type(error).__name__, fix) from None
    return zlib.crc32(rest, ids)
