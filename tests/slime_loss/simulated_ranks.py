"""Ranks of one process that really communicate: threads, of which one runs at a time.

Whatever a rank calls of torch.distributed ends in a method of its group, which is one of ours: it
is recorded, and answered once every rank of the group has made the same call. Where real ranks
would wait for ever, or exchange what does not fit, CollectiveError says who waits for what.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from tests.slime_loss.places import Place, Topology

REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
}


class CollectiveError(AssertionError):
    """Ranks that would hang, or differ in the collectives they call."""


class Abandoned(BaseException):
    """Ends a rank that waits for others, once one of them has failed."""


@dataclass(frozen=True)
class Call:
    """One collective of one rank: in which part of the work, over which group, of what shapes."""

    phase: str
    group: str
    kind: str
    dtype: torch.dtype | None
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        shapes = " -> ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.kind} {self.dtype} {shapes} over {self.group} in {self.phase}"


@dataclass
class Member:
    """One rank: its thread, what it waits for, and what it has called."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    phase: str = "start"
    waits_for: Call | None = None
    has_ended: bool = False
    result: Any = None
    error: BaseException | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    received: list[list[Tensor]] = field(default_factory=list)

    def __str__(self) -> str:
        doing = "has ended" if self.has_ended else f"waits in {self.waits_for}"
        return f"rank {self.rank} {doing}"


class Simulation:
    """The ranks of one run, and who has arrived at which collective."""

    def __init__(self, num_ranks: int) -> None:
        self.members = [Member(rank) for rank in range(num_ranks)]
        self.world: dict[int, SimulatedGroup] = {}
        self._arrived: dict[tuple[str, tuple[int, ...]], dict[int, list[Tensor]]] = {}
        self._control = threading.Semaphore(0)
        self._is_over = False

    def run(self, function: Callable[[Member], Any]) -> None:
        """function(member) on every rank.

        Raises:
            CollectiveError: No rank can go on, or two called what does not fit.
            Exception: What the first rank to fail raised.
        """
        threads = [
            threading.Thread(target=self._serve, args=(function, member), daemon=True)
            for member in self.members
        ]
        for thread in threads:
            thread.start()
        try:
            self._schedule()
        finally:
            self._is_over = True
            for member in self.members:
                if not member.has_ended:
                    self._resume(member)
            for thread in threads:
                thread.join()

    def meet(self, group: "SimulatedGroup", call: Call, inputs: list[Tensor]) -> list[list[Tensor]]:
        """What every rank of the group gives to this collective, in the order of the group."""
        member = self.members[group.members[group.rank()]]
        member.calls.append(call)
        key = (group.label, group.members)
        arrived = self._arrived.setdefault(key, {})
        arrived[member.rank] = [tensor.detach().clone() for tensor in inputs]
        self._check_fits(member, call, list(arrived))
        if len(arrived) < len(group.members):
            member.waits_for = call
            self._control.release()
            member.turn.acquire()
            if self._is_over:
                raise Abandoned
            return member.received
        del self._arrived[key]
        everything = [arrived[rank] for rank in group.members]
        for rank in group.members:
            self.members[rank].received, self.members[rank].waits_for = everything, None
        return everything

    def _check_fits(self, member: Member, call: Call, waiting: list[int]) -> None:
        for rank in waiting:
            other = self.members[rank].waits_for
            if rank != member.rank and other != call:
                raise CollectiveError(
                    f"ranks of one group must call the same: rank {member.rank} calls {call}, "
                    f"rank {rank} waits in {other}"
                )

    def _schedule(self) -> None:
        while any(not member.has_ended for member in self.members):
            ready = [one for one in self.members if not one.has_ended and one.waits_for is None]
            if not ready:
                raise CollectiveError(
                    "a collective must be called by every rank of its group: "
                    + "; ".join(map(str, self.members))
                )
            for member in ready:
                self._resume(member)
                if member.error is not None:
                    member.error.add_note(f"on simulated rank {member.rank}")
                    raise member.error

    def _resume(self, member: Member) -> None:
        dist.GroupMember.WORLD = self.world[member.rank]
        member.turn.release()
        self._control.acquire()

    def _serve(self, function: Callable[[Member], Any], member: Member) -> None:
        member.turn.acquire()
        try:
            if not self._is_over:
                member.result = function(member)
        except Abandoned:
            pass
        except BaseException as error:
            member.error = error
        finally:
            member.has_ended = True
            self._control.release()


