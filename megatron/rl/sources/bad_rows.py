"""What is done with bad rows: all counted, the first kept, all written aside on request."""

import json
import os
from pathlib import Path
from typing import TextIO

from megatron.rl.samples import BadRowsError, RowError
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import open_rows
from megatron.rl.sources.row import BadFileError
from megatron.rl.sources.scan import BadRow, error_of
from megatron.rl.sources.values import free_text

MAX_ROW_CHARS = 1 << 20


class BadRowLog:
    """Collects the errors of one pass.

    Args:
        keep: How many errors are kept with their details.
        aside: Where skipped rows go, one JSON object each: the error, and the row itself as text
            (null where it is longer than a million characters). The file appears when the pass has
            succeeded, and only if a row was skipped.
        trust_pickle: As for reading.
    """

    def __init__(self, keep: int, aside: str | None, *, trust_pickle: bool) -> None:
        self.errors: list[RowError] = []
        self.num_rows = 0
        self.num_files = 0
        self._keep = keep
        self._aside = aside
        self._partial: TextIO | None = None
        self._trust_pickle = trust_pickle
        self._cache = UnitCache()

    def add(self, bad: BadRow) -> None:
        """Count one bad row, or one bad file (line 0)."""
        if bad.error.line:
            self.num_rows += 1
        else:
            self.num_files += 1
        if len(self.errors) < self._keep:
            self.errors.append(bad.error)
        if self._aside is not None and bad.error.line:
            self._write(bad, self._aside)

    def add_file(self, path: str, fault: BadFileError) -> None:
        """Count a file that cannot be used."""
        self.add(BadRow(error_of(fault, path, 0), -1))

    def raise_all(self) -> None:
        """End the pass with what was found."""
        raise BadRowsError(self.errors, self.num_rows + self.num_files)

    def close(self, *, keep_aside: bool) -> None:
        """Put the rows written aside in their place, or remove what was begun."""
        if self._partial is None or self._aside is None:
            return
        self._partial.close()
        if keep_aside:
            os.replace(self._partial.name, self._aside)
        else:
            os.unlink(self._partial.name)

    def _write(self, bad: BadRow, aside: str) -> None:
        if self._partial is None:
            Path(aside).parent.mkdir(parents=True, exist_ok=True)
            self._partial = open(f"{aside}.partial", "w", encoding="utf-8")  # noqa: SIM115
        error = bad.error
        entry = {"file": error.file, "line": error.line, "field": error.field, "rule": error.rule}
        entry |= {"value": error.value, "fix": error.fix, "row": self._text(bad)}
        self._partial.write(json.dumps(entry) + "\n")

    def _text(self, bad: BadRow) -> str | None:
        try:
            rows = open_rows(bad.error.file, self._cache, trust_pickle=self._trust_pickle)
            raw = rows.read([bad.place])[0]
        except (BadFileError, OSError):
            return None
        if isinstance(raw, bytes):
            text = raw.decode(errors="replace").rstrip("\r\n")
        else:
            text = free_text(raw, MAX_ROW_CHARS)
        return text if len(text) <= MAX_ROW_CHARS else None
