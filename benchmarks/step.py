"""The whole training step beside a bare megatron-core loop, and what it spends beside the model.

    python -m benchmarks.step --json step.json
    python -m benchmarks.step --part reading --replicas 1 64
    python -m benchmarks.step --part step --ranks 2 --tp 2 --samples 8 --repeats 3

A rollout of random ids is one step. README.md says how to read the tables.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.packing import long_tailed
from benchmarks.ranks import run_on_ranks
from benchmarks.report import machine, run_and_record, table
from benchmarks.rollouts import write_rollouts
from benchmarks.step_on_rank import CORE, GRPO, SFT, StepCase, Times, seconds_to_read, time_steps
from benchmarks.stopwatch import MODEL, PARTS, REST

SAME_LOSS = 1e-5
"""Most that two fp32 losses may differ by, of the larger."""


@dataclass(frozen=True)
class Summary:
    """Medians over the rounds, of the slowest rank.

    Attributes:
        seconds: CPU seconds of a step, by loop.
        parts: CPU seconds of rank 0's parts, by loop and part.
        losses: of every step, by loop.
    """

    seconds: dict[str, float]
    parts: dict[str, dict[str, float]]
    losses: dict[str, list[float]]

    @property
    def same_loss(self) -> bool:
        """Whether core and our imitation had the same loss at every step."""
        pairs = zip(self.losses[CORE], self.losses[SFT], strict=True)
        return all(math.isclose(one, other, rel_tol=SAME_LOSS) for one, other in pairs)

    def overhead(self, loop: str) -> float:
        """The share of the step that is neither forward and backward nor the optimizer."""
        parts = self.parts[loop]
        return 1 - sum(parts[name] for name in MODEL) / sum(parts.values())


def measure(case: StepCase, repeats: int, threads: int) -> Summary:
    """Time the loops in turn, after a round that is not counted."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(case.shortest, case.longest, case.samples, endpoint=True).tolist()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        write_rollouts(
            Path(folder) / "rollouts.jsonl",
            lengths,
            prompt_length=case.prompt,
            vocab=case.vocab,
        )
        ranks = run_on_ranks(case.ranks, threads, time_steps, case, repeats, folder)
    return summary_of(ranks)


def summary_of(ranks: Sequence[Times]) -> Summary:
    """Medians of what the ranks measured."""
    seconds = {
        loop: statistics.median(map(max, zip(*(rank.seconds[loop] for rank in ranks), strict=True)))
        for loop in (CORE, SFT, GRPO)
    }
    parts = {
        loop: {
            name: statistics.median(found.get(name, 0.0) for found in ranks[0].parts[loop])
            for name in (*PARTS, REST)
        }
        for loop in (SFT, GRPO)
    }
    return Summary(seconds, parts, ranks[0].losses)


def step_tables(case: StepCase, found: Summary) -> str:
    """The loops beside each other, then the parts of ours."""
    core = found.seconds[CORE]
    loss = "equal at every step" if found.same_loss else "DIFFERS from megatron-core's"
    notes = {CORE: "", SFT: f"loss {loss}", GRPO: "advantages, ratio, entropy, comparison"}
    loops = [
        [loop, f"{seconds:.3f}", f"{seconds / core:.2f}", notes[loop]]
        for loop, seconds in found.seconds.items()
    ]
    totals = {loop: sum(parts.values()) for loop, parts in found.parts.items()}
    parts = [
        [name, *(cell for loop in totals for cell in _cells(found.parts[loop][name], totals[loop]))]
        for name in (*PARTS, REST)
    ]
    beside = [f"{found.overhead(loop):.2%}" for loop in totals]
    parts.append(["all beside the model", "", beside[0], "", beside[1]])
    header = ["part", f"{SFT} ms", "share", f"{GRPO} ms", "share"]
    return "\n\n".join(
        [
            str(case),
            table(["loop", "CPU s a step", "/ megatron-core", ""], loops),
            table(header, parts),
        ]
    )


def _cells(seconds: float, total: float) -> list[str]:
    return [f"{1000 * seconds:.2f}", f"{seconds / total:.2%}"]


def reading_table(samples: int, replicas: Sequence[int]) -> tuple[str, list[dict[str, float]]]:
    """What a rank spends on one rollout before it trains, by the number of replicas."""
    lengths = long_tailed(samples, seed=0)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        path = Path(folder) / "rollouts.jsonl"
        write_rollouts(path, lengths, prompt_length=16, vocab=32_000)
        found = [seconds_to_read(path, count) for count in replicas]
    rows = [
        [str(count), *(f"{seconds:.3f}" for seconds in each.values())]
        for count, each in zip(replicas, found, strict=True)
    ]
    title = f"{samples} samples, {sum(lengths):,} tokens, one step; CPU s of a rank"
    return f"{title}\n\n{table(['replicas', *found[0]], rows)}", found


def cases(options: argparse.Namespace) -> Iterator[StepCase]:
    """One setting a prompt length."""
    for prompt in options.prompt:
        yield StepCase(
            samples=options.samples,
            shortest=options.lengths[0],
            longest=options.lengths[1],
            prompt=prompt,
            hidden=options.hidden,
            layers=options.layers,
            vocab=options.vocab,
            tp=options.tp,
            ranks=options.ranks,
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--part", nargs="+", choices=["step", "reading"], default=["step", "reading"])
    add("--samples", type=int, default=16, help="of a step (default: 16)")
    add("--lengths", nargs=2, type=int, default=[200, 1500], help="tokens, shortest and longest")
    add("--prompt", nargs="+", type=int, default=[1, 128], help="tokens of every prompt")
    add("--hidden", type=int, default=32)
    add("--layers", type=int, default=2)
    add("--vocab", type=int, default=32_000)
    add("--ranks", type=int, default=1)
    add("--tp", type=int, default=1, help="ranks of a replica")
    add("--repeats", type=int, default=5, help="rounds; the median counts (default: 5)")
    add("--threads", type=int, default=1, help="threads of a rank (default: 1)")
    add("--long-samples", type=int, default=4096, help="of the rollout that is only read")
    add("--replicas", nargs="+", type=int, default=[1, 64], help="that share its reading")
    add("--json", type=Path, metavar="FILE", help="write everything there, too")
    return made


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, print the tables, and return the record of everything."""
    report: dict[str, object] = {"machine": machine()}
    if "step" in options.part:
        report["step"] = []
        for case in cases(options):
            found = measure(case, options.repeats, options.threads)
            print(step_tables(case, found), end="\n\n", flush=True)
            report["step"].append({"case": asdict(case), **asdict(found)})
    if "reading" in options.part:
        text, found = reading_table(options.long_samples, options.replicas)
        print(text, flush=True)
        report["reading"] = dict(zip(map(str, options.replicas), found, strict=True))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when it ran, whoever was the faster."""
    return run_and_record(run, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
