"""Compare the RL head with other heads: `python -m benchmarks.head`; README.md says how to read it.

Each table varies one thing of the first setting: the rows that train, the entropy, the ranks, the
zero coefficients.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import CONTENDERS, Plan, as_record, measure_memory, time_case
from benchmarks.problem import Case
from benchmarks.report import machine, memory_table, plain_needs, run_and_record, time_table

_EPILOG = """examples:
  python -m benchmarks.head --json head.json
  python -m benchmarks.head --size 2048x512x32000 --ranks 1 --zeros 0 --share 0.4 --repeats 3
  python -m benchmarks.head --part memory --size 8192x256x128256 --contenders slime_loss
"""
PARTS = ("head", "logits", "memory")


def size(text: str) -> tuple[int, int, int]:
    """TxHxV as three numbers."""
    tokens, hidden, vocab = (int(number) for number in text.split("x"))
    return tokens, hidden, vocab


def parser() -> argparse.ArgumentParser:
    """The command line."""
    names = dict.fromkeys(one.name for everyone in CONTENDERS.values() for one in everyone)
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.head",
        description="CPU time and memory of RL heads, forward and backward.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    add(
        "--size",
        nargs="+",
        type=size,
        default=[(2048, 512, 32000), (1024, 1024, 128256)],
        metavar="TxHxV",
        help="rows, hidden size, vocabulary (default: 2048x512x32000 1024x1024x128256)",
    )
    add("--share", nargs="+", type=float, default=[1.0, 0.4], help="of the rows that train")
    add(
        "--entropy",
        nargs="+",
        choices=["none", "metric", "loss"],
        default=["metric", "none", "loss"],
        help="none, a metric, or part of the loss",
    )
    add("--ranks", nargs="+", type=int, default=[1, 2], help="that share the vocabulary out")
    add("--zeros", nargs="+", type=float, default=[0.0, 0.5], help="share of zero coefficients")
    add("--grid", action="store_true", help="every combination, not one change at a time")
    add(
        "--contenders",
        nargs="+",
        choices=list(names),
        default=[],
        metavar="NAME",
        help=f"only these of: {', '.join(names)}",
    )
    add("--repeats", type=int, default=5, help="rounds; the median counts (default: 5)")
    add("--threads", type=int, default=1, help="threads of a rank (default: 1)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: seconds of the clock")
    add("--json", type=Path, metavar="FILE", help="write everything there, too")
    return made


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The settings: the first values of all options, and one change of it at a time."""
    for tokens, hidden, vocab in options.size:
        base = Case(
            tokens,
            hidden,
            vocab,
            share=options.share[0],
            entropy=options.entropy[0],
            ranks=options.ranks[0],
            zeros=options.zeros[0],
        )
        found = [base]
        for name in ("share", "entropy", "ranks", "zeros"):
            others = getattr(options, name)[1:]
            changed = found if options.grid else [base]
            found += [replace(case, **{name: value}) for case in changed for value in others]
        yield from found


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, print the tables, and return the record of everything."""
    report: dict[str, object] = {"machine": machine()}
    plan = Plan(
        names=tuple(options.contenders),
        repeats=options.repeats,
        threads=options.threads,
        device=options.device,
    )
    settings = list(cases(options))
    one_rank = [case for case in settings if case.ranks == 1 and case.zeros == 0]
    if "head" in options.part:
        report["head"] = _timed("From hidden states", settings, plan)
    if "logits" in options.part:
        chosen = [case for case in one_rank if case.size == one_rank[0].size]
        report["logits"] = _timed("From logits", chosen, replace(plan, kind="logits"))
    if "memory" in options.part:
        report["memory"] = _remembered("Memory of forward and backward", settings, plan)
    return report


def _timed(title: str, settings: Sequence[Case], plan: Plan) -> list[object]:
    _say(f"## {title}")
    records = []
    for case in settings:
        results = time_case(case, plan)
        _say(time_table(case, results, plan.kind))
        records.append(as_record(case, results))
    return records


def _remembered(title: str, settings: Sequence[Case], plan: Plan) -> list[object]:
    """The first setting of each size: memory follows little else."""
    _say(f"## {title}")
    records = []
    for case in {case.size: case for case in reversed(settings)}.values():
        results = measure_memory(case, plan)
        _say(memory_table(case, results, plan.kind))
        _say(plain_needs(case))
        records.append(as_record(case, results))
    return records


def _say(text: str) -> None:
    print(text, end="\n\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when it ran, whoever was the faster."""
    return run_and_record(run, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
