"""What a run shows while it runs: console line, TensorBoard, metrics.jsonl, progress, messages.

TensorBoard and metrics.jsonl hold the same numbers under the same names, so a notebook needs no
event-file reader. One rank writes; on the others a `RunLogger` does nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import psutil
from tqdm import tqdm

if TYPE_CHECKING:
    import torch

    from megatron.rl.config import LoggingConfig
    from slime_loss import Histogram

T = TypeVar("T")

_MESSAGES = logging.getLogger("megatron.rl")


@dataclass(frozen=True)
class ConsoleLine:
    """What one step shows on the console, in Megatron's order."""

    consumed_samples: int
    """Samples trained since step 1, those before a resume included."""
    elapsed_ms: float
    """Wall time of the step, in milliseconds."""
    learning_rate: float
    """Learning rate of the step."""
    global_batch_size: int
    """Samples of the step."""
    losses: Mapping[str, float]
    """Printed under these names, whatever their sign."""
    grad_norm: float
    """Norm before clipping; NaN where the step was skipped before it was known."""
    num_skipped: int = 0
    """1 where the optimizer did not step."""
    num_nan: int = 0
    """1 where the loss or the gradient was not finite."""
    tokens_per_second: float | None = None
    """Tokens of the step over its wall time, on the whole job."""

    @property
    def scalars(self) -> dict[str, float]:
        """The line's numbers under Megatron's TensorBoard names, the time in seconds."""
        return {
            "learning-rate": self.learning_rate,
            "batch-size": self.global_batch_size,
            "grad-norm": self.grad_norm,
            "iteration-time": self.elapsed_ms / 1000,
            "consumed-samples": self.consumed_samples,
            "skipped-iterations": self.num_skipped,
            "nan-iterations": self.num_nan,
        }

    def format(self, step: int, total_steps: int | None, now: datetime) -> str:
        """The line: ` [2026-01-31 12:00:00] iteration        1/      20 | ... |`."""
        cells = [
            f"[{now:%Y-%m-%d %H:%M:%S}] iteration {step:8d}/{total_steps or '-':>8}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.elapsed_ms:.1f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
        ]
        cells += [f"{name}: {value:.6E}" for name, value in self.losses.items()]
        cells.append(f"grad norm: {self.grad_norm:.3f}")
        if self.tokens_per_second is not None:
            cells.append(f"tokens per second: {self.tokens_per_second:.1f}")
        cells.append(f"number of skipped iterations: {self.num_skipped:3d}")
        cells.append(f"number of nan iterations: {self.num_nan:3d}")
        return f" {' | '.join(cells)} |"


def merge_console_lines(lines: Sequence[ConsoleLine]) -> ConsoleLine:
    """One line for several steps: means of time, speed and losses, sums of counts, else the last.

    A loss that is not finite is counted by its line and left out of the mean.
    """
    last = lines[-1]
    speeds = [line.tokens_per_second for line in lines if line.tokens_per_second is not None]
    return ConsoleLine(
        consumed_samples=last.consumed_samples,
        elapsed_ms=_finite_mean([line.elapsed_ms for line in lines]),
        learning_rate=last.learning_rate,
        global_batch_size=last.global_batch_size,
        losses={name: _finite_mean([line.losses[name] for line in lines]) for name in last.losses},
        grad_norm=last.grad_norm,
        num_skipped=sum(line.num_skipped for line in lines),
        num_nan=sum(line.num_nan for line in lines),
        tokens_per_second=_finite_mean(speeds) if speeds else None,
    )


