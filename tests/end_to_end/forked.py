"""Jobs whose ranks fork from a process that has imported everything: a start takes a second.

A launcher process stands between, as torchrun would: it ends all ranks when one has failed.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed import TCPStore

from tests.end_to_end.job import ROOT, Job

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.end_to_end.forked", "megatron.rl.build"])
PATIENCE_S = 20.0
"""Between SIGTERM and SIGKILL, for ranks that are left when one has failed."""


class ForkedJob(Job):
    """Like a Job under torchrun.

    Args:
        arguments: flags of pretrain_rl.py.
        ranks: number of processes.
        log: file that collects what they say.
    """

    def __init__(self, arguments: list[str], *, ranks: int, log: Path) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._log = log
        self._log.touch()
        self._process = _Process(arguments, ranks, log)

    def workers(self) -> list[psutil.Process]:
        """The processes that train, by rank: the launcher's children, which it forks in turn."""
        return sorted(self.launcher.children(), key=lambda process: process.pid)


class _Process:
    """What Job needs of subprocess.Popen."""

    def __init__(self, arguments: list[str], ranks: int, log: Path) -> None:
        self._process = _CONTEXT.Process(target=_launch, args=(arguments, ranks, str(log)))
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


def _launch(arguments: list[str], ranks: int, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = {}
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            _be_rank(rank, ranks, store.port, arguments)
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


def _be_rank(rank: int, ranks: int, port: int, arguments: list[str]) -> None:
    """Run the program in this process, and end it without the launcher's cleanup."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(1)
    sys.argv = ["pretrain_rl.py", *arguments]
    code = 1
    try:
        runpy.run_path(str(ROOT / "pretrain_rl.py"), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
