"""Tables of results, in Markdown, what is said of the machine, and the record of a run."""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contenders import FLOOR, OURS
from benchmarks.logits import LOGITS_FLOOR
from benchmarks.measure import Kind, Result
from benchmarks.problem import Case

_FLOORS = {"head": FLOOR, "logits": LOGITS_FLOOR}
_PACKAGES = ("torch", "megatron-core", "cut-cross-entropy", "liger-kernel", "trl", "triton")


def run_and_record(
    run: Callable[[argparse.Namespace], dict[str, object]], options: argparse.Namespace
) -> int:
    """Run a benchmark and write its record to `options.json`; 0 when it ran, whoever was faster."""
    # As an exception, it ends the ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    record = run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0


def time_table(case: Case, results: Sequence[Result], kind: Kind) -> str:
    """CPU seconds, and their ratios to the floor and to ours."""
    medians = {one.name: one.median for one in results if one.seconds}
    floor = medians.get(_FLOORS[kind])
    ours = medians.get(OURS)
    rows = []
    for one in results:
        if one.seconds:
            seconds = one.median
            cells = [f"{seconds:.3f}", _ratio(seconds, floor), _ratio(seconds, ours), one.lacks]
        else:
            cells = ["", "", "", one.problem]
        rows.append([one.name, *cells])
    last = "what it leaves out, or why it did not run"
    header = [kind, "CPU s", f"/ {_FLOORS[kind]}", "/ ours", last]
    return f"{case}\n\n{table(header, rows)}"


def memory_table(case: Case, results: Sequence[Result], kind: Kind) -> str:
    """Peak memory of forward and backward, beside the gradients."""
    rows = []
    for one in results:
        if one.problem:
            cells = ["", "", one.problem]
        else:
            beside = one.peak_mib - one.gradient_mib
            cells = [f"{beside:.0f}", f"{one.gradient_mib:.0f}", one.lacks]
        rows.append([one.name, *cells])
    header = [kind, "peak MiB beside gradients", "gradients MiB", ""]
    return f"{case}\n\n{table(header, rows)}"


def plain_needs(case: Case) -> str:
    """What plain torch holds at least: the log-softmax that it keeps, and its gradient, in fp32."""
    needed = 2 * 4 * round(case.tokens * case.share) * case.vocab // case.ranks
    return (
        f"Plain torch needs {needed / 1e9:.1f} GB or more for it: log-softmax and its gradient "
        "(computed, not run)."
    )


def machine() -> dict[str, object]:
    """Processor, versions, and how busy the machine is."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": versions,
    }


def _ratio(seconds: float, base: float | None) -> str:
    return "" if base is None else f"{seconds / base:.2f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(header), rule, *map(line, rows)])
