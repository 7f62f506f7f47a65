"""The loop: rollouts, old outputs, optimizer steps, metrics, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron.rl.checkpoint import Checkpointer, Progress
from megatron.rl.computed import compute, micro_batch_of, needs_pass, old_outputs_of
from megatron.rl.config import RunConfig
from megatron.rl.guard import SkippedStepsError, StepDigest, StepError, agree, largest, phase
from megatron.rl.initialize import Grid
from megatron.rl.logging import RunLogger, log_info, log_warning
from megatron.rl.report import console_line, packing_scalars, step_scalars
from megatron.rl.rollout import Computed, Rollout, StepPlan, read_rollout
from megatron.rl.signs import brief
from megatron.rl.sources import EndOfRolloutsError, RolloutRows, Source
from megatron.rl.step import StepResult, Trainee
from megatron.rl.stopping import EXIT_OK, EXIT_SIGNAL, Stop, StopRequest


@dataclass
class Trainer:
    """One run, from where it stands to its end.

    Args:
        config: the run.
        grid: this rank.
        source: where samples come from.
        trainee: model, head and optimizer.
        checkpointer: saves the run.
        logger: shows it.
        total_steps: optimizer steps of the whole run; None until no further rollout comes.
        progress: where the run stands.
        old_outputs: of the rollout in training, by position in it, as the checkpoint gives them;
            empty where they are not known yet.
    """

    config: RunConfig
    grid: Grid
    source: Source
    trainee: Trainee
    checkpointer: Checkpointer
    logger: RunLogger
    total_steps: int | None
    progress: Progress
    old_outputs: Mapping[int, Tensor]
    computed: Computed = field(init=False, default_factory=Computed)
    stop_request: StopRequest = field(init=False)
    first_step: int = field(init=False)
    saved_step: int = field(init=False)

    def __post_init__(self) -> None:
        """Remember where this process starts."""
        self.stop_request = StopRequest(self.config.checkpoint)
        self.first_step = self.saved_step = self.progress.step

    def run(self) -> int:
        """Train to the end or to the first reason to stop.

        Returns:
            The exit code.

        Raises:
            StepError: a step failed, or too many were not finite.
        """
        stop = Stop.NONE
        if self._is_done:
            log_info(f"nothing left to train: step {self.progress.step} of {self.total_steps}")
        with self.logger:
            while not stop and not self._is_done:
                stop = self._train_rollout()
            if self.saved_step != self.progress.step:
                self._save()
            self._wait_for_save()
        if stop:
            log_info(f"stopped after step {self.progress.step}: {stop.words}")
        return EXIT_SIGNAL if stop >= Stop.SIGUSR1 else EXIT_OK

    @property
    def _is_done(self) -> bool:
        return self.total_steps is not None and self.progress.step >= self.total_steps

    def _train_rollout(self) -> Stop:
        """The steps of the current rollout that are still to be taken."""
        found = self._await_rollout()
        if isinstance(found, Stop):
            return found
        with self._phase("reading rollouts"):
            rollout = read_rollout(self.progress.rollout, found, self.config, self.grid.dp_rank)
            self._check_position(rollout)
        seconds = None
        for step in rollout.steps[self.progress.step_in_rollout :]:
            stop = self._agree(rollout, step)
            if stop or self._is_done:
                return stop
            if seconds is None:  # ranks have agreed on the rollout before anything is made of it
                seconds = self._prepare(rollout)
            self._train_step(rollout, step, seconds)
            seconds = 0.0
            self._save_if_due()
        return Stop.NONE

    def _await_rollout(self) -> RolloutRows | Stop:
        """The rows of the current rollout once they are there; a reason to stop may come first."""
        while True:
            number = self.progress.rollout
            try:
                with self._phase("getting a rollout", lets_pass=(EndOfRolloutsError,)):
                    found = self.source.rollout(number, self.progress.step)
            except EndOfRolloutsError as end:
                log_info(f"no further rollout: {end}")
                return Stop.NO_ROLLOUT
            if found is None:
                with self._phase("step guard"):
                    stop = Stop(largest(self._reason_to_stop, self.grid))
                if stop:
                    return stop
            elif len(found.places) > 0:
                return found
            else:
                log_warning(f"rollout {number} has no sample that may be trained: going on")
                self.progress = replace(self.progress, rollout=number + 1)

    def _phase(
        self, name: str, samples: str = "", lets_pass: tuple[type[Exception], ...] = ()
    ) -> AbstractContextManager[None]:
        """A part of the coming step, under its name in messages."""
        return phase(name, self.progress.step + 1, self.grid.watch, samples, lets_pass=lets_pass)

    @property
    def _reason_to_stop(self) -> Stop:
        done = self.progress.step
        return self.stop_request.reason(done, done - self.first_step)

    def _check_position(self, rollout: Rollout) -> None:
        """A run resumed within a rollout must find its steps and their old outputs."""
        done = self.progress.step_in_rollout
        if done >= len(rollout.steps):
            raise StepError(
                f"the checkpoint has taken {done} steps of rollout {rollout.number}, which has "
                f"{len(rollout.steps)} here"
            )
        missing = done and needs_pass(rollout, self.config) and not self.old_outputs
        if missing:
            raise StepError(
                f"the checkpoint lies within rollout {rollout.number} and has no "
                f"{self.trainee.output_name} for it (saved with --use-rollout-logprobs?); fix: go "
                "on with the flags that it was saved with"
            )

    def _prepare(self, rollout: Rollout) -> float:
        """Old outputs and advantages of the rollout; the seconds of the pass for the former.

        After a resume within a rollout the checkpoint has given the old outputs.
        """
        start = time.perf_counter()
        runs_pass = needs_pass(rollout, self.config) and self.progress.step_in_rollout == 0
        if runs_pass:
            with self._phase(self.trainee.output_name, f"of rollout {rollout.number}"):
                self.old_outputs = old_outputs_of(rollout, self.trainee)
        seconds = time.perf_counter() - start
        with self._phase("advantages", f"of rollout {rollout.number}"):
            self.computed = compute(rollout, self.old_outputs, self.config, self.grid)
        return seconds if runs_pass else 0.0

    def _agree(self, rollout: Rollout, step: StepPlan) -> Stop:
        """Compare the coming step over all ranks; the reason to stop, if any rank has one."""
        done = self.progress.step
        digest = StepDigest(
            step=done + 1,
            rollout=rollout.number,
            num_micro_batches=step.num_micro_batches,
            samples=rollout.digest,
            skipped_steps=self.progress.skipped_steps,
        )
        ids = rollout.rows["index"][list(step.positions)].tolist()
        with self._phase("step guard", brief(ids)):
            return Stop(agree(digest, self._reason_to_stop, ids, self.grid))

    def _train_step(self, rollout: Rollout, step: StepPlan, log_probs_seconds: float) -> None:
        start = time.perf_counter()
        number = self.progress.step + 1
        learning_rate = self.trainee.learning_rate
        packs = step.micro_batches[self.grid.dp_rank]
        indices = [rollout.samples[position].index for pack in packs for position in pack]
        with self._phase("training", brief(indices)):
            micro_batches = [
                micro_batch_of(rollout, step, pack, self.computed, self.trainee) for pack in packs
            ]
            result = self.trainee.step(micro_batches)
        self._advance(rollout, step, result)
        seconds = time.perf_counter() - start
        rows = rollout.rows[list(step.positions)]
        times = {"train_time": seconds, "log_probs_time": log_probs_seconds}
        with phase("logging", number, self.grid.watch):
            self.logger.log_step(
                number,
                {
                    **step_scalars(result, rows, times, self.grid),
                    **rollout.scalars,
                    **packing_scalars(rollout, step, self.config, self.grid),
                },
                console=console_line(
                    result,
                    rows,
                    consumed_samples=self.progress.consumed_samples,
                    learning_rate=learning_rate,
                    seconds=seconds + log_probs_seconds,
                ),
                histograms={f"train/{name}": value for name, value in result.histograms.items()},
            )
        self._check_skipped(result)

    def _check_skipped(self, result: StepResult) -> None:
        limit, skipped = self.config.schedule.max_skipped_steps, self.progress.skipped_steps
        if skipped > limit:
            raise SkippedStepsError(
                f"max_skipped_steps: {skipped} steps were skipped because they were not finite, "
                f"the last one step {self.progress.step} ({_not_finite(result)}): "
                f"max_skipped_steps={limit}"
            )

    def _advance(self, rollout: Rollout, step: StepPlan, result: StepResult) -> None:
        """Move the position, and the learning rate where the weights moved."""
        before = self.progress
        if result.updated:
            self.checkpointer.scheduler.step(increment=1)
        else:
            log_warning(
                f"step {before.step + 1} skipped: loss {result.metrics['loss']}, gradient norm "
                f"{result.grad_norm}; not finite: {_not_finite(result)}"
            )
        ended = before.step_in_rollout + 1 == len(rollout.steps)
        self.progress = replace(
            before,
            step=before.step + 1,
            rollout=before.rollout + ended,
            step_in_rollout=0 if ended else before.step_in_rollout + 1,
            consumed_samples=before.consumed_samples + len(step.positions),
            skipped_steps=before.skipped_steps + (not result.updated),
        )
        if ended:
            self.old_outputs, self.computed = {}, Computed()

    def _save_if_due(self) -> None:
        if self.config.checkpoint.async_save:
            with phase("saving", self.saved_step, self.grid.watch):
                self.checkpointer.saver.poll()
        interval = self.config.checkpoint.save_interval
        if interval and self.progress.step % interval == 0:
            self._save()

    def _save(self) -> None:
        if self.config.checkpoint.save is None:
            return
        with phase("saving", self.progress.step, self.grid.watch):
            self.checkpointer.save(self.progress, self.old_outputs)
        self.saved_step = self.progress.step

    def _wait_for_save(self) -> None:
        if self.config.checkpoint.save is None:
            return
        with phase("saving", self.saved_step, self.grid.watch):
            self.checkpointer.saver.finish()


def _not_finite(result: StepResult) -> str:
    return result.culprit or "the gradient norm alone"
