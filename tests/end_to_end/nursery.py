"""Jobs whose ranks are forked from one warm process, each with something that goes wrong.

No launcher ends the other ranks here: each must end by itself.
"""

import json
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron.rl import initialize
from megatron.rl.watch import Pace, Watch
from tests.end_to_end.faults import FAULTS, Fault
from tests.end_to_end.rank import WARM, run_and_exit, say_into, take_place

BOUND_S = 120.0
"""A rank that lives longer than this after the job began hangs."""


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


def run_with_fault(folder: Path, fault: str, argv: list[str], ranks: int = 2) -> Outcome:
    """Train with a fault of `tests.end_to_end.faults`; what each rank ended with and said."""
    folder.mkdir(parents=True)
    parent = WARM.Process(target=_launch, args=(folder, fault, argv, ranks))
    parent.start()
    parent.join(3 * BOUND_S)
    codes = folder / "codes.json"
    assert codes.exists(), f"the parent of the ranks does not answer: {fault}"
    said = [(folder / f"rank{rank}.log").read_text() for rank in range(ranks)]
    return Outcome(json.loads(codes.read_text()), said)


def _launch(folder: Path, name: str, argv: list[str], ranks: int) -> None:
    """Fork the ranks of one job, wait for all that can end, and kill the one at fault."""
    fault = FAULTS[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            take_place(rank, ranks, port)
            _train(folder / f"rank{rank}.log", fault if fault.is_at(rank) else None, argv)
        pids[rank] = pid
    codes: dict[int, int | None] = dict.fromkeys(pids)
    awaited = [rank for rank in pids if not (fault.holds and rank == fault.rank)]
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
    (folder / "codes.json").write_text(json.dumps([codes[rank] for rank in range(ranks)]))


def _train(log: Path, fault: Fault | None, argv: list[str]) -> NoReturn:
    say_into(log)
    initialize.Watch = partial(Watch, pace=Pace(beat=0.2, silence=3.0, slow=3.0))
    if fault is not None:
        fault.plant()
    run_and_exit(argv)
