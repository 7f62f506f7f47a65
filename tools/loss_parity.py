"""Hold one step of a run under two parallel layouts side by side: loss, metrics, every gradient.

Both launches take the first step of the same rollouts from the same weights, on this machine. What
they give is gathered over all ranks, put into the same names and shapes, and compared; the flags
of a run go into --config, --flags (both launches), --flags-a and --flags-b.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.rl.arguments import FlagError, resolve
from megatron.rl.config import RunConfig
from megatron.rl.flags.machine import cuda_driver_found
from megatron.rl.parity import PARITY, Difference, compare
from tools.parity_ranks import Launch, LaunchError, take_step

SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2
EPILOG = """\
example: is a run the same on one rank and on two with tensor parallelism?
  python tools/loss_parity.py --config run.yaml --float64 \\
      --ranks-a 1 --flags-a="--tensor-model-parallel-size 1" \\
      --ranks-b 2 --flags-b="--tensor-model-parallel-size 2 --sequence-parallel"

Write --flags-a="..." with an equals sign: the words begin with dashes.

The difference of two numbers is relative to the larger one, that of two gradients is their largest
difference in one entry relative to the largest entry. "ranks" is how far ranks differ that should
hold the same. Without --hf-checkpoint or --pretrained-checkpoint weights are drawn by name, since
random ones depend on the layout. Gradients are compared as they are before clipping.

exit codes: 0 the same within the tolerance; 1 different; 2 nothing was compared
"""
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1e-1}
"""What rounding explains, with room: sums of a few thousand terms in another order."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags, for both launches")
    parser.add_argument("--flags", default="", metavar="WORDS", help="more flags for both")
    for launch in "ab":
        name = launch.upper()
        parser.add_argument(
            f"--flags-{launch}", default="", metavar="WORDS", help=f"flags of launch {name} alone"
        )
        parser.add_argument(
            f"--ranks-{launch}", type=_positive, default=1, metavar="N", help=f"ranks of {name} (1)"
        )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="compute in float64 (--fp64 of a run), where rounding explains nothing; slow",
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="largest relative difference that is the same; by default "
        + ", ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items()),
    )
    parser.add_argument(
        "--top", type=_positive, default=10, metavar="N", help="entries to show (10)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file to write every entry to")
    parser.add_argument(
        "--timeout", type=_positive, default=600, metavar="S", help="bound on each launch (600 s)"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive: {value}")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and at least 0: {value}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, launch, compare; returns the exit code."""
    arguments = parse_arguments(argv)
    try:
        if arguments.json is not None and not os.access(arguments.json.parent, os.W_OK):
            raise ValueError(f"--json must be in a directory that can be written: {arguments.json}")
        launches = {name: launch_of(arguments, name) for name in "ab"}
        configs = {name: config_of(name, launch) for name, launch in launches.items()}
        steps = {}
        for name, launch in launches.items():
            plural = "s" if launch.num_ranks > 1 else ""
            print(f"{name.upper()}  {launch.num_ranks} rank{plural}  {shlex.join(launch.argv)}")
            sys.stdout.flush()
            steps[name] = take_step(launch, configs[name].device_type)
        differences = compare(steps["a"], steps["b"])
    except (LaunchError, ValueError, OSError) as error:
        print(f"loss_parity.py: {error}", file=sys.stderr)
        return NOT_COMPARED
    dtypes = [str(c.transformer.params_dtype).removeprefix("torch.") for c in configs.values()]
    tolerance = arguments.tolerance
    if tolerance is None:
        tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    print(report(differences, tolerance, arguments.top))
    if arguments.json is not None:
        answer = as_json(differences, tolerance, launches)
        arguments.json.write_text(json.dumps(answer, indent=2) + "\n")
    return SAME if is_same(differences, tolerance) else DIFFERENT


def launch_of(arguments: argparse.Namespace, name: str) -> Launch:
    """The launch that the arguments describe under one letter.

    Raises:
        ValueError: the flags are no words.
    """
    words = [f"--config={arguments.config}"] if arguments.config is not None else []
    for flag in ("flags", f"flags_{name}"):
        text = getattr(arguments, flag)
        try:
            words += shlex.split(text)
        except ValueError as error:
            spelling = f"--{flag.replace('_', '-')}"
            raise ValueError(f"{spelling} must be words of a shell ({error}): {text}") from None
    overrides: dict[str, Any] = dict(PARITY)
    if arguments.float64:
        overrides |= {"fp64": True, "bf16": False}
    num_ranks = getattr(arguments, f"ranks_{name}")
    return Launch(tuple(words), num_ranks, overrides, arguments.timeout)


def config_of(name: str, launch: Launch) -> RunConfig:
    """Check the flags of a launch before any rank is started.

    Raises:
        ValueError: naming the launch and all that is wrong.
    """
    try:
        return resolve(
            launch.argv,
            launch.num_ranks,
            has_driver=cuda_driver_found(),
            overrides=launch.overrides,
        )
    except FlagError as error:
        lines = "\n  ".join(map(str, error.violations))
        raise ValueError(f"nothing was started, launch {name.upper()} is refused\n  {lines}") from (
            error
        )


def is_same(differences: Sequence[Difference], tolerance: float) -> bool:
    """Whether every entry is within the tolerance; NaN never is."""
    return all(difference.worst <= tolerance for difference in differences)


def report(differences: Sequence[Difference], tolerance: float, top: int) -> str:
    """The most different entries as a table, and the answer."""
    kinds = [difference.kind for difference in differences]
    beyond = sum(not difference.worst <= tolerance for difference in differences)
    shown = differences[: max(top, min(beyond, 2 * top))]
    width = max((len(difference.name) for difference in shown), default=4)
    lines = [f"{'':8}  {'':{width}}  {'A':>13}  {'B':>13}  {'difference':>10}  {'ranks':>7}"]
    lines += [
        f"{difference.kind:8}  {difference.name:{width}}  {_number(difference.first)}  "
        f"{_number(difference.second)}  {difference.relative:>10.1e}  {difference.spread:>7.0e}"
        f"{'' if difference.worst <= tolerance else '  <- beyond the tolerance'}"
        for difference in shown
    ]
    compared = f"{kinds.count('scalar')} scalars and {kinds.count('gradient')} gradients"
    if beyond:
        answer = f"DIFFERENT: {beyond} of {compared} differ by more than {tolerance:g}"
    else:
        largest = max((difference.worst for difference in differences), default=0.0)
        answer = f"the same: {compared} differ by at most {largest:.1e}, tolerance {tolerance:g}"
    return "\n".join([*lines, answer])


def _number(value: float | None) -> str:
    return f"{'absent':>13}" if value is None else f"{value:>13.6g}"


def as_json(
    differences: Sequence[Difference], tolerance: float, launches: dict[str, Launch]
) -> dict[str, Any]:
    """Everything that was compared; what is not finite is null."""
    return {
        "same": is_same(differences, tolerance),
        "tolerance": tolerance,
        "launches": {
            name: {"flags": list(launch.argv), "ranks": launch.num_ranks}
            for name, launch in launches.items()
        },
        "entries": [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(difference).items()
            }
            for difference in differences
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
