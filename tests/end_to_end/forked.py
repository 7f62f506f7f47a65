"""Jobs whose ranks fork from a process that has imported everything: a start takes a second.

A launcher process stands between, as torchrun would: it ends all ranks when one has failed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed import TCPStore

from tests.end_to_end.job import Job
from tests.end_to_end.rank import WARM, run_and_exit, say_into, take_place

PATIENCE_S = 20.0
"""Between SIGTERM and SIGKILL, for ranks that are left when one has failed."""
AS_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


class ForkedJob(Job):
    """Like a Job under torchrun.

    Args:
        arguments: flags of pretrain_rl.py.
        ranks: number of processes.
        log: file that collects what they say.
    """

    def __init__(self, arguments: list[str], *, ranks: int, log: Path) -> None:
        self._log = log
        self._log.touch()
        self._process = _Process(arguments, ranks, log)

    def workers(self) -> list[psutil.Process]:
        """The processes that train, by rank: the launcher's children, which it forks in turn."""
        return sorted(self.launcher.children(), key=lambda process: process.pid)


class _Process:
    """What Job needs of subprocess.Popen."""

    def __init__(self, arguments: list[str], ranks: int, log: Path) -> None:
        self._process = WARM.Process(target=_launch, args=(arguments, ranks, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pretrain_rl.py", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _launch(arguments: list[str], ranks: int, log: Path) -> None:
    say_into(log)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = {}
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            take_place(rank, ranks, store.port, **AS_TORCHRUN)
            run_and_exit(arguments)
        children[child] = rank
    alive = set(children)

    def end_all(_number: int, _frame: FrameType | None) -> None:
        for child in alive:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end_all)
    sys.exit(_watch(alive))


def _watch(alive: set[int]) -> int:
    """The first failure's exit code, once no rank is left."""
    failure, deadline = 0, None
    while alive:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            alive.discard(child)
            code = os.waitstatus_to_exitcode(status)
            if code and not failure:
                failure, deadline = code, time.monotonic() + PATIENCE_S
                for other in alive:
                    os.kill(other, signal.SIGTERM)
            continue
        if deadline and time.monotonic() > deadline:
            for other in alive:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
    return failure if failure >= 0 else 128 - failure