class SimulatedGroup(dist.ProcessGroup):
    """One rank's process group. Collectives that it does not define are refused by torch."""

    def __init__(
        self, simulation: Simulation, label: str, members: tuple[int, ...], rank: int
    ) -> None:
        super().__init__(members.index(rank), len(members))
        self.simulation, self.label, self.members = simulation, label, members

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._reduce_into(tensors, tensors, "all_reduce", opts)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        everything = self._meet(f"broadcast from {opts.rootRank}", tensors, tensors)
        _copy(everything[opts.rootRank], tensors)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> Any:
        everything = self._meet("all_gather", inputs, outputs[0])
        _copy([tensors[0] for tensors in everything], outputs[0])
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any) -> Any:
        everything = self._meet("all_gather_single", [own], [output])
        output.view(-1).copy_(torch.cat([tensors[0].reshape(-1) for tensors in everything]))
        return _done(output)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any) -> Any:
        total = torch.empty_like(own)
        self._reduce_into([own], [total], "reduce_scatter_single", opts, outputs=[output])
        output.copy_(total.view(self.size(), *output.shape)[self.rank()])
        return _done(output)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_splits: list[int], splits: list[int], *_: Any
    ) -> Any:
        assert output_splits == splits == [], "equal splits only"
        everything = self._meet("all_to_all_single", [own], [output])
        _copy([torch.cat([one[0].chunk(self.size())[self.rank()] for one in everything])], [output])
        return _done(output)

    def barrier(self, **_: Any) -> Any:
        self._meet("barrier", [], [])
        return _done([])

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _reduce_into(
        self,
        inputs: list[Tensor],
        totals: list[Tensor],
        kind: str,
        opts: Any,
        outputs: list[Tensor] | None = None,
    ) -> None:
        operation = getattr(opts.reduceOp, "op", opts.reduceOp)
        everything = self._meet(
            f"{kind} {operation.name}", inputs, totals if outputs is None else outputs
        )
        for position, total in enumerate(totals):
            stack = torch.stack([tensors[position] for tensors in everything])
            total.copy_(REDUCTIONS[operation](stack))

    def _meet(self, kind: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[list[Tensor]]:
        call = Call(
            phase=self.simulation.members[self.members[self.rank()]].phase,
            group=self.label,
            kind=kind,
            dtype=inputs[0].dtype if inputs else None,
            shapes=tuple(tuple(tensor.shape) for tensor in [*inputs, *outputs]),
        )
        return self.simulation.meet(self, call, inputs)


def simulate(
    topology: Topology, function: Callable[[Place], Any]
) -> tuple[list[Any], list[list[Call]]]:
    """function(place) on every rank of a grid, in this process.

    Returns:
        What each rank returned, and the collectives that it called.

    Raises:
        CollectiveError: Real ranks would hang, or exchange what does not fit.
    """
    simulation = Simulation(topology.num_ranks)
    with _registered(simulation, topology) as groups:
        simulation.run(lambda member: function(_place(topology, member, groups)))
    members = simulation.members
    return [member.result for member in members], [member.calls for member in members]


def check_same_collectives(topology: Topology, ranks: Sequence[Sequence[Call]]) -> None:
    """Raise CollectiveError unless ranks call the same collectives, in the same order.

    Ranks of one group call the same over it, in every respect, one by one. Tensor-parallel groups
    hold different rows, which they may work through in more or fewer calls; but every rank goes
    from the collectives of one group to those of another in the same places.
    """
    for rank, calls in enumerate(ranks):
        for group in ("tp", "cp", "world"):
            first = topology.members(group, rank)[0]
            _check_equal(rank, _over(group, calls), first, _over(group, ranks[first]))
        _check_equal(rank, _turns(calls), 0, _turns(ranks[0]))


def _over(group: str, calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.group == group]


def _turns(calls: Sequence[Call]) -> list[str]:
    """Which group communicates after which, in which part of the work."""
    return [turn for turn, _ in groupby(f"{call.group} in {call.phase}" for call in calls)]


def _check_equal(rank: int, ours: Sequence[object], other: int, theirs: Sequence[object]) -> None:
    if ours != theirs:
        raise CollectiveError(
            "ranks must call the same collectives in the same order: "
            f"rank {other} {list(map(str, theirs))}, rank {rank} {list(map(str, ours))}"
        )


@contextmanager
def _registered(
    simulation: Simulation, topology: Topology
) -> Iterator[dict[tuple[str, int], SimulatedGroup]]:
    """The groups of every rank by name, as torch.distributed looks them up."""
    groups = {
        (name, rank): SimulatedGroup(simulation, name, topology.members(name, rank), rank)
        for name in ("tp", "cp", "world")
        for rank in range(topology.num_ranks)
    }
    simulation.world = {rank: groups["world", rank] for rank in range(topology.num_ranks)}
    ranks = {
        group: {member: position for position, member in enumerate(group.members)}
        for group in groups.values()
    }
    backends = dict.fromkeys(groups.values(), ("simulated", None))
    known, before = dist.distributed_c10d._world, dist.GroupMember.WORLD
    with patch.dict(known.pg_group_ranks, ranks), patch.dict(known.pg_map, backends):
        try:
            yield groups
        finally:
            dist.GroupMember.WORLD = before


def _place(
    topology: Topology, member: Member, groups: dict[tuple[str, int], SimulatedGroup]
) -> Place:
    def begin(phase: str) -> None:
        member.phase = phase

    own = {name: groups[name, member.rank] for name in ("tp", "cp")}
    return Place(
        topology,
        member.rank,
        tp_group=own["tp"] if topology.tp_size > 1 else None,
        cp_group=own["cp"] if topology.cp_size > 1 else None,
        begin=begin,
    )


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)
