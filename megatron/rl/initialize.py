"""Process groups, device, seeds and timeouts of a run; the only reader of the environment."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.rl import cpu_backend
from megatron.rl.board import Board
from megatron.rl.config import RunConfig
from megatron.rl.float64 import float64_throughout
from megatron.rl.guard import agree_on_flags, phase
from megatron.rl.watch import Watch


@dataclass(frozen=True)
class World:
    """This process among the processes of the job.

    Args:
        rank: rank in the job.
        local_rank: rank on this machine.
        world_size: ranks of the job.
        launched: whether a launcher (torchrun, srun) started this process; without one the job is
            this single process.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False


def read_world() -> World:
    """Read what torchrun, or srun with the same variables, tells this process.

    Raises:
        ValueError: WORLD_SIZE is set without the other variables of a launcher.
    """
    if "WORLD_SIZE" not in os.environ:
        return World()
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(f"a launcher must set {', '.join(needed)}: missing {', '.join(missing)}")
    rank, local_rank, world_size = (int(os.environ[name]) for name in needed[:3])
    return World(rank, local_rank, world_size, launched=True)


@dataclass(frozen=True)
class Grid:
    """The process groups of this rank and its place in them.

    Args:
        world: this process in the job.
        groups: megatron-core's groups (tp, pp, cp, dp, dp_cp, mp, ...).
        device: where this rank computes.
        watch: knows what this rank does, and what all others do.
    """

    world: World
    groups: ProcessGroupCollection
    device: torch.device
    watch: Watch

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the console, TensorBoard and metrics.jsonl."""
        return self.world.rank == 0

    @cached_property
    def dp_rank(self) -> int:
        """Rank among the replicas of the model."""
        return self.groups.dp.rank()

    @cached_property
    def cp_rank(self) -> int:
        """Rank among those that share a sequence."""
        return self.groups.cp.rank()

    @cached_property
    def cp_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.groups.cp.size()

    @cached_property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.groups.pp.size()

    @cached_property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, and so the head and the loss."""
        return self.groups.pp.rank() == self.pp_size - 1


@contextmanager
def distributed(config: RunConfig, world: World) -> Iterator[Grid]:
    """Device, process groups, seeds and the watch over all ranks for the time of a run.

    Every collective of every group is bounded by `--distributed-timeout-minutes`. After an error
    the groups are left to the process's end: to destroy them would wait for ranks that are gone.

    Raises:
        StepError: the ranks did not find each other in time, with the ranks that are missing; or
            their flags differ.
    """
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    device = device_of(config, world)
    alone = Watch(world.rank, world.world_size)
    with phase("reaching the job's store", 0, alone):
        store, board = _store(world, timeout)
    launcher = os.getppid() if _is_torchruns() else None
    with Watch(
        world.rank, world.world_size, board, timeout.total_seconds(), launcher=launcher
    ) as watch:
        with phase("meeting the other ranks", 0, watch):
            dist.init_process_group(
                backend_of(device),
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=_group_timeout(timeout, device),
            )
        with phase("comparing flags", 0, watch):
            agree_on_flags(config.to_yaml())
        with process_grid(config, world, device, watch) as grid:
            yield grid
        dist.destroy_process_group()


@contextmanager
def process_grid(
    config: RunConfig, world: World, device: torch.device, watch: Watch | None = None
) -> Iterator[Grid]:
    """megatron-core's groups for the parallel sizes of the flags, within a running job."""
    transformer = config.transformer
    watch = watch or Watch(world.rank, world.world_size)
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    with phase("making the process groups", 0, watch):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=transformer.tensor_model_parallel_size,
            pipeline_model_parallel_size=transformer.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=transformer.virtual_pipeline_model_parallel_size,
            context_parallel_size=transformer.context_parallel_size,
            expert_model_parallel_size=transformer.expert_model_parallel_size,
            expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
            distributed_timeout_minutes=_group_timeout(timeout, device) / timedelta(minutes=1),
            create_gloo_process_groups=False,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        _seed(config.runtime.seed, groups)
    with float64_throughout() if config.runtime.fp64 else nullcontext():
        yield Grid(world, groups, device, watch)
    parallel_state.destroy_model_parallel()


def _store(world: World, timeout: timedelta) -> tuple[dist.Store, Board | None]:
    """The store that ranks meet in, and the board on it; ranks do not wait for each other here.

    torchrun's agent keeps it, or with another launcher rank 0. The agent keeps one for all attempts
    of `--max-restarts`, where ranks would find the addresses of those that are gone; on one node
    the attempts are told apart. The agents of several nodes do not count them alike.
    """
    if not world.launched:
        return dist.HashStore(), None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_launchers = _is_torchruns()
    store = dist.TCPStore(
        host,
        port,
        is_master=world.rank == 0 and not is_launchers,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(
            f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
        )
    keeper = f"torchrun's agent at {host}:{port}" if is_launchers else "rank 0"
    board = Board(store, keeper=keeper)
    if world.rank == 0:
        board.begin()
    return store, board


def _is_torchruns() -> bool:
    """Whether this process is a worker of torchrun's agent, which keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def backend_of(device: torch.device) -> str:
    """What ranks that compute there speak."""
    return "nccl" if device.type == "cuda" else "gloo"


def _group_timeout(timeout: timedelta, device: torch.device) -> timedelta:
    """gloo raises when the time is over; NCCL kills the process, and the watch must come first."""
    return timeout * 1.5 + timedelta(minutes=1) if device.type == "cuda" else timeout


def device_of(config: RunConfig, world: World) -> torch.device:
    """Where this rank computes; a CPU is prepared for megatron-core."""
    if config.device_type == "cpu":
        cpu_backend.install(force=config.runtime.device == "cpu")
        return torch.device("cpu")
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def _seed(seed: int, groups: ProcessGroupCollection) -> None:
    """Seed every generator; pipeline stages differ, as in Megatron, so that layers do."""
    stage_seed = seed + 100 * groups.pp.rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
