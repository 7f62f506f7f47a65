"""Draw the curves of one run, or of several over each other, from metrics.jsonl into a PNG.

The panels are those an RL engineer looks at first; one whose metrics no run has is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os.path
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError:
    sys.exit("plot_run.py needs matplotlib: pip install -e '.[plot]'")

EXAMPLE = """\
example:
  python tools/plot_run.py runs/quickstart/grpo --output curves.png
  python tools/plot_run.py runs/seed1 runs/seed2 --metrics train/pg_loss rollout/raw_reward/mean
"""

METRICS_FILE = "metrics.jsonl"
SKIPPED = "skipped-iterations"
# Okabe and Ito's colours, which everybody can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LineStyle = Literal["-", "--", ":", "-."]
LINE_STYLES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
MAX_COLUMNS = 4
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title and the metrics it may show."""

    title: str
    names: tuple[str, ...]
    is_noisy: bool = True
    """Long runs are smoothed; a schedule is not, and is drawn from 0 on."""


@dataclass(frozen=True)
class Look:
    """Colour and line style of a curve."""

    color: str
    linestyle: LineStyle = "-"

    def line(self) -> Line2D:
        """A line of this look for a legend."""
        return Line2D([], [], color=self.color, linestyle=self.linestyle)


PANELS = (
    Panel("Loss", ("train/loss", "train/pg_loss", "train/kl_loss")),
    Panel("Reward", ("rollout/raw_reward/mean",)),
    Panel("Entropy (nats)", ("train/entropy",)),
    Panel(
        "Clipped share of tokens",
        ("train/pg_clipfrac", "train/pg_clipfrac_high", "train/pg_clipfrac_low"),
    ),
    Panel("|train - rollout| log-prob (nats)", ("train/train_rollout_logprob_abs_diff",)),
    Panel("Gradient norm", ("grad-norm",)),
    Panel("Learning rate", ("learning-rate",), is_noisy=False),
    Panel("Tokens per second per rank", ("perf/tokens_per_gpu_per_sec",)),
)


class RunFileError(ValueError):
    """A run that cannot be drawn, and why."""


@dataclass(frozen=True)
class Run:
    """One run: its name in the legend, its steps [S], and its metrics by name, each [S]."""

    name: str
    steps: np.ndarray
    series: Mapping[str, np.ndarray]

    @property
    def skipped(self) -> np.ndarray:
        """[S] bool: the steps at which the optimizer did not move."""
        return self.series.get(SKIPPED, np.zeros(len(self.steps))) > 0


def find_metrics(path: Path) -> Path:
    """The metrics.jsonl that `path` is or holds, directly or one folder below.

    Raises:
        RunFileError: there is none, or more than one.
    """
    if path.is_file():
        return path
    direct = path / METRICS_FILE
    found = [direct] if direct.is_file() else sorted(path.glob(f"*/{METRICS_FILE}"))
    if not found:
        raise RunFileError(f"{path} must be or hold a {METRICS_FILE}")
    if len(found) > 1:
        raise RunFileError(f"{path} must hold one run: found {', '.join(map(str, found))}")
    return found[0]


