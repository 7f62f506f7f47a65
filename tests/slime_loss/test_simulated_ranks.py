"""The simulated ranks themselves: what they answer, and that nothing passes them unseen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.slime_loss.places import Place, Topology
from tests.slime_loss.simulated_ranks import CollectiveError, check_same_collectives, simulate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
THREE = Topology(cp_size=3)


def tensors(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor([float(number)]) for number in numbers]


def every_answer(place: Place) -> list[list[float]]:
    group, rank = place.cp_group, place.rank
    own = torch.tensor([rank, 10.0 * rank])
    reduced, largest, smallest = own.clone(), own.clone(), own.clone()
    dist.all_reduce(reduced, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group, async_op=True).wait()
    sent = own.clone()
    dist.broadcast(sent, src=1, group=group)
    gathered, listed = torch.zeros(6), tensors(0, 0, 0)
    dist.all_gather_into_tensor(gathered, own, group=group)
    dist.all_gather(listed, own[:1], group=group)
    scattered, exchanged = torch.zeros(2), torch.zeros(3)
    dist.reduce_scatter_tensor(scattered, torch.arange(6.0) + rank, group=group)
    dist.all_to_all_single(exchanged, 10.0 * rank + torch.arange(3), group=group)
    dist.barrier(group)
    found = [reduced, largest, smallest, sent, gathered, torch.cat(listed), scattered, exchanged]
    return [tensor.tolist() for tensor in found]


def test_every_collective_gives_what_real_ranks_get() -> None:
    ranks, calls = simulate(THREE, every_answer)
    for rank, found in enumerate(ranks):
        assert found == [
            [3, 30],
            [2, 20],
            [0, 0],
            [1, 10],
            [0, 0, 1, 10, 2, 20],
            [0, 1, 2],
            [3 + 6 * rank, 6 + 6 * rank],
            [rank, 10 + rank, 20 + rank],
        ]
    assert len(calls[0]) == 9
    check_same_collectives(THREE, calls)


def test_each_rank_finds_its_groups_and_its_rank_in_them() -> None:
    topology = Topology(cp_size=2, tp_size=3)

    def where(place: Place) -> tuple[int, ...]:
        groups = (None, place.cp_group, place.tp_group)
        return tuple(of(group) for group in groups for of in (dist.get_rank, dist.get_world_size))

    found, _ = simulate(topology, where)
    assert found == [(rank, 6, rank // 3, 2, rank % 3, 3) for rank in range(6)]
    assert not dist.is_initialized()


ONE = torch.ones(1)
EVERY_WAY_TO_COMMUNICATE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(ONE.clone(), group=group),
    "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced([ONE.clone()], group=group),
    "all_gather": lambda group: dist.all_gather(tensors(0, 0, 0), ONE, group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
        torch.ones(3), ONE, group=group
    ),
    "all_gather_coalesced": lambda group: dist.all_gather_coalesced(
        [tensors(0)] * 3, [ONE], group=group
    ),
    "all_gather_object": lambda group: dist.all_gather_object([None] * 3, "any", group=group),
    "gather": lambda group: dist.gather(ONE, tensors(0, 0, 0), group=group, group_dst=0),
    "gather_object": lambda group: dist.gather_object("any", [None] * 3, group=group, group_dst=0),
    "scatter": lambda group: dist.scatter(ONE.clone(), tensors(0, 0, 0), group=group, group_src=0),
    "reduce": lambda group: dist.reduce(ONE.clone(), group=group, group_dst=0),
    "reduce_scatter": lambda group: dist.reduce_scatter(ONE.clone(), tensors(0, 0, 0), group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
        ONE.clone(), torch.ones(3), group=group
    ),
    "all_to_all": lambda group: dist.all_to_all(tensors(0, 0, 0), tensors(0, 0, 0), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(
        torch.ones(3), torch.ones(3), group=group
    ),
    "broadcast": lambda group: dist.broadcast(ONE.clone(), group=group, group_src=0),
    "broadcast_object_list": lambda group: dist.broadcast_object_list(
        ["any"], group=group, group_src=0
    ),
    "barrier": lambda group: dist.barrier(group),
    "send": lambda group: dist.send(ONE, group=group, group_dst=1),
    "recv": lambda group: dist.recv(ONE.clone(), group=group, group_src=1),
    "isend": lambda group: dist.isend(ONE, group=group, group_dst=1),
    "irecv": lambda group: dist.irecv(ONE.clone(), group=group, group_src=1),
    "functional all_reduce": lambda group: functional.all_reduce(
        ONE, "sum", group or dist.group.WORLD
    ),
    "functional all_gather": lambda group: functional.all_gather_tensor(
        ONE, 0, group or dist.group.WORLD
    ),
}


RECORDED = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather_object",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "barrier",
}
"""The others are refused, which no test can miss either."""


@pytest.mark.parametrize("over_world", [False, True])
@pytest.mark.parametrize("way", EVERY_WAY_TO_COMMUNICATE)
def test_nothing_is_communicated_unseen_by_one_rank_alone(way: str, over_world: bool) -> None:
    def one_rank_alone(place: Place) -> None:
        if place.rank == 0:
            EVERY_WAY_TO_COMMUNICATE[way](None if over_world else place.cp_group)

    if way in RECORDED:
        with pytest.raises(CollectiveError, match=r"rank 0 waits in .* rank 1 has ended"):
            simulate(THREE, one_rank_alone)
    else:
        with pytest.raises(RuntimeError, match=r"No backend type associated|Group name not set"):
            simulate(THREE, one_rank_alone)


def differs_in_shape(place: Place) -> None:
    dist.all_reduce(torch.ones(2 if place.rank == 1 else 3), group=place.cp_group)


def differs_in_dtype(place: Place) -> None:
    dtype = torch.bfloat16 if place.rank == 2 else torch.float32
    dist.all_reduce(torch.ones(2, dtype=dtype), group=place.cp_group)


def differs_in_operation(place: Place) -> None:
    operation = dist.ReduceOp.MAX if place.rank == 0 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(2), operation, group=place.cp_group)


def differs_in_phase(place: Place) -> None:
    place.begin("backward" if place.rank == 0 else "forward")
    dist.barrier(place.cp_group)


def differs_in_order(place: Place) -> None:
    calls = [lambda: dist.barrier(place.cp_group), lambda: dist.all_reduce(ONE.clone())]
    for call in reversed(calls) if place.rank == 1 else calls:
        call()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (differs_in_shape, r"\[2\] over cp in start, rank 0 waits in .*\[3\]"),
        (differs_in_dtype, "torch.bfloat16 .* waits in .*torch.float32"),
        (differs_in_operation, "SUM .* waits in .*MAX"),
        (differs_in_phase, "in forward, .* in backward"),
        (differs_in_order, "rank 0 waits in barrier .* rank 1 waits in all_reduce"),
    ],
)
def test_ranks_that_differ_are_reported(function: Callable[[Place], None], message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        simulate(THREE, function)


def test_what_a_rank_raises_is_raised_with_its_rank() -> None:
    def one_fails(place: Place) -> None:
        if place.rank == 1:
            raise KeyError("lost")
        dist.barrier(place.cp_group)

    with pytest.raises(KeyError, match="lost") as caught:
        simulate(THREE, one_fails)
    assert caught.value.__notes__ == ["on simulated rank 1"]


GRID = Topology(cp_size=2, tp_size=2)


def test_groups_of_different_rows_may_call_in_other_shapes_and_more_often() -> None:
    def sized_by_cp_rank(place: Place) -> None:
        for _ in range(1 + place.cp_rank):
            dist.all_reduce(torch.ones(place.cp_rank), group=place.tp_group)
        dist.barrier(place.cp_group)

    _, calls = simulate(GRID, sized_by_cp_rank)
    check_same_collectives(GRID, calls)
    with pytest.raises(CollectiveError, match="ranks must call the same collectives"):
        check_same_collectives(Topology(tp_size=4), calls)


def test_groups_must_take_turns_in_one_order() -> None:
    """Which does not hang where ranks wait, but may where collectives share a device."""

    def ordered_by_cp_rank(place: Place) -> None:
        groups = [place.tp_group, place.cp_group]
        for group in reversed(groups) if place.cp_rank == 1 else groups:
            dist.barrier(group)

    _, calls = simulate(GRID, ordered_by_cp_rank)
    with pytest.raises(
        CollectiveError, match=r"rank 0 \['tp in start', 'cp in start'\], rank 2 \['cp in"
    ):
        check_same_collectives(GRID, calls)
