"""Starts the ranks of one launch on this machine, and brings back the step that they take.

Ranks meet in a file, speak gloo on CPUs and NCCL on GPUs, and are ended with the launch, however
it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.arguments import resolve
from megatron.rl.flags.machine import cuda_driver_found
from megatron.rl.initialize import World, backend_of, device_of, process_grid
from megatron.rl.parity import RankStep, Step, assemble, first_step

LAST_LINES = 25
GRACE_S = 2.0
"""How long other ranks may go on after the first failure, to tell of their own."""


class LaunchError(Exception):
    """A rank failed, or did not end in time; the message has the end of what it wrote."""


@dataclass(frozen=True)
class Launch:
    """One way to start the run.

    Args:
        argv: flags of the run.
        num_ranks: processes.
        overrides: values that win over the flags, by name.
        timeout_s: bound on the whole launch, and on each collective in it.
    """

    argv: tuple[str, ...]
    num_ranks: int
    overrides: Mapping[str, Any]
    timeout_s: float


def take_step(launch: Launch, device_type: str) -> Step:
    """Start all ranks, wait for the step that they take, end them.

    Args:
        launch: what to start.
        device_type: "cuda" or "cpu", as the flags say.

    Raises:
        LaunchError: naming the rank.
        ValueError: the ranks' parts do not make a whole.
    """
    # forked from a server that has imported everything; CUDA does not survive a fork
    context = multiprocessing.get_context("spawn" if device_type == "cuda" else "forkserver")
    if device_type != "cuda":
        context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory(prefix="loss-parity-") as folder:
        ranks = [
            context.Process(target=_rank, args=(launch, rank, folder), daemon=True)
            for rank in range(launch.num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, launch, Path(folder))
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return assemble([_load(Path(folder) / f"{rank}.pt") for rank in range(launch.num_ranks)])


def _load(path: Path) -> RankStep:
    return torch.load(path, weights_only=False)  # written by our own rank, a moment ago


def _wait(ranks: Sequence[BaseProcess], launch: Launch, folder: Path) -> None:
    """Until all have ended well, or one has not."""
    deadline = time.monotonic() + launch.timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), max(deadline - time.monotonic(), 0))
        if not ended:
            late = sorted(running.values())
            raise LaunchError(
                f"ranks {late} took longer than {launch.timeout_s:.0f} s (--timeout)\n"
                f"{_end_of(folder, late[0])}"
            )
        for sentinel in ended:
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode:
                _raise_first(ranks, folder)


def _raise_first(ranks: Sequence[BaseProcess], folder: Path) -> None:
    """Tell of the rank that failed by itself, rather than of one that lost its neighbour."""
    wait([process.sentinel for process in ranks if process.is_alive()], GRACE_S)
    reports = sorted(folder.glob("*.failed"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        rank = int(reports[0].stem)
    else:
        rank = next(rank for rank, process in enumerate(ranks) if process.exitcode)
    code = ranks[rank].exitcode
    raise LaunchError(
        f"rank {rank} of {len(ranks)} failed (exit code {code})\n{_end_of(folder, rank)}"
    )


def _end_of(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  | {line}" for line in lines[-LAST_LINES:])


def _rank(launch: Launch, rank: int, folder: str) -> None:
    """One process: what it writes goes to a log, what it found to a file."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    try:
        step = _step(launch, rank, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        Path(folder, f"{rank}.failed").touch()
        os._exit(1)  # not through destructors, which may wait for the other ranks
    torch.save(step, f"{folder}/{rank}.pt")


def _step(launch: Launch, rank: int, folder: str) -> RankStep:
    config = resolve(
        launch.argv,
        launch.num_ranks,
        has_driver=cuda_driver_found(),
        overrides=launch.overrides,
    )
    if config.device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.num_ranks))
    world = World(rank, rank, launch.num_ranks, launched=True)
    device = device_of(config, world)
    dist.init_process_group(
        backend_of(device),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=launch.num_ranks,
        timeout=timedelta(seconds=launch.timeout_s),
    )
    with process_grid(config, world, device) as grid:
        step = first_step(config, grid)
    dist.destroy_process_group()
    return step
