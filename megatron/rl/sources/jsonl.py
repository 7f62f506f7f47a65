"""JSON lines: one object a line; a place is the byte offset of a line."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import BinaryIO

import msgspec

from megatron.rl.sources.formats import Part, open_regular
from megatron.rl.sources.row import MAX_ROW_BYTES, Row, row_from_json

NAMED_ROWS = 16
"""So many rows tell what the fields of a file are called."""
PART_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
_JSON_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonlRows:
    """A file of JSON lines, read a line at a time."""

    def __init__(self, path: str) -> None:
        self._path = path

    def parts(self) -> list[Part]:
        """Ranges of bytes; a line belongs to the part that its first byte is in."""
        size = os.path.getsize(self._path)
        starts = range(0, size, PART_BYTES)
        return [Part(i, min(i + PART_BYTES, size), min(PART_BYTES, size - i)) for i in starts]

    def scan(self, part: Part) -> Iterator[tuple[int, bytes | None]]:
        """(offset, line) of every line that starts in the part; None for a blank line."""
        with open_regular(self._path, BLOCK_BYTES) as file:
            place = _after_newline(file, part.start - 1, part.stop) if part.start else 0
            file.seek(place)
            while place < part.stop:
                line = file.readline(MAX_ROW_BYTES + 1)
                if not line:
                    return
                yield place, line if line.strip() else None
                place += len(line)
                if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                    place = _after_newline(file, place, part.stop)
                    file.seek(place)

    def decode(self, raw: bytes) -> Row:
        """Parse one line."""
        return row_from_json(raw)

    def read(self, places: Sequence[int]) -> list[bytes]:
        """The lines at these offsets; read in the order of the file, given in the order asked."""
        lines = {}
        with open_regular(self._path) as file:
            for place in sorted(set(places)):
                file.seek(place)
                lines[place] = file.readline(MAX_ROW_BYTES + 1)
        return [lines[place] for place in places]

    def names(self) -> set[str]:
        """The names of the first rows' fields."""
        names: set[str] = set()
        for _, line in islice(self.scan(Part(0, BLOCK_BYTES, BLOCK_BYTES)), NAMED_ROWS):
            with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                names.update(_JSON_NAMES.decode(line or b"{}"))
        return names


def _after_newline(file: BinaryIO, place: int, stop: int) -> int:
    """The offset after the first line end in `[place, stop)`; `stop` where there is none."""
    file.seek(place)
    while place < stop:
        block = file.read(min(BLOCK_BYTES, stop - place))
        if not block:
            break
        found = block.find(b"\n")
        if found >= 0:
            return place + found + 1
        place += len(block)
    return stop
