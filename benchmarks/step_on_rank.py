"""What a rank does for `benchmarks.step`: the loops in turn, and the reading of a rollout."""

import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from benchmarks.core_loop import CoreLoop
from benchmarks.packing import MAX_LENGTH
from benchmarks.stopwatch import REST, watched
from megatron.rl import cpu_backend, rollout
from megatron.rl.arguments import resolve
from megatron.rl.build import build_trainer
from megatron.rl.computed import micro_batch_of
from megatron.rl.config import RunConfig
from megatron.rl.data import check_data, make_source
from megatron.rl.initialize import Grid, World, process_grid
from megatron.rl.report import packing_scalars, rollout_scalars
from megatron.rl.rollout import Computed, read_rollout
from megatron.rl.trainer import Trainer
from megatron.rl.watch import Watch

CORE, SFT, GRPO = "megatron-core", "sft", "grpo"
_LOSS_FLAGS = {SFT: "--loss-type=sft_loss", GRPO: "--loss-type=policy_loss"}


@dataclass(frozen=True)
class StepCase:
    """A setting: one step, its samples and the model.

    Attributes:
        samples: Of the step.
        shortest: Tokens of the shortest sample.
        longest: Likewise.
        prompt: Tokens of each of them that do not train.
        hidden: Hidden size.
        layers: Layers.
        vocab: Vocabulary.
        tp: Ranks that share a model.
        ranks: All ranks.
    """

    samples: int
    shortest: int
    longest: int
    prompt: int
    hidden: int
    layers: int
    vocab: int
    tp: int = 1
    ranks: int = 1

    def __str__(self) -> str:
        """One line."""
        parallel = f"tp {self.tp}, dp {self.ranks // self.tp}"
        return (
            f"{self.samples} samples of {self.shortest} to {self.longest} tokens, {self.prompt} "
            f"of each a prompt; {self.layers} layers, H={self.hidden}, V={self.vocab}; {parallel}"
        )

    def config(self, loop: str, folder: Path, epochs: int) -> RunConfig:
        """A run that reads `folder/rollouts.jsonl` and trains it whole in every step."""
        flags = [
            "--device=cpu",
            f"--num-layers={self.layers}",
            f"--hidden-size={self.hidden}",
            "--num-attention-heads=4",
            "--normalization=RMSNorm",
            "--swiglu",
            "--disable-bias-linear",
            f"--vocab-size={self.vocab}",
            f"--tensor-model-parallel-size={self.tp}",
            "--lr=1e-3",
            "--lr-decay-style=constant",
            "--use-dynamic-batch-size",
            f"--max-tokens-per-gpu={2 * self.longest}",
            "--calculate-per-token-loss",
            "--no-shuffle",
            f"--num-epochs={epochs}",
            f"--rollout-data={folder / 'rollouts.jsonl'}",
            f"--tensorboard-dir={folder / loop}",
            _LOSS_FLAGS[loop],
        ]
        return resolve(flags, self.ranks, has_driver=False)


@dataclass(frozen=True)
class Times:
    """What one rank measured.

    Attributes:
        seconds: CPU seconds of each round's step, by loop.
        parts: CPU seconds of the parts of each round's step, by loop of ours.
        losses: of every step, the first round's included, by loop; on rank 0.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)


def time_steps(rank: int, case: StepCase, repeats: int, folder: str) -> Times:
    """Train with each loop in turn, `repeats` rounds after one that is not counted."""
    warnings.simplefilter("ignore")
    cpu_backend.install()
    epochs = repeats + 1
    configs = {loop: case.config(loop, Path(folder), epochs) for loop in (SFT, GRPO)}
    world = World(rank, rank, case.ranks, launched=True)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        grid = stack.enter_context(process_grid(configs[SFT], world, torch.device("cpu")))
        trainers = {loop: build_trainer(config, grid) for loop, config in configs.items()}
        core = CoreLoop(case.config(SFT, Path(folder), epochs), grid, trainers[SFT].trainee)
        times = _take_turns(trainers, core, grid, epochs)
        for trainer in trainers.values():
            trainer.logger.close()
        if grid.is_writer:
            times.losses.update({loop: _logged(Path(folder) / loop) for loop in trainers})
    return times


def _take_turns(trainers: dict[str, Trainer], core: CoreLoop, grid: Grid, rounds: int) -> Times:
    times = Times({loop: [] for loop in (CORE, *trainers)}, {loop: [] for loop in trainers})
    times.losses[CORE] = []
    batches = _batches(trainers[SFT], grid)
    with watched() as stopwatch:
        for counted in range(rounds):
            seconds, loss = _timed(lambda: core.step(batches))
            times.losses[CORE].append(loss)
            if counted:
                times.seconds[CORE].append(seconds)
            for loop, trainer in trainers.items():
                stopwatch.take()
                seconds, _ = _timed(trainer._train_rollout)
                parts = stopwatch.take()
                if counted:
                    times.seconds[loop].append(seconds)
                    times.parts[loop].append(parts | {REST: seconds - sum(parts.values())})
    return times


def _batches(trainer: Trainer, grid: Grid) -> list[Any]:
    """This rank's micro-batches of the one step that all rounds train."""
    read = read_rollout(0, trainer.source.rollout(0, 0), trainer.config, grid.dp_rank)
    (step,) = read.steps
    return [
        micro_batch_of(read, step, pack, Computed(), trainer.trainee)
        for pack in step.micro_batches[grid.dp_rank]
    ]


def _timed(step: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    distributed.barrier()
    start = time.process_time()
    found = step()
    return time.process_time() - start, found


def _logged(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def seconds_to_read(path: Path, replicas: int) -> dict[str, float]:
    """CPU seconds that the first of so many replicas spends on a rollout, by part; no model."""
    case = StepCase(0, 0, MAX_LENGTH // 2, 0, 64, 2, 32_000, ranks=replicas)
    config = case.config(SFT, path.parent, 1)
    source = make_source(config, check_data(config))
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    watch = Watch(0, replicas)
    grid = Grid(World(world_size=replicas), SimpleNamespace(cp=alone), torch.device("cpu"), watch)
    found: dict[str, float] = {}
    places = source.rollout_rows(0)
    found["plan"], plan = _clocked(
        lambda: rollout.plan_rollout(0, source.files.rows[places], config)
    )
    own = plan.positions(0)
    found["read"], _ = _clocked(lambda: source.files.read(places[own]))
    (step,) = plan.steps
    found["digest"], _ = _clocked(lambda: plan.digest)
    found["report"], _ = _clocked(
        lambda: [dict(rollout_scalars(plan.rows)), packing_scalars(plan, step, config, grid)]
    )
    return found


def _clocked(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = function()
    return time.process_time() - start, found
