"""What a rank tells of itself, and what the words of all ranks say about who holds up the job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

NUM_NAMED = 8
"""Ranks, and sample ids, that a message names; the rest it counts."""


@dataclass(frozen=True)
class Sign:
    """The place of one rank in the run, as it last told it.

    Args:
        step: optimizer step, from 1; 0 before the first.
        phase: what the rank does.
        samples: ids of the samples it does that with.
        number: phases that the rank has entered; every rank enters the same ones.
        micro_batches: that it has begun in this phase.
        since: when it entered the phase, Unix time.
        beat: grows with every telling.
        told: when it told this, Unix time.
        frame: where its main thread is, told when it stands still.
        ended: the error that it ended with.
    """

    step: int = 0
    phase: str = "start-up"
    samples: str = ""
    number: int = 0
    micro_batches: int = 0
    since: float = 0.0
    beat: int = 0
    told: float = 0.0
    frame: str = ""
    ended: str = ""

    @property
    def place(self) -> str:
        """`step 12, training (samples [4, 5])`."""
        step = f"step {self.step}" if self.step else "start-up"
        about = f" (samples {self.samples})" if self.samples else ""
        return f"{step}, {self.phase}{about}"

    @property
    def position(self) -> tuple[int, int]:
        """How far the rank is; a rank that is behind has a smaller one."""
        return self.number, self.micro_batches

    def describe(self) -> str:
        """Place, time, progress within the phase, and the line of code where that is told."""
        begun = f", micro-batch {self.micro_batches}" if self.micro_batches else ""
        frame = f", at {self.frame}" if self.frame else ""
        return f"{self.place} since {clock(self.since)}{begun}{frame}"

    def encode(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Sign:
        """What `encode` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Survey:
    """The signs of all ranks, taken twice.

    Args:
        signs: by rank, the last of each; None of a rank that has never told one.
        silent: ranks that told nothing between the two.
    """

    signs: Mapping[int, Sign | None]
    silent: frozenset[int]

    def lost(self) -> dict[int, str]:
        """The ranks that are not there, that ended, or that are silent, each with its last sign."""
        found = {}
        for rank, sign in self.signs.items():
            if sign is None:
                found[rank] = f"rank {rank} has not started, or cannot reach the job's store"
            elif sign.ended:
                found[rank] = f"rank {rank} ended in {sign.place}: {sign.ended}"
            elif rank in self.silent:
                found[rank] = (
                    f"rank {rank} gives no sign of life since {clock(sign.told)} (killed, stopped, "
                    f"or its machine is gone); it was in {sign.describe()}"
                )
        return found

    def behind(self, rank: int) -> dict[int, str]:
        """The ranks that `rank` may wait for: where all ranks live, those that are less far."""
        mine = self._of(rank).position
        return {
            other: f"rank {other} is behind, still in {sign.describe()}"
            for other, sign in self._others(rank)
            if sign.position < mine
        }

    def elsewhere(self, rank: int) -> dict[int, str]:
        """The ranks that are in another phase than `rank`, and not behind it."""
        mine = self._of(rank)
        return {
            other: f"rank {other} is elsewhere, in {sign.describe()}"
            for other, sign in self._others(rank)
            if (sign.step, sign.phase) != (mine.step, mine.phase) and sign.position >= mine.position
        }

    def _of(self, rank: int) -> Sign:
        return self.signs[rank] or Sign()

    def _others(self, rank: int) -> list[tuple[int, Sign]]:
        return [(r, sign) for r, sign in self.signs.items() if sign is not None and r != rank]


def listed(suspects: Mapping[int, str]) -> str:
    """What was found of ranks, in one text; many of them are counted."""
    shown = [*suspects.values()][:NUM_NAMED]
    if len(suspects) > NUM_NAMED:
        shown.append(f"and {len(suspects) - NUM_NAMED} more ranks")
    return "; ".join(shown)


def brief(ids: Sequence[object]) -> str:
    """The first ids, and how many there are: `[3, 1, ... 64 in all]`."""
    shown = ", ".join(str(i) for i in ids[:NUM_NAMED])
    return f"[{shown}, ... {len(ids)} in all]" if len(ids) > NUM_NAMED else f"[{shown}]"


def clock(seconds: float) -> str:
    """Unix time as the hour of this machine."""
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"
