"""Rollouts that are made or arrive during the run: noted in a spool, read back like any file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from megatron.rl.samples import RowRules
from megatron.rl.sources.check import ReadOptions, check_rollouts
from megatron.rl.sources.files import RolloutFiles, RolloutRows
from megatron.rl.sources.source import EndOfRolloutsError
from megatron.rl.sources.spool import Entry, Spool, SpoolError
from megatron.rl.together import on_first_rank


class Maker(Protocol):
    """Makes, or finds, the rollouts that a spool does not hold yet."""

    samples_per_rollout: int | None
    """As foreseen; None where nobody can say."""

    def make(self, k: int, weight_version: int, cursor: Mapping[str, Any]) -> Entry | None:
        """Make rollout k; called on every rank.

        Args:
            k: from 0.
            weight_version: optimizer steps that the model in training has taken.
            cursor: the former entry's; empty for the first rollout.

        Returns:
            The same on every rank; None where it is not there yet.

        Raises:
            EndOfRolloutsError: there will be none; on every rank.
        """
        ...

    def describe(self) -> str:
        """Figures for the start of a run, one a line."""
        ...

    def identity(self) -> dict[str, object]:
        """What the number of a rollout depends on."""
        ...


@dataclass
class SpooledSource:
    """A source whose rollouts are noted one at a time. Every rank holds one and calls it alike.

    Args:
        spool: rank 0 alone reads and writes it.
        maker: what makes rollouts.
        rules: what the run demands of a row.
        options: how rows are read.
        num_rollouts: how many the run takes; None until the maker ends.
        max_staleness: samples whose weights were older by more optimizer steps are left out.
    """

    spool: Spool
    maker: Maker
    rules: RowRules
    options: ReadOptions
    num_rollouts: int | None = None
    max_staleness: int | None = None

    def open(self) -> None:
        """Check the spool.

        Raises:
            SpoolError: the spool is another run's.
        """
        on_first_rank(lambda: self.spool.open(self.identity()))

    def rollout(self, k: int, weight_version: int) -> RolloutRows | None:
        """The rows of rollout k, made now unless the spool has them; see `Source.rollout`."""
        if self.num_rollouts is not None and k >= self.num_rollouts:
            raise EndOfRolloutsError(f"{self.num_rollouts} rollouts were wanted")
        found = on_first_rank(lambda: self._noted(k))
        if found is None:
            cursor = on_first_rank(lambda: self._cursor_before(k))
            made = self.maker.make(k, weight_version, cursor)
            if made is None:
                return None
            found = on_first_rank(lambda: self._note(k, made))
        return self._fresh(*found, weight_version)

    def rollout_sizes(self) -> Iterator[int]:
        """As many as the maker foresees, for every rollout."""
        if self.num_rollouts is None or self.maker.samples_per_rollout is None:
            return iter(())
        return repeat(self.maker.samples_per_rollout, self.num_rollouts)

    def describe(self) -> str:
        """The maker's figures and the spool."""
        return f"{self.maker.describe()}\n{'noted in':<18}{self.spool.folder}"

    def identity(self) -> dict[str, object]:
        """See `Source.identity`."""
        return self.maker.identity()

    def _cursor_before(self, k: int) -> Mapping[str, Any]:
        if k == 0:
            return {}
        former = self.spool.get(k - 1)
        if former is None:
            raise SpoolError(
                f"{self.spool.folder} must hold rollout {k - 1}, behind which rollout {k} goes on; "
                "fix: give the --rollout-dir that this run has used so far"
            )
        return former.cursor

    def _note(self, k: int, made: Entry) -> tuple[RolloutFiles, Entry]:
        """Check a rollout that was made; only a good one is noted."""
        files = self._check(made)
        entry = replace(made, fingerprint=files.fingerprint)
        self.spool.put(k, entry)
        return files, entry

    def _noted(self, k: int) -> tuple[RolloutFiles, Entry] | None:
        entry = self.spool.get(k)
        if entry is None:
            return None
        files = self._check(entry)
        if files.fingerprint != entry.fingerprint:
            raise SpoolError(
                f"rollout {k} must be what it was when it was first read: {', '.join(entry.files)} "
                "changed; fix: keep rollout files as they are while a run may read them"
            )
        return files, entry

    def _check(self, entry: Entry) -> RolloutFiles:
        return check_rollouts(self.spool.paths(entry), self.rules, self.options)

    def _fresh(self, files: RolloutFiles, entry: Entry, weight_version: int) -> RolloutRows:
        rows = files.rows
        places = np.argsort(rows["group"], kind="stable")
        staleness = weight_version - rows["weight_version"][places]
        known = rows["weight_version"][places] >= 0
        scalars = dict(entry.scalars)
        if known.any():
            scalars["rollout/staleness/mean"] = float(staleness[known].mean())
            scalars["rollout/staleness/max"] = float(staleness[known].max())
        if self.max_staleness is not None:
            stale = known & (staleness > self.max_staleness)
            scalars["rollout/stale_samples"] = int(stale.sum())
            places = places[~stale]
        return RolloutRows(files, places, scalars)
