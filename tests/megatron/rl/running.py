"""What test functions on real ranks share: a configuration in, a built trainee out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.rl import cpu_backend
from megatron.rl.arguments import resolve
from megatron.rl.batching import MicroBatch
from megatron.rl.build import build_scheduler, build_trainee
from megatron.rl.checkpoint import Checkpointer
from megatron.rl.computed import compute, micro_batch_of, needs_pass, old_outputs_of
from megatron.rl.data import check_data, data_identity, make_source
from megatron.rl.initialize import World, process_grid
from megatron.rl.rollout import Computed, Rollout, read_rollout
from megatron.rl.step import Trainee


@dataclass(frozen=True)
class Running:
    """One rank of a run that stands before its first step."""

    trainee: Trainee
    rollout: Rollout
    checkpointer: Checkpointer

    @cached_property
    def computed(self) -> Computed:
        """What the trainer computes before the first step."""
        runs_pass = needs_pass(self.rollout, self.trainee.config)
        return self.computed_from(old_outputs_of(self.rollout, self.trainee) if runs_pass else {})

    def computed_from(self, old_outputs: Mapping[int, Tensor]) -> Computed:
        """What the trainer computes from the old outputs of a checkpoint."""
        return compute(self.rollout, old_outputs, self.trainee.config, self.trainee.grid)

    def micro_batches(self, step: int = 0, computed: Computed | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of a step of the first rollout."""
        computed = computed or self.computed
        plan = self.rollout.steps[step]
        packs = plan.micro_batches[self.trainee.grid.dp_rank]
        return [micro_batch_of(self.rollout, plan, pack, computed, self.trainee) for pack in packs]


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
            read_rollout(0, source.rollout(0, 0), config, grid.dp_rank),
            Checkpointer(config, grid, trainee, scheduler, identity),
        )
