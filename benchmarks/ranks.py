"""Fresh processes for measurements: the ranks of one gloo group, each with its own memory."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

_CONTEXT = multiprocessing.get_context("spawn")


class RankError(Exception):
    """A process failed or died; the message has its traceback."""


def run_on_ranks(num_ranks: int, threads: int, function: Callable[..., Any], *args: Any) -> Any:
    """function(rank, *args) in `num_ranks` new processes, in which the default group is theirs.

    Args:
        num_ranks: Processes.
        threads: Threads of each.
        function: At the top level of a module.
        args: Pickled to every rank.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        store = str(Path(folder) / "store")
        started = []
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_serve,
                args=(theirs, (rank, num_ranks, store), threads, function, args),
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return [_answer(rank, connection) for rank, (_, connection) in enumerate(started)]
        finally:
            for process, _ in started:
                process.terminate()
                process.join()


def _answer(rank: int, connection: Connection) -> Any:
    try:
        failure, answer = connection.recv()
    except EOFError:
        raise RankError(f"rank {rank} died, perhaps for want of memory") from None
    if failure is not None:
        raise RankError(f"rank {rank} failed:\n{failure}")
    return answer


def _serve(
    connection: Connection,
    place: tuple[int, int, str],
    threads: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, num_ranks, store = place
    torch.set_num_threads(threads)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
    )
    try:
        connection.send((None, function(rank, *args)))
    except Exception:
        connection.send((traceback.format_exc(), None))
