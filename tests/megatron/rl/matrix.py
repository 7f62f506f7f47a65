"""The layouts that give the same numbers, and how far each is from one process.

`python -m tests.megatron.rl.matrix` measures all of them, in float64, and prints the table of
docs/layouts.md; words after it name the layouts to measure.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from megatron.rl import cpu_backend
from megatron.rl.arguments import resolve
from megatron.rl.initialize import World as Launch
from megatron.rl.initialize import process_grid
from megatron.rl.parity import PARITY, RankStep, Step, assemble, compare, first_step
from tests.megatron.rl.tiny import (
    VOCAB_SIZE,
    near_uniform,
    rollout_rows,
    with_every_field,
    write_rollouts,
)
from tests.spawn import World

RUN = [
    "--device=cpu",
    "--lr=1e-3",
    "--num-layers=4",
    "--hidden-size=32",
    "--ffn-hidden-size=48",
    "--num-attention-heads=8",
    "--num-query-groups=4",
    "--kv-channels=4",
    "--normalization=RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    f"--vocab-size={VOCAB_SIZE}",
    "--max-position-embeddings=256",
    "--init-method-std=0.2",
    "--rollout-batch-size=4",
]
POLICY = ["--use-rollout-logprobs", "--entropy-coef=0.01"]
UNTIED = ["--untie-embeddings-and-output-weights"]
EXPERTS = ["--num-experts=4", "--moe-router-topk=2", "--moe-ffn-hidden-size=24", *UNTIED]
SIGMOID = ["--moe-router-score-function=sigmoid", "--moe-router-enable-expert-bias"]
REWARDED = ["--kl-coef=0.1", "--gamma=0.95", "--kl-loss-type=k2"]
CRITIC = ["--loss-type=value_loss", "--advantage-estimator=ppo", "--lambd=0.9", "--gamma=0.95"]

MODELS = {
    "tied": POLICY,
    "untied": [*POLICY, *UNTIED, "--qk-layernorm", "--add-qkv-bias"],
    "layer norm": [*POLICY, *UNTIED, "--normalization=LayerNorm", "--add-bias-linear"],
    "experts": [*POLICY, *EXPERTS],
    "some experts": [*POLICY, *EXPERTS, "--moe-layer-freq=[0,1,1,0]", *SIGMOID],
    "shared expert": [*POLICY, *EXPERTS, "--moe-shared-expert-intermediate-size=16"],
    "critic": CRITIC,
}
LOSSES = {
    "gspo": ["--advantage-estimator=gspo", *POLICY],
    "opsm": ["--use-opsm", "--opsm-delta=0.1", *POLICY],
    "sequence tis": ["--use-tis", "--tis-level=sequence", "--tis-clip=1e6"],
    "returns with kl": ["--advantage-estimator=reinforce_plus_plus", *REWARDED],
    "gae": ["--advantage-estimator=ppo", "--lambd=0.9", *REWARDED],
    "normalized": ["--normalize-advantages", *POLICY],
    "rollout mean": ["--loss-aggregation=rollout_mean", *POLICY],
    "token mean": ["--calculate-per-token-loss", *POLICY],
    "old log-probs": ["--num-steps-per-rollout=2", "--use-kl-loss", "--kl-loss-coef=0.1"],
    "sft": ["--loss-type=sft_loss"],
}
RUNS = MODELS | LOSSES
"""What is trained, by name: a model and an objective."""

SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "mb": "--micro-batch-size",
    "tokens": "--use-dynamic-batch-size --max-tokens-per-gpu",
}
SWITCHES = {
    "sp": "--sequence-parallel",
    "allgather": "--allgather-cp",
    "bshd": "--qkv-format=bshd",
    "distopt": "--use-distributed-optimizer",
    "overlap": "--overlap-grad-reduce",
    "full": "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1",
    "uneven": "--pipeline-model-parallel-layout=Et|tttL",
    "lopsided": "--pipeline-model-parallel-layout=Ett|t|t|L",
    "selective": "--recompute-granularity=selective --recompute-modules mlp",
}
RANKS = ("tp", "pp", "cp", "dp")


@dataclass(frozen=True)
class Layout:
    """One launch configuration.

    Args:
        run: a key of `RUNS`.
        words: the layout: sizes ("tp2", "mb4") and switches ("sp"); without mb and tokens a
            micro-batch has one sample.
    """

    run: str
    words: str

    def __str__(self) -> str:
        """The run and its layout."""
        return f"{self.run}: {self.words}"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number behind each word that has one."""
        split = [(word.rstrip("0123456789"), word) for word in self.words.split()]
        return {name: int(word[len(name) :]) for name, word in split if name != word}

    @property
    def num_ranks(self) -> int:
        """Processes of the launch."""
        num_ranks = 1
        for name in RANKS:
            num_ranks *= self.sizes.get(name, 1)
        return num_ranks

    @property
    def flags(self) -> list[str]:
        """The flags that the words stand for."""
        found = [f"{SIZES[name]} {size}" for name, size in self.sizes.items() if name != "dp"]
        found += [SWITCHES[word] for word in self.words.split() if word in SWITCHES]
        return [flag for group in found for flag in group.split()]


