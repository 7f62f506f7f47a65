import os
import time

import pytest
import torch
from torch import distributed as dist

from tests.spawn import RankError, World, run_on_ranks


def sum_of_ranks(rank: int, offset: int) -> tuple[int, int, int]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return rank, int(value), torch.get_num_threads()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ArithmeticError("the reason")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(30)


def stall_on_one(rank: int) -> None:
    if rank == 0:
        time.sleep(30)


def test_every_rank_runs_in_one_group_and_answers() -> None:
    assert run_on_ranks(3, sum_of_ranks, 10) == [(0, 33, 1), (1, 33, 1), (2, 33, 1)]


def test_the_rank_that_fails_is_the_one_reported_and_the_world_begins_anew() -> None:
    with World(2, timeout_s=20) as world:
        with pytest.raises(RankError, match=r"(?s)^rank 1 failed in fail_on_one.*the reason"):
            world.run(fail_on_one)
        with pytest.raises(RankError, match=r"^rank 1 died in die_on_one: exit code 7"):
            world.run(die_on_one)
        assert world.run(sum_of_ranks, 0) == [(0, 1, 1), (1, 1, 1)]


def test_a_rank_that_stalls_ends_the_call_in_time() -> None:
    with World(2) as world:
        world.run(sum_of_ranks, 0)
        world.timeout_s = 1
        start = time.monotonic()
        with pytest.raises(RankError, match=r"ranks \[0\] did not end stall_on_one within 1 s"):
            world.run(stall_on_one)
        assert time.monotonic() - start < 15
