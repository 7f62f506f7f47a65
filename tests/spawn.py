"""Real ranks for tests: processes that form one gloo group and run what the test sends them.

The first world imports torch and the trainer once, in a server process; ranks fork from it in a
second.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "megatron.rl.build"])


class RankError(Exception):
    """A rank raised, or died, or did not answer in time; the message has its traceback."""


class World:
    """Ranks of one gloo group that serve calls until closed.

    Args:
        num_ranks: Number of processes.
        timeout_s: Bound on each call, and on each collective in it.
    """

    def __init__(self, num_ranks: int, *, timeout_s: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, *args) on every rank, where dist.group.WORLD is the group of all.

        Args:
            function: A function at the top level of a module.
            args: Pickled to every rank.

        Returns:
            What each rank returned.

        Raises:
            RankError: The first rank that failed. The world is ended, and begun anew by the next
                call, since a rank that failed leaves the others waiting in a collective.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send_bytes(pickle.dumps((function, args)))
            return self._collect(getattr(function, "__name__", repr(function)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-store-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.num_ranks):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, self.num_ranks, store, self.timeout_s, theirs)
            )
            process.daemon = True
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, name: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < self.num_ranks:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in answers
            }
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                ranks = sorted(waiting.values())
                raise RankError(f"ranks {ranks} did not end {name} within {self.timeout_s} s")
            for connection in ready:
                rank = waiting[connection]
                answers[rank] = self._answer(rank, connection, name)
        return [answers[rank] for rank in range(self.num_ranks)]

    def _answer(self, rank: int, connection: Connection, name: str) -> Any:
        try:
            succeeded, answer = pickle.loads(connection.recv_bytes())
        except EOFError:
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            raise RankError(f"rank {rank} died in {name}: exit code {code}") from None
        if not succeeded:
            raise RankError(f"rank {rank} failed in {name}:\n{answer}")
        return answer


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """function(rank, *args) on `num_ranks` ranks of a world of their own; what each returned."""
    with World(num_ranks, timeout_s=timeout_s) as world:
        return world.run(function, *args)


def _serve(rank: int, num_ranks: int, store: str, timeout_s: float, connection: Connection) -> None:
    torch.set_num_threads(1)
    # ended with its parent like any daemon, but allowed children: a checkpoint's writer is one
    multiprocessing.current_process()._config["daemon"] = False
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    with suppress(EOFError):
        while True:
            function, args = pickle.loads(connection.recv_bytes())
            try:
                answer = True, function(rank, *args)
            except Exception:
                answer = False, traceback.format_exc()
            _destroy_groups()
            connection.send_bytes(pickle.dumps(answer))


def _destroy_groups() -> None:
    """End the groups that a call made: each keeps threads, and calls make dozens."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