def layouts(run: str, *words: str) -> list[Layout]:
    """Several layouts of one run."""
    return [Layout(run, each) for each in words]


QUICK = [
    *layouts("tied", "mb2", "mb16", "tokens64", "bshd mb3", "full mb4", "selective mb4"),
    *layouts("tied", "tp2 mb4", "tp2 sp mb4", "tp2 sp bshd mb3", "pp2 mb4", "pp2 vpp2 mb4"),
    *layouts("tied", "cp2 allgather mb3", "cp2 mb3", "cp2 allgather tokens40", "dp2 mb3"),
    *layouts("tied", "dp2 distopt mb3", "dp2 overlap mb3", "dp2 distopt overlap tokens64"),
    *layouts("untied", "tp2 sp mb4", "pp2 uneven full mb4", "cp2 mb3"),
    *layouts("experts", "dp2 ep2 full mb3", "tp2 sp ep2 etp1 mb3"),
    *layouts("critic", "tp2 sp mb4", "cp2 mb3", "dp2 mb3"),
]
"""At most two ranks; what every run of the tests checks."""

FOUR_RANKS = [
    *layouts("tied", "tp4 mb4", "tp4 sp mb4", "pp4 mb2", "cp4 allgather mb3", "cp4 mb3", "dp4"),
    *layouts("tied", "dp4 distopt", "dp4 distopt overlap tokens64", "tp2 pp2 mb2"),
    *layouts("tied", "tp2 sp pp2 vpp2 mb2", "tp2 cp2 mb3", "tp2 sp cp2 allgather mb3"),
    *layouts("tied", "pp2 cp2 mb3", "pp2 vpp2 cp2 allgather tokens40", "dp2 tp2 sp distopt mb2"),
    *layouts("tied", "dp2 pp2 distopt overlap mb2", "dp2 cp2 allgather distopt mb3"),
    *layouts("tied", "dp2 cp2 tokens40", "dp2 tp2 sp bshd selective mb3"),
    *layouts("untied", "tp4 sp tokens80", "pp4 full mb2", "tp2 sp pp2 vpp2 selective mb2"),
    *layouts("untied", "tp2 sp cp2 mb3", "dp2 pp2 vpp2 lopsided distopt mb2"),
    *layouts("layer norm", "tp2 sp pp2 mb3", "dp2 cp2 distopt mb3", "tp4 mb4"),
    *layouts("some experts", "dp2 ep2 mb3", "pp2 vpp2 dp2 ep2 full mb2"),
    *layouts("experts", "dp4 ep2 mb2", "dp4 ep4 distopt mb2", "dp2 tp2 sp ep2 etp1 mb2"),
    *layouts("experts", "dp2 tp2 sp ep4 etp1 distopt", "pp2 dp2 ep2 mb2", "cp2 dp2 ep2 mb3"),
    *layouts("experts", "cp4 allgather ep4 mb3", "tp2 sp cp2 ep4 etp1 tokens60"),
    *layouts("shared expert", "tp2 sp cp2 ep2 etp1 mb2", "dp2 pp2 vpp2 ep2 overlap mb2"),
    *layouts("critic", "tp2 sp pp2 vpp2 mb2", "tp2 cp2 mb3", "dp2 pp2 distopt mb2"),
]
EIGHT_RANKS = [
    *layouts("tied", "tp2 pp2 cp2 mb3", "tp2 sp pp2 cp2 allgather mb3", "tp2 sp cp2 dp2 mb2"),
    *layouts("tied", "pp2 cp2 dp2 mb2", "tp2 pp2 dp2 distopt mb2", "cp4 dp2 distopt mb3"),
    *layouts("tied", "tp4 sp pp2 full tokens64", "pp4 dp2 distopt overlap", "dp8 distopt"),
    *layouts("untied", "tp2 sp pp2 vpp2 dp2 distopt overlap full mb2", "tp4 sp cp2 mb3"),
    *layouts("untied", "pp4 cp2 allgather tokens40", "tp2 sp cp4 mb3"),
    *layouts("experts", "tp2 sp pp2 dp2 ep2 etp1 distopt mb2", "pp2 cp2 dp2 ep4 distopt mb2"),
    *layouts("experts", "tp2 sp cp2 dp2 ep4 etp1 mb2", "dp8 ep4"),
]
OBJECTIVES = [
    layout
    for run in LOSSES
    for layout in layouts(run, "cp2 allgather mb3", "cp2 mb3", "dp2 mb3", "pp2 mb4", "tp2 sp mb4")
]
MATRIX = [*QUICK, *FOUR_RANKS, *EIGHT_RANKS, *OBJECTIVES]