def read_run(path: Path, name: str) -> Run:
    """Read one metrics.jsonl; null and missing values are NaN.

    Raises:
        RunFileError: a line is no JSON object with a step, or no step is recorded.
    """
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break  # a running job is just writing it
        try:
            row = json.loads(line)
            rows.append((int(row["step"]), row))
        except (ValueError, KeyError, TypeError) as error:
            raise RunFileError(f"{path}:{number} must be an object with a step: {error}") from error
    if not rows:
        raise RunFileError(f"{path} must record at least one step")
    names = dict.fromkeys(key for _, row in rows for key in row if key != "step")
    return Run(
        name,
        np.array([step for step, _ in rows]),
        {key: np.array([_number(row.get(key)) for _, row in rows]) for key in names},
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest folder names that tell the runs apart, a `tensorboard` folder left out."""
    folders = [path.resolve().parent for path in paths]
    folders = [folder.parent if folder.name == "tensorboard" else folder for folder in folders]
    if len(set(folders)) < 2:
        return [folder.name for folder in folders]
    common = Path(os.path.commonpath(folders))
    return [str(folder.relative_to(common)) for folder in folders]


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each step; NaNs have no part in it."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    num = counts[end] - counts[start]
    return np.where(num > 0, (sums[end] - sums[start]) / np.maximum(num, 1), math.nan)


def choose_panels(runs: Sequence[Run], metrics: Sequence[str] | None) -> list[Panel]:
    """The panels that have something to show, reduced to the metrics that exist.

    Raises:
        RunFileError: a metric that was asked for is in no run.
    """
    existing = set().union(*(run.series for run in runs))
    if metrics is not None:
        missing = [name for name in metrics if name not in existing]
        if missing:
            raise RunFileError(f"metrics must be in a run: {missing}; there are {sorted(existing)}")
        return [Panel(name, (name,)) for name in metrics]
    reduced = [replace(panel, names=_distinct(panel.names, runs)) for panel in PANELS]
    chosen = [panel for panel in reduced if panel.names]
    if not chosen:
        raise RunFileError(f"a run must have metrics to draw: there are {sorted(existing)}")
    return chosen


def _distinct(names: Sequence[str], runs: Sequence[Run]) -> tuple[str, ...]:
    """Those that a run has, without any that is the same curve as one before it in every run."""
    chosen: dict[tuple[bytes | None, ...], str] = {}
    for name in names:
        curves = [run.series.get(name) for run in runs]
        key = tuple(None if curve is None else curve.tobytes() for curve in curves)
        if any(key):
            chosen.setdefault(key, name)
    return tuple(chosen.values())


def draw(runs: Sequence[Run], panels: Sequence[Panel], width: int | None) -> Figure:
    """One figure with all panels.

    Args:
        runs: one colour each; where there is one run, its metrics have one colour each.
        panels: drawn row by row.
        width: steps to smooth over; None smooths over a twentieth of a run, from 40 steps on.
    """
    num_rows = math.ceil(len(panels) / MAX_COLUMNS)
    num_columns = math.ceil(len(panels) / num_rows)
    with rc_context(STYLE):
        figure = Figure((3.6 * num_columns, 2.6 * num_rows + 0.4), dpi=130, layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
        for axes, panel in zip(grid[: len(panels)], panels, strict=True):
            _draw_panel(axes, panel, runs, width)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        if len(runs) == 1:
            note = ", skipped steps shaded" if runs[0].skipped.any() else ""
            figure.suptitle(runs[0].name + note, color="#555555")
        else:
            lines = [_look(i, 0, len(runs)).line() for i in range(len(runs))]
            names = [run.name for run in runs]
            figure.legend(lines, names, loc="outside upper center", ncols=min(4, len(runs)))
    return figure


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run], width: int | None) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel("step", color="#555555")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    for i, run in enumerate(runs):
        for j, name in enumerate(panel.names):
            if name in run.series:
                steps = _smoothing(run, width) if panel.is_noisy else 1
                _draw_curve(axes, run, name, _look(i, j, len(runs)), steps)
        for step in run.steps[run.skipped]:
            axes.axvline(step, color=_look(i, 0, len(runs)).color, alpha=0.2, linewidth=3)
    axes.ticklabel_format(axis="y", useOffset=False)
    if not panel.is_noisy:
        axes.set_ylim(bottom=0)
    if len(panel.names) > 1:
        looks = [_look(0, j, len(runs)) for j in range(len(panel.names))]
        if len(runs) > 1:  # colours tell runs apart, so only the line styles are explained here
            looks = [replace(look, color="#555555") for look in looks]
        labels = [name.rpartition("/")[2] for name in panel.names]
        axes.legend([look.line() for look in looks], labels)


def _draw_curve(axes: Axes, run: Run, name: str, look: Look, width: int) -> None:
    values = run.series[name]
    if width > 1:
        axes.plot(run.steps, values, color=look.color, alpha=0.25, linewidth=0.8)
    axes.plot(
        run.steps,
        smooth(values, width),
        color=look.color,
        linestyle=look.linestyle,
        linewidth=1.6,
        marker="." if np.isfinite(values).sum() == 1 else "",  # a line needs two points
    )


def _smoothing(run: Run, width: int | None) -> int:
    if width is not None:
        return width
    return len(run.steps) // 20 if len(run.steps) > 40 else 1


def _look(run: int, metric: int, num_runs: int) -> Look:
    if num_runs == 1:
        return Look(COLORS[metric % len(COLORS)])
    return Look(COLORS[run % len(COLORS)], LINE_STYLES[metric % len(LINE_STYLES)])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="metrics.jsonl, or a folder holding one"
    )
    parser.add_argument(
        "--output", type=Path, help="PNG to write (default: curves.png beside the first run's file)"
    )
    parser.add_argument(
        "--metrics", nargs="+", metavar="NAME", help="draw these instead, one panel each"
    )
    parser.add_argument(
        "--smooth", type=int, metavar="STEPS", help="steps to average over (default: by length)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code, 2 where something that was asked for is not there."""
    arguments = parse_arguments(argv)
    try:
        paths = [find_metrics(path) for path in arguments.runs]
        runs = [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
        figure = draw(runs, choose_panels(runs, arguments.metrics), arguments.smooth)
    except RunFileError as error:
        print(f"plot_run.py: {error}", file=sys.stderr)
        return 2
    output = arguments.output or paths[0].with_name("curves.png")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")
    print(f"{output}: {', '.join(f'{run.name} ({len(run.steps)} steps)' for run in runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
