"""What test functions on real ranks share: a configuration in, a built trainee out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron.rl import cpu_backend
from megatron.rl.arguments import resolve
from megatron.rl.batching import MicroBatch, build_micro_batch
from megatron.rl.build import (
    build_scheduler,
    build_trainee,
    check_data,
    data_identity,
    make_source,
)
from megatron.rl.checkpoint import Checkpointer
from megatron.rl.initialize import World, process_grid
from megatron.rl.rollout import Rollout, plan_rollout
from megatron.rl.step import Trainee


@dataclass(frozen=True)
class Running:
    """One rank of a run that stands before its first step."""

    trainee: Trainee
    rollout: Rollout
    checkpointer: Checkpointer

    def micro_batches(self, step: int = 0) -> list[MicroBatch]:
        """This rank's micro-batches of a step of the first rollout."""
        plan = self.rollout.steps[step]
        return [
            build_micro_batch(
                [self.rollout.trained(plan, position) for position in pack],
                self.rollout.streams,
                self.trainee.config,
                self.trainee.grid,
            )
            for pack in plan.micro_batches[self.trainee.grid.dp_rank]
        ]


@contextmanager
def running(rank: int, world_size: int, argv: list[str]) -> Iterator[Running]:
    """Build everything for `argv` within the job that the ranks already form."""
    cpu_backend.install()
    config = resolve(argv, world_size, has_driver=False)
    world = World(rank, rank, world_size, launched=True)
    with process_grid(config, world, torch.device("cpu")) as grid:
        source = make_source(config, check_data(config))
        trainee = build_trainee(config, grid)
        scheduler = build_scheduler(config, trainee, total_steps=10)
        identity = data_identity(config, source)
        yield Running(
            trainee,
            plan_rollout(0, source.rollout(0), config),
            Checkpointer(config, grid, trainee, scheduler, identity),
        )