class MetricsFile:
    """metrics.jsonl: one JSON object a step, `step` first, then every scalar under its name.

    JSON knows neither NaN nor infinity: both are written as null. Lines of steps that are trained
    again after a resume are cut away, and so is a line that a crash left half-written.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        if path.exists():
            _cut_lines(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one step; the line is in the file when this returns."""
        row: dict[str, float | None] = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunFiles:
    """What a run leaves in its directory: TensorBoard events, metrics.jsonl and config.yaml."""

    def __init__(self, directory: Path, *, first_step: int, resolved_config: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, on one rank only

        directory.mkdir(parents=True, exist_ok=True)
        _replace_text(directory / "config.yaml", resolved_config)
        self._metrics = MetricsFile(directory / "metrics.jsonl", first_step=first_step)
        self._events = SummaryWriter(str(directory), purge_step=first_step)
        # TensorBoard renders Markdown, where an indented block is shown as it is.
        self._events.add_text("config", textwrap.indent(resolved_config, "    "), first_step)
        self._events.flush()

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Record one step in both places; nothing is buffered when this returns."""
        self._metrics.write(step, scalars)
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)
        for name, histogram in histograms.items():
            if histogram.num_entries > 0:
                self._events.add_histogram_raw(
                    name,
                    min=histogram.minimum,
                    max=histogram.maximum,
                    num=histogram.num_entries,
                    sum=histogram.total,
                    sum_squares=histogram.sum_of_squares,
                    bucket_limits=histogram.bucket_limits,
                    bucket_counts=histogram.counts,
                    global_step=step,
                )
        self._events.flush()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._events.close()


class RunLogger:
    """The voice of one run, as a context manager: console line, TensorBoard, metrics.jsonl.

    Args:
        config: its tensorboard_dir (None: console only) and log_interval are read.
        is_writer: true on exactly one rank; elsewhere nothing is opened and nothing printed.
        first_step: the first step that this process trains, 1 for a new run. Whatever earlier
            processes wrote for it and later steps is cut away.
        total_steps: steps of the whole run, as the console line shows them; None if unknown.
        resolved_config: YAML text, saved as config.yaml and shown by TensorBoard.

    Raises:
        ValueError: first_step is below 1.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        is_writer: bool,
        first_step: int,
        total_steps: int | None,
        resolved_config: str,
    ) -> None:
        if first_step < 1:
            raise ValueError(f"first_step must be at least 1: first_step={first_step}")
        self._is_writer = is_writer
        self._log_interval = config.log_interval
        self._total_steps = total_steps
        self._last_step = first_step - 1
        self._waiting: list[ConsoleLine] = []
        self._files: RunFiles | None = None
        if is_writer and config.tensorboard_dir is not None:
            self._files = RunFiles(
                Path(config.tensorboard_dir), first_step=first_step, resolved_config=resolved_config
            )

    def log_step(
        self,
        step: int,
        scalars: Mapping[str, float],
        *,
        console: ConsoleLine,
        histograms: Mapping[str, Histogram] | None = None,
    ) -> None:
        """Record one optimizer step everywhere.

        Args:
            step: 1, 2, 3, ...; larger than any step logged before.
            scalars: further scalars under their TensorBoard names (`train/pg_loss`, ...).
            console: the console line; its numbers are recorded too, under Megatron's names.
            histograms: by TensorBoard name; TensorBoard alone shows them.

        Raises:
            ValueError: the step was logged before, or a name is taken.
        """
        if step <= self._last_step:
            raise ValueError(f"step must grow: step={step}, last step={self._last_step}")
        taken = sorted(set(scalars) & {"step", *console.scalars})
        if taken:
            raise ValueError(f"scalars must leave the console line's names alone: names={taken}")
        self._last_step = step
        if self._is_writer:
            self._waiting.append(console)
            if step % self._log_interval == 0:
                self._show()
        if self._files is not None:
            self._files.write(step, {**console.scalars, **scalars}, histograms or {})

    def close(self) -> None:
        """Show the steps that wait for their console line and close the files, once."""
        self._show()
        if self._files is not None:
            self._files.close()
            self._files = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        # a disk that is full fails the close as well, which says less than the error before it
        with nullcontext() if kind is None else suppress(OSError):
            self.close()

    def _show(self) -> None:
        if self._waiting:
            line = merge_console_lines(self._waiting)
            text = line.format(self._last_step, self._total_steps, datetime.now())
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            self._waiting.clear()


def memory_scalars(device: torch.device) -> dict[str, float]:
    """This process's memory in bytes: the device's under Megatron's names, and the host's.

    The peak is that since the last call, so that one heavy step does not hide the next.
    """
    scalars: dict[str, float] = {"mem-host-rss-bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        import torch  # only here: data tools use this module without torch

        scalars["mem-reserved-bytes"] = torch.cuda.memory_reserved(device)
        scalars["mem-allocated-bytes"] = torch.cuda.memory_allocated(device)
        scalars["mem-max-allocated-bytes"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return scalars


def progress(
    items: Iterable[T] = (),
    *,
    desc: str,
    total: float | None = None,
    unit: str = "it",
    is_writer: bool = True,
) -> tqdm[T]:
    """A tqdm bar on stderr: on a terminal and on the writer rank only, never in a log file.

    Without items, give total and call `update`.
    """
    return tqdm(
        items,
        desc=desc,
        total=total,
        unit=unit,
        disable=not (is_writer and sys.stderr.isatty()),
        leave=False,
        dynamic_ncols=True,
    )


def setup_messages(rank: int) -> None:
    """Send this process's messages to stderr, each with time and rank; a second call replaces."""
    handler = _MessageHandler()
    handler.setFormatter(
        logging.Formatter(
            f"[%(asctime)s rank {rank}] %(levelname)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )
    )
    handler.addFilter(lambda record: rank == 0 or getattr(record, "every_rank", False))
    _MESSAGES.handlers[:] = [handler]
    _MESSAGES.setLevel(logging.INFO)
    _MESSAGES.propagate = False


def log_info(message: str, *, every_rank: bool = False) -> None:
    """Say something once: on rank 0, unless what is said differs from rank to rank."""
    _MESSAGES.info(message, extra={"every_rank": every_rank})


def log_warning(message: str, *, every_rank: bool = False) -> None:
    """Warn once: on rank 0, unless the warning concerns only the rank that gives it."""
    _MESSAGES.warning(message, extra={"every_rank": every_rank})


def log_error(message: str, *, every_rank: bool = False) -> None:
    """Say once why the run ends, or on every rank where each has its own reason."""
    _MESSAGES.error(message, extra={"every_rank": every_rank})


class _MessageHandler(logging.Handler):
    """Writes above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
        sys.stderr.flush()


def _cut_lines(path: Path, first_step: int) -> None:
    """Keep the whole lines of steps before `first_step`, atomically."""
    shorter = path.with_name(path.name + ".tmp")
    num_cut = 0
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        shorter.open("w", encoding="utf-8") as new,
    ):
        for line in old:
            if _is_before(line, first_step):
                new.write(line)
            else:
                num_cut += 1
        new.flush()
        os.fsync(new.fileno())
    shorter.replace(path)
    if num_cut:
        log_info(f"{path}: cut {num_cut} lines of step {first_step} and later; they are run again")


def _is_before(line: str, first_step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] < first_step
    except (ValueError, KeyError, TypeError):
        return False


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
