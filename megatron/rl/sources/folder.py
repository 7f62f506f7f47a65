"""A watched folder: an engine elsewhere drops finished files, the run takes them in order.

Files are taken in natural order of their names, each whole and once. A file must appear complete,
by a rename within the folder's file system; names that begin with "." or "_" are not looked at. A
file named `END` says that no further one will come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.rl.samples import printable
from megatron.rl.sources.formats import SUFFIXES
from megatron.rl.sources.paths import natural_order
from megatron.rl.sources.source import EndOfRolloutsError
from megatron.rl.sources.spool import Entry
from megatron.rl.together import on_first_rank

END = "END"
"""Name of the file that ends a run."""
POLL_SECONDS = 1.0
"""Between two looks at the folder; ranks meet as often, so no collective waits longer."""
SECONDS_PER_LINE = 60.0
"""Between two lines that say what is waited for."""

_MESSAGES = logging.getLogger("megatron.rl.sources")


@dataclass
class WatchedFolder:
    """Makes a rollout of each file that appears.

    Args:
        folder: the same for every rank; only rank 0 looks into it.
        samples_per_rollout: samples of a file, as foreseen.
    """

    folder: Path
    samples_per_rollout: int | None = None
    _known: set[str] = field(default_factory=set, init=False)
    _waiting_since: float | None = field(default=None, init=False)
    _next_line: float = field(default=0.0, init=False)

    def make(self, k: int, weight_version: int, cursor: Mapping[str, Any]) -> Entry | None:  # noqa: ARG002 -- files come when they come
        """The first file behind the former one; see `Maker.make`."""
        return on_first_rank(lambda: self._look(k, cursor.get("file")))

    def describe(self) -> str:
        """The folder."""
        return f"{'watched folder':<18}{self.folder}, until a file named {END} appears"

    def identity(self) -> dict[str, object]:
        """The folder may move, and each file is checked against its entry in the spool."""
        return {"rollouts": "of a watched folder"}

    def _look(self, k: int, former: str | None) -> Entry | None:
        names = self._names()
        new = [name for name in names if former is None or _order(name) > _order(former)]
        self._warn_of_late({*names} - {*new})
        if new:
            self._waiting_since = None
            self._known.add(new[0])
            return Entry((str((self.folder / new[0]).absolute()),), {"file": new[0]})
        if (self.folder / END).exists():
            raise EndOfRolloutsError(f"{self.folder / END}: {k} rollouts were all")
        self._wait(k, former, len(names))
        return None

    def _names(self) -> list[str]:
        """Finished files in their order."""
        try:
            found = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        names = [n for n in found if not n.startswith((".", "_")) and n.endswith(SUFFIXES)]
        return sorted(names, key=_order)

    def _warn_of_late(self, passed: set[str]) -> None:
        """Say which files came after one that sorts behind them: they are never taken."""
        for name in sorted(passed - self._known) if self._known else ():
            _MESSAGES.warning(
                f"{printable(name)} in {self.folder} came too late and is not trained: a file "
                "behind it in the order of names was taken before; fix: name files in the order "
                "of their making"
            )
        self._known |= passed

    def _wait(self, k: int, former: str | None, num_files: int) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since, self._next_line = now, now
        if now >= self._next_line:
            minutes = (now - self._waiting_since) / 60
            behind = f" behind {printable(former)}" if former else ""
            _MESSAGES.info(
                f"waiting {minutes:.0f} min for the file of rollout {k}{behind} in {self.folder} "
                f"({num_files} files there, none of them new)"
            )
            self._next_line = now + SECONDS_PER_LINE
        time.sleep(POLL_SECONDS)


def _order(name: str) -> tuple[object, str]:
    return natural_order(name), name
