"""Where a rank stands in a grid of tensor- inside context-parallel ranks, real or simulated."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import distributed as dist


@dataclass(frozen=True)
class Topology:
    """A grid of ranks: rank = cp_rank * tp_size + tp_rank."""

    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False

    @property
    def num_ranks(self) -> int:
        return self.cp_size * self.tp_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """cp_rank, tp_rank."""
        return divmod(rank, self.tp_size)

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """The ranks that a rank's group of this name is made of."""
        cp_rank, tp_rank = self.coordinates(rank)
        if group == "cp":
            return tuple(range(tp_rank, self.num_ranks, self.tp_size))
        if group == "tp":
            return tuple(range(cp_rank * self.tp_size, (cp_rank + 1) * self.tp_size))
        return tuple(range(self.num_ranks))


ONE_RANK = Topology()


def _unrecorded(_phase: str) -> None:
    pass


@dataclass(frozen=True)
class Place:
    """One rank's place, and what it communicates over; a group of one rank is None.

    `begin` names the part of the work that follows, for the record of its collectives.
    """

    topology: Topology = ONE_RANK
    rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    begin: Callable[[str], None] = _unrecorded

    @property
    def cp_rank(self) -> int:
        return self.topology.coordinates(self.rank)[0]

    @property
    def tp_rank(self) -> int:
        return self.topology.coordinates(self.rank)[1]


ALONE = Place()


def real_place(topology: Topology, rank: int) -> Place:
    """The place of a real rank; every rank of the process group of all must ask for its own."""
    own: dict[str, dist.ProcessGroup | None] = {}
    for name in ("tp", "cp"):
        for members in sorted({topology.members(name, one) for one in range(topology.num_ranks)}):
            group = dist.new_group(list(members)) if len(members) > 1 else None
            if rank in members:
                own[name] = group
    return Place(topology, rank, tp_group=own["tp"], cp_group=own["cp"])
