import pytest
import torch
from torch import distributed as dist

from slime_loss.collectives import (
    all_gather_rows,
    all_reduce_sum,
    all_reduce_sum_,
    gather_rows,
    gather_rows_for_same_loss,
    group_rank,
    group_size,
    reduce_scatter_rows,
)
from tests.spawn import World


def every_collective(rank: int) -> None:
    group = dist.group.WORLD
    assert (group_size(group), group_rank(group)) == (2, rank)
    rows = torch.tensor([[1.0, 2.0]]) + 10 * rank
    assert all_gather_rows(rows, group).tolist() == [[1, 2], [11, 12]]
    assert reduce_scatter_rows(torch.cat([rows, -rows]), group).tolist() == [
        [[12, 14], [-12, -14]][rank]
    ]
    buffer = rows.clone()
    all_reduce_sum_(buffer, group)
    assert buffer.tolist() == [[12, 14]]
    assert rows.tolist() == [[1 + 10 * rank, 2 + 10 * rank]]


def odd_memory(rank: int) -> None:
    """Strided, single-element and empty rows, whose bytes do not lie end to end."""
    group = dist.group.WORLD
    strided = (torch.arange(12).view(3, 4) + 100 * rank).t()
    both = torch.cat([torch.arange(12).view(3, 4).t() + 100 * one for one in range(2)])
    assert torch.equal(all_gather_rows(strided, group), both)
    single = torch.tensor([rank, 5, 5, 5])[::2][:1]
    assert all_gather_rows(single, group).tolist() == [0, 1]
    assert all_gather_rows(torch.zeros(0, 3, dtype=torch.bfloat16), group).shape == (0, 3)
    assert reduce_scatter_rows(torch.ones(3, 4).t(), group).tolist() == [[2.0] * 3] * 2


def gradients_of_copies(rank: int) -> list[float]:
    rows = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    gathered = gather_rows(rows, dist.group.WORLD)
    (gathered * torch.arange(1.0, 5) * (10.0**rank)).sum().backward()
    return rows.grad.tolist()


def gradients_of_the_same_loss(rank: int) -> list[float]:
    rows = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    gathered = gather_rows_for_same_loss(rows + rank, dist.group.WORLD)
    assert gathered.tolist() == [0, 0, 1, 1]
    (gathered * torch.arange(1.0, 5)).sum().backward()
    return rows.grad.tolist()


def gradients_of_a_sum(rank: int) -> list[float]:
    part = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    total = all_reduce_sum(part, dist.group.WORLD)
    assert (total.tolist(), part.tolist()) == ([2, 4], [1, 2])
    (total * 10.0**rank).sum().backward()
    return part.grad.tolist()


@pytest.mark.parametrize("check", [every_collective, odd_memory])
def test_two_ranks(two_ranks: World, check: object) -> None:
    two_ranks.run(check)


def test_the_owner_gets_the_gradients_of_all_copies(two_ranks: World) -> None:
    assert two_ranks.run(gradients_of_copies) == [[11, 22], [33, 44]]


def test_each_takes_its_own_of_the_gradients_of_the_same_loss(two_ranks: World) -> None:
    assert two_ranks.run(gradients_of_the_same_loss) == [[1, 2], [3, 4]]


def test_a_part_gets_the_gradients_of_every_sum(two_ranks: World) -> None:
    assert two_ranks.run(gradients_of_a_sum) == [[11, 11], [11, 11]]


def test_no_group_is_one_process() -> None:
    rows = torch.ones(2, requires_grad=True)
    assert (group_size(None), group_rank(None)) == (1, 0)
    for identity in (all_gather_rows, gather_rows, reduce_scatter_rows):
        assert identity(rows, None) is rows