def step_of_rank(rank: int, num_ranks: int, argv: list[str]) -> RankStep:
    """The first step of a run, on one rank of the job that the ranks already form."""
    cpu_backend.install()
    config = resolve(argv, num_ranks, has_driver=False, overrides=PARITY)
    launch = Launch(rank, rank, num_ranks, launched=True)
    with process_grid(config, launch, torch.device("cpu")) as grid:
        return first_step(config, grid)


@dataclass
class Measure:
    """Takes steps on real ranks, whose worlds it keeps, and each run's step of one process.

    Args:
        folder: for the rollouts.
    """

    folder: Path
    worlds: dict[int, World] = field(default_factory=dict)
    references: dict[tuple[str, str], Step] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all ranks."""
        self.stack.close()

    @cached_property
    def rollouts(self) -> Path:
        """A file of rows that have every field."""
        rows = with_every_field(near_uniform(rollout_rows()))
        return write_rollouts(self.folder / "rollouts.jsonl", rows)

    def argv(self, layout: Layout) -> list[str]:
        """All flags of a layout."""
        return [*RUN, f"--rollout-data={self.rollouts}", *RUNS[layout.run], *layout.flags]

    def world(self, num_ranks: int) -> World:
        """The ranks that serve every launch of that size."""
        if num_ranks not in self.worlds:
            world = World(num_ranks, timeout_s=60 + 20 * num_ranks)
            self.worlds[num_ranks] = self.stack.enter_context(world)
        return self.worlds[num_ranks]

    def step(self, layout: Layout, precision: str = "fp64") -> Step:
        """The first step of a layout; `precision` is fp64 or bf16."""
        argv = [*self.argv(layout), f"--{precision}"]
        ranks = self.world(layout.num_ranks).run(step_of_rank, layout.num_ranks, argv)
        return assemble(ranks)

    def reference(self, run: str, precision: str = "fp64") -> Step:
        """The step of one process that takes one sample at a time."""
        if (run, precision) not in self.references:
            self.references[run, precision] = self.step(Layout(run, "mb1"), precision)
        return self.references[run, precision]

    def differences(self, layout: Layout) -> tuple[float, float]:
        """The largest relative difference of a scalar, and of a gradient, from one process."""
        found = compare(self.reference(layout.run), self.step(layout))
        return tuple(
            max(difference.worst for difference in found if difference.kind == kind)
            for kind in ("scalar", "gradient")
        )


def table(measure: Measure, chosen: Sequence[Layout]) -> Iterator[str]:
    """The lines of a Markdown table, each as soon as it is measured."""
    yield "| run | layout | ranks | loss, metrics, norm | gradients |"
    yield "|---|---|---|---|---|"
    for layout in chosen:
        scalars, gradients = measure.differences(layout)
        yield (
            f"| {layout.run} | `{layout.words}` | {layout.num_ranks} | {scalars:.0e} | "
            f"{gradients:.0e} |"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help='layouts to measure, as in the table ("tp2 sp mb4"); else all'
    )
    parser.add_argument("--run", default="tied", choices=RUNS, help="what `words` are layouts of")
    arguments = parser.parse_args()
    chosen = layouts(arguments.run, *arguments.words) or MATRIX
    with tempfile.TemporaryDirectory() as folder, Measure(Path(folder)) as measure:
        for line in table(measure, chosen):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
