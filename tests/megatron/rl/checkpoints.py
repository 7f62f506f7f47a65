"""Runs that save, load and go on, on the ranks of a test's world."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.rl.checkpoint import Progress
from megatron.rl.rollout import Computed
from tests.megatron.rl.running import Running, running
from tests.megatron.rl.tiny import RUN_FLAGS, with_every_field, write_qwen3, write_rollouts

LAYOUTS = {
    "tp2 sp": ["--tensor-model-parallel-size=2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size=2"],
    "cp2": ["--context-parallel-size=2", "--allgather-cp"],
    "dp2": [],
    "dp2 distributed optimizer": ["--use-distributed-optimizer"],
    "dp2 overlapped": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--ddp-bucket-size=4000",
    ],
    "tp2 distributed optimizer": [
        "--use-distributed-optimizer",
        "--tensor-model-parallel-size=2",
    ],
}
EXPERTS = [
    "--num-experts=4",
    "--moe-token-dispatcher-type=alltoall",
    "--moe-router-topk=2",
    "--moe-ffn-hidden-size=32",
]


@dataclass(frozen=True)
class Outcome:
    """The third step of a run, and the state of this rank's generators before it."""

    metrics: dict[str, float]
    learning_rate: float
    draw: float
    progress: Progress
    old: dict[int, list[float]]
    advantages: dict[int, list[float]]


def third_step(run: Running, progress: Progress, computed: Computed) -> Outcome:
    learning_rate = run.trainee.learning_rate
    draw = float(torch.rand(()))
    result = run.trainee.step(run.micro_batches(2, computed))
    return Outcome(
        {**result.metrics, "grad_norm": result.grad_norm},
        learning_rate,
        draw,
        progress,
        {position: old.tolist() for position, old in old_outputs(computed).items()},
        {position: values.tolist() for position, values in computed.advantages.items()},
    )


def old_outputs(computed: Computed) -> Mapping[int, Tensor]:
    """What a checkpoint holds of it."""
    return computed.old_log_probs or computed.values


def with_everyones_old(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes, each with the old log-probs of all ranks, as a checkpoint has them."""
    together = {position: old for outcome in outcomes for position, old in outcome.old.items()}
    return [replace(outcome, old=together) for outcome in outcomes]


def save_after_two(rank: int, argv: list[str]) -> Outcome:
    """Two steps, a save within the rollout, and the third step of the run that goes on."""
    with running(rank, 2, argv) as run:
        for step in (0, 1):
            run.trainee.step(run.micro_batches(step))
            run.checkpointer.scheduler.step(increment=1)
        torch.rand(3)  # a generator that has moved since the start
        progress = Progress(step=2, rollout=0, step_in_rollout=2, consumed_samples=10)
        run.checkpointer.save(progress, old_outputs(run.computed))
        return third_step(run, progress, run.computed)


def load_and_go_on(rank: int, argv: list[str]) -> Outcome:
    with running(rank, 2, argv) as run:
        restored = run.checkpointer.load()
        assert restored is not None
        if run.trainee.config.checkpoint.finetune:
            assert not restored.old_outputs
        if not restored.old_outputs:
            return third_step(run, restored.progress, run.computed)
        return third_step(run, restored.progress, run.computed_from(restored.old_outputs))


def save_steps(rank: int, argv: list[str], steps: list[int]) -> None:
    with running(rank, 2, argv) as run:
        for step in steps:
            run.checkpointer.save(Progress(step=step), {})


def run_flags(folder: Path) -> list[str]:
    """A policy with every field of its rows in use, and steps of 5 samples within a rollout."""
    return [
        *RUN_FLAGS,
        "--rollout-batch-size=4",
        "--global-batch-size=5",
        "--micro-batch-size=2",
        "--lr-decay-style=cosine",
        f"--hf-checkpoint={write_qwen3(folder / 'hf')}",
        f"--rollout-data={write_rollouts(folder / 'rollouts.jsonl', with_every_field())}",
        "--advantage-estimator=reinforce_plus_plus",
        "--kl-coef=0.1",
        "--gamma=0.9",
        "--normalize-advantages",
    ]
