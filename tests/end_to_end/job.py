"""Real jobs for tests: pretrain_rl.py under torchrun or by itself, watched, killed, looked into."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.megatron.rl.tiny import SHAPE

ROOT = Path(__file__).parents[2]
BUCKET, ALIGNMENT = ".gbuf_idx_", 64
"""In the names of an optimizer's buckets; numbers to a multiple of which parameters begin."""
NORM, NUM_NORMS = SHAPE["hidden_size"], 2 * SHAPE["num_hidden_layers"] + 1
TIMING = ("perf/", "mem-", "iteration-time")


class Job:
    """A started job; `wait` gives its exit code and what it said.

    Args:
        arguments: flags of pretrain_rl.py.
        ranks: 0 starts the script by itself, more start it under torchrun.
        log: file that collects what it says.
        restarts: how often torchrun starts failed workers again.
    """

    def __init__(self, arguments: list[str], *, ranks: int, log: Path, restarts: int = 0) -> None:
        launcher = [sys.executable]
        if ranks:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            launcher += [f"--max-restarts={restarts}"]
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*launcher, str(ROOT / "pretrain_rl.py"), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                cwd=ROOT,
            )

    @property
    def launcher(self) -> psutil.Process:
        """The process that was started: torchrun, or the only rank."""
        return psutil.Process(self._process.pid)

    @property
    def has_ended(self) -> bool:
        """Whether the started process is gone."""
        return self._process.poll() is not None

    @property
    def said(self) -> str:
        """Everything printed so far."""
        return self._log.read_text()

    def workers(self) -> list[psutil.Process]:
        """The processes that train, by rank."""
        job = psutil.Process(self._process.pid)
        found = [p for p in job.children() if any("pretrain_rl.py" in word for word in p.cmdline())]
        return sorted(found or [job], key=lambda process: int(process.environ().get("RANK", 0)))

    def wait(self, timeout: float = 180) -> int:
        """The exit code; a job that does not end in time is killed and fails the test."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
            self._process.kill()
            raise AssertionError(f"the job did not end within {timeout} s:\n{self.said}") from None

    def until(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Return as soon as the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the job ended or stalled too early:\n{self.said}")
            time.sleep(0.01)


def run(
    arguments: list[str], *, ranks: int, log: Path, timeout: float = 180, kind: type[Job] = Job
) -> tuple[int, str]:
    """Start a job and wait: its exit code and what it said."""
    job = kind(arguments, ranks=ranks, log=log)
    return job.wait(timeout), job.said


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(TIMING)} for line in lines
    ]


def differences(checkpoint: Path, other: Path) -> list[str]:
    """Names of what two checkpoints do not have alike, bit for bit: tensors, generators, progress.

    Args:
        checkpoint: one step of one run.
        other: that step of another run.
    """
    ours, theirs = _everything(checkpoint), _everything(other)
    return [
        f"{name} differs"
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not _same(ours[name], theirs[name])
        if not (BUCKET in name and _same_outside_gaps(ours[name], theirs[name]))
    ]


def _same_outside_gaps(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether buckets of parameters are equal but for what lies between parameters.

    Core aligns parameters to 64 numbers and leaves the memory between them as it finds it. Here
    only the norms, of 32 numbers, leave such gaps.
    """
    rows = (one != other).view(-1, ALIGNMENT).nonzero()
    return bool((rows[:, 1] >= NORM).all()) and len(rows[:, 0].unique()) <= NUM_NORMS


def _everything(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(checkpoint),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    path = checkpoint / "common.pt"  # which later cores keep in the shards
    common = torch.load(path, weights_only=True) if path.exists() else {}
    return dict(_flat(state)) | dict(_flat(common, "common."))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return one == other


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
