"""files.json: the size and the checksum of every file of a checkpoint, written last.

A checkpoint without it, or with another set of files than it names, is not complete.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MANIFEST = "files.json"
_CORES_MARK = "metadata.json"
_BLOCK = 1 << 22


class CheckpointError(Exception):
    """A checkpoint that cannot be used or written; the message says what is wrong."""


class FileMark(NamedTuple):
    """What tells whether a file is the one that was written: bytes, and their CRC-32."""

    size: int
    crc32: int


def mark(path: Path) -> FileMark:
    """Read a file once, in blocks."""
    size = crc32 = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return FileMark(size, crc32)


def write_manifest(directory: Path, marks: Mapping[str, FileMark]) -> None:
    """Mark the files that `marks` lacks, write all marks, and leave everything on the disk."""
    own = [path for path in sorted(directory.iterdir()) if path.name not in marks]
    everything = {path.name: mark(path) for path in own} | dict(marks)
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({name: list(m) for name, m in sorted(everything.items())}))
    sync(*own, manifest, directory)


def sync(*paths: Path) -> None:
    """Wait until files, or the entries of directories, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is a checkpoint, whole or broken, and not a folder of checkpoints."""
    return any((directory / name).is_file() for name in (MANIFEST, _CORES_MARK))


def damage(directory: Path) -> str | None:
    """What is missing, cut or unreadable in a checkpoint; None where nothing is.

    Reads no contents: those are `garbled`'s.
    """
    try:
        for name, expected in read_manifest(directory).items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != expected.size:
                return f"{name} has {size} of {expected.size} bytes"
            if not os.access(path, os.R_OK, effective_ids=True):
                return f"{name} cannot be read: Permission denied"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


def garbled(directory: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """The first file, of every `num_shares`-th from `share`, whose contents are not as written."""
    marks = sorted(read_manifest(directory).items())
    try:
        for name, expected in marks[share::num_shares]:
            if mark(directory / name) != expected:
                return f"the contents of {name} are not what was written (CRC-32)"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


def read_manifest(directory: Path) -> dict[str, FileMark]:
    """The marks of a checkpoint's files.

    Raises:
        CheckpointError: there is no list of files, or it is none.
    """
    try:
        entries = json.loads((directory / MANIFEST).read_bytes())
        marks = {name: FileMark(*map(int, entry)) for name, entry in entries.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{MANIFEST} must list files, with size and CRC-32") from None
    if strangers := [name for name in marks if Path(name).name != name]:
        raise CheckpointError(f"{MANIFEST} must name files of its directory: {strangers[0]!r}")
    return marks
