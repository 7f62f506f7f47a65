"""What every file format offers, and which one a file has."""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.row import FIELDS, BadFileError, Row

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pt")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@dataclass(frozen=True)
class Part:
    """A piece of one file that one worker checks; its rows have places in `[start, stop)`."""

    start: int
    stop: int
    num_bytes: int


class RowFile(Protocol):
    """One file of rows. A place says where a row is: a byte offset, or a row number.

    Every method may raise `BadFileError` where the file as a whole is not what its name says.
    """

    def parts(self) -> list[Part]:
        """Pieces that can be checked independently, in the order of the file."""
        ...

    def scan(self, part: Part) -> Iterator[tuple[int, Any]]:
        """(place, raw row) of every line of a part, one after the other; None for a blank line."""
        ...

    def decode(self, raw: Any) -> Row:
        """Parse one raw row; a broken rule is a `BrokenRuleError`."""
        ...

    def names(self) -> set[Any]:
        """What fields are called in the file, or in its first rows; not all need be text."""
        ...

    def read(self, places: Sequence[int]) -> list[Any]:
        """The raw rows at these places, in this order."""
        ...


def open_rows(
    path: str, cache: UnitCache, *, trust_pickle: bool = False, columns: Sequence[str] = FIELDS
) -> RowFile:
    """The reader of a file, chosen by its suffix.

    Args:
        path: A file; it must be a regular one that holds something.
        cache: Where units that can only be read whole are kept between calls.
        trust_pickle: Let a slime dump run code while it is read.
        columns: What is read of a Parquet file, which must have one of them.

    Raises:
        BadFileError: It is missing, unreadable, not regular, empty, compressed, or unknown.
    """
    # Imported where needed: pyarrow takes a third of a second, and most runs read JSONL.
    _check_file(path)
    suffix = Path(path).suffix
    if suffix == ".parquet":
        from megatron.rl.sources.parquet import ParquetRows

        return ParquetRows(path, cache, columns)
    if suffix == ".pt":
        from megatron.rl.sources.slime_dump import SlimeDump

        return SlimeDump(path, cache, trust_pickle=trust_pickle)
    from megatron.rl.sources.jsonl import JsonlRows

    return JsonlRows(path)


def open_regular(path: str, buffering: int = -1) -> BinaryIO:
    """A regular file, open for reading; never waits, as opening a pipe does for a writer.

    Raises:
        BadFileError: It is something else.
        OSError: It cannot be opened.
    """
    kind = os.stat(path).st_mode
    descriptor = -1
    if stat.S_ISREG(kind):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # what was opened may be something else by now
        kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb", buffering=buffering)
    if descriptor >= 0:
        os.close(descriptor)
    value = "a folder" if stat.S_ISDIR(kind) else "a pipe, socket or device"
    raise BadFileError("must be a regular file", value, "write the rows into a file first")


def _check_file(path: str) -> None:
    try:
        with open_regular(path) as file:
            head = file.read(8)
    except OSError as error:
        raise BadFileError(
            "must be readable", error.strerror, "check path and permissions"
        ) from None
    if not head:
        raise BadFileError("must hold rows", "empty", "write the rows, or leave the file out")
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise BadFileError("must not be compressed", name, "decompress it (Parquet is compact)")
    if Path(path).suffix not in SUFFIXES:
        raise BadFileError(
            f"must end in {', '.join(SUFFIXES)}", Path(path).name, "rename or convert it"
        )
