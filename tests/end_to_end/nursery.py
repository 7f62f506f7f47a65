"""Jobs whose ranks are forked from one warm process, each with something that goes wrong.

No launcher ends the other ranks here: each must end by itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.end_to_end.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
BOUND_S = 120.0
"""A rank that lives longer than this after the job began hangs."""


class Nursery:
    """A process that has imported everything and forks the ranks of jobs; use as a context."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.nursery"],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            cwd=ROOT,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, folder: Path, fault: str, argv: list[str], ranks: int = 2) -> "Outcome":
        """Train with a fault of `tests.end_to_end.faults`; what each rank ended with and said."""
        folder.mkdir(parents=True)
        order = {"folder": str(folder), "fault": fault, "argv": argv, "ranks": ranks}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        done, end = folder / "codes.json", time.monotonic() + 3 * BOUND_S
        while not done.exists():
            assert time.monotonic() < end, "the nursery does not answer"
            time.sleep(0.05)
        said = [(folder / f"rank{rank}.log").read_text() for rank in range(ranks)]
        return Outcome(json.loads(done.read_text()), said)


class Outcome:
    """How a job ended.

    Attributes:
        codes: exit code of each rank; a signal is negative, None of a rank that hung.
        said: what each rank said on stderr and stdout.
    """

    def __init__(self, codes: list[int | None], said: list[str]) -> None:
        self.codes = codes
        self.said = said

    def errors(self, rank: int) -> list[str]:
        """The ERROR messages of a rank, each with the lines that belong to it."""
        found: list[str] = []
        is_open = False
        for line in self.said[rank].splitlines():
            if "] ERROR: " in line:
                found.append(line.partition("] ERROR: ")[2])
                is_open = True
            elif is_open and line.startswith("  "):
                found[-1] += "\n" + line
            else:
                is_open = False
        return found


def main() -> None:
    """Fork a launcher for each order on stdin."""
    import pretrain_rl  # noqa: F401  everything, once

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            launch(**json.loads(line))


def launch(folder: str, fault: str, argv: list[str], ranks: int) -> NoReturn:
    """Fork the ranks of one job, wait for all that can end, and kill the one at fault."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            train(Path(folder), FAULTS[fault], argv, (rank, ranks, port))
        pids[rank] = pid
    codes: dict[int, int | None] = dict.fromkeys(pids)
    awaited = [rank for rank in pids if not (FAULTS[fault].holds and rank == FAULTS[fault].rank)]
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end and any(codes[rank] is None for rank in awaited):
        for rank in awaited:
            if codes[rank] is None:
                ended, status = os.waitpid(pids[rank], os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.05)
    for rank, pid in pids.items():
        if codes[rank] is None:
            os.kill(pid, signal.SIGKILL)
    part = Path(folder) / "codes.part"
    part.write_text(json.dumps([codes[rank] for rank in range(ranks)]))
    part.rename(Path(folder) / "codes.json")
    os._exit(0)


def train(folder: Path, fault: Fault, argv: list[str], place: tuple[int, int, int]) -> NoReturn:
    """One rank: break what the fault breaks, and run the program."""
    import pretrain_rl
    from megatron.rl import initialize
    from megatron.rl.watch import Pace, Watch

    rank, ranks, port = place
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, ranks, "127.0.0.1", port)
    os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
    log = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    initialize.Watch = partial(Watch, pace=Pace(beat=0.2, silence=3.0, slow=3.0))
    if rank == fault.rank or fault.everywhere:
        fault.plant()
    sys.argv = ["pretrain_rl.py", *argv]
    code: Any = 1
    try:
        code = pretrain_rl.main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
