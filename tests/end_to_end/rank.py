"""Ranks of a job in processes that are forked for it, and have imported everything."""

import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

import pretrain_rl

WARM = multiprocessing.get_context("forkserver")
"""Processes of this context fork from one that has imported this module."""
WARM.set_forkserver_preload([__name__])


def take_place(rank: int, ranks: int, port: int, **environment: str) -> None:
    """Set what a launcher sets; the job's store is at that port of this machine."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **environment})


def say_into(log: Path) -> None:
    """Let this process, and those that it forks, say everything into a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run pretrain_rl.py, and end without the cleanup of the process that forked this one."""
    torch.set_num_threads(1)
    sys.argv = ["pretrain_rl.py", *argv]
    code: Any = 1
    try:
        code = pretrain_rl.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
