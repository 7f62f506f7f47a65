"""One optimizer step: forward and backward over micro-batches, then the update, if it is finite.

The loss of every micro-batch is already its part of the step's plain sum, so gradients are summed
over micro-batches and ranks and divided by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from tqdm import tqdm

from megatron.rl.batching import MicroBatch
from megatron.rl.config import RunConfig
from megatron.rl.initialize import Grid
from megatron.rl.logging import progress
from megatron.rl.model import on_hidden
from slime_loss import (
    Histogram,
    LossOutput,
    ReducedMetrics,
    RLHead,
    TokenBatch,
    ValueHead,
    merge_metrics,
    reduce_metrics,
)


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    Args:
        metrics: every metric of the loss that is one number, reduced over all ranks and
            micro-batches.
        histograms: the other metrics of the loss, likewise.
        grad_norm: before clipping; NaN or infinite where the gradient is.
        updated: whether the weights moved.
        culprit: why they did not: the sample and row that is not finite, or the parameters.
    """

    metrics: dict[str, float]
    histograms: dict[str, Histogram]
    grad_norm: float
    updated: bool
    culprit: str | None = None


@dataclass(frozen=True)
class Trainee:
    """The model in training with all that a step needs.

    Args:
        config: the run.
        grid: this rank.
        chunks: wrapped model chunks.
        head: the loss as a model head.
        optimizer: megatron-core's optimizer over the chunks.
    """

    config: RunConfig
    grid: Grid
    chunks: list[MegatronModule]
    head: RLHead | ValueHead
    optimizer: MegatronOptimizer

    @property
    def output_name(self) -> str:
        """What `outputs` gives, for messages and progress."""
        return "old values" if isinstance(self.head, ValueHead) else "old log-probs"

    @property
    def learning_rate(self) -> float:
        """Learning rate of the coming step."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def outputs(self, micro_batches: Sequence[MicroBatch]) -> list[list[Tensor]]:
        """Log-probs of the response tokens, or of a critic their values; no gradient.

        Communicates over the pipeline, tensor- and context-parallel groups.

        Returns:
            For each micro-batch the fp32 [response_length] of each of its samples; empty on every
            pipeline stage but the last.
        """
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            outputs = self._run(micro_batches, self._output, self.output_name)
        for chunk in self.chunks:
            chunk.train()
        cp_group = self.grid.groups.cp if self.grid.cp_size > 1 else None
        return [
            micro_batch.per_sample(micro_batch.layout.gather(out, cp_group))
            for micro_batch, out in zip(micro_batches, outputs, strict=bool(outputs))
        ]

    def _output(self, hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Tensor:
        if isinstance(self.head, ValueHead):
            return self.head.values(hidden, weight, batch)
        return self.head.log_probs(hidden, weight, batch).log_probs

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Forward, backward and update.

        Communicates over every group; all ranks return the same result.
        """
        self._zero_gradients()
        outputs = self._run(micro_batches, self.head, "training")
        metrics = self._reduce(outputs)
        grad_norm, updated = math.nan, False
        if not math.isfinite(metrics.scalars["loss"]):
            culprit = self._nonfinite_loss(micro_batches, outputs)
        else:
            grad_norm, updated = self._update()
            culprit = None if updated else self._first(self._nonfinite_gradient(micro_batches))
        return StepResult(metrics.scalars, metrics.histograms, grad_norm, updated, culprit)

    def _run(
        self, micro_batches: Sequence[MicroBatch], head: Any, desc: str | None = None
    ) -> list[Any]:
        """Core's schedule over the micro-batches; what the last stage's loss function kept.

        Without gradients enabled it is forward only.
        """
        forward_only = not torch.is_grad_enabled()
        shown = self.grid.is_writer and desc is not None
        with progress(
            desc=desc or "", total=len(micro_batches), unit="micro-batch", is_writer=shown
        ) as bar:
            iterators = [iter(micro_batches) for _ in self.chunks]
            iterators[0] = self._counted(micro_batches, bar)
            return get_forward_backward_func()(
                forward_step_func=partial(_forward_step, head=head),
                data_iterator=iterators,
                model=self.chunks,
                num_microbatches=len(micro_batches),
                # nominal: stages exchange the shapes of packed micro-batches
                seq_length=max(m.input_ids.shape[1] for m in micro_batches),
                micro_batch_size=micro_batches[0].input_ids.shape[0],
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _counted(self, micro_batches: Sequence[MicroBatch], bar: tqdm) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            self.grid.watch.tick()
            yield micro_batch
            bar.update()

    def _zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _reduce(self, outputs: list[LossOutput]) -> ReducedMetrics:
        """Metrics over micro-batches and ranks, then from the last stage to all stages."""
        groups = self.grid.groups
        reduced = [None]
        if self.grid.is_last_stage:
            reduced = [
                reduce_metrics(merge_metrics([out.metrics for out in outputs]), groups.dp_cp)
            ]
        if self.grid.pp_size > 1:
            last = dist.get_process_group_ranks(groups.pp)[-1]
            dist.broadcast_object_list(reduced, src=last, group=groups.pp)
        return reduced[0]

    def _update(self) -> tuple[float, bool]:
        """Clip and step, unless the gradient is not finite.

        Core's own `step` would write a non-finite gradient into the weights of an fp32 or bf16
        run, so its three parts are called here.
        """
        overflow = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if overflow or not math.isfinite(grad_norm):
            return grad_norm, False
        clip = self.config.optimizer.clip_grad
        for part in self.optimizer.chained_optimizers if clip > 0 else ():
            clip_grad_by_total_norm_fp32(
                part.get_parameters(),
                clip,
                grad_norm,
                part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
        return grad_norm, self.optimizer.step_with_ready_grads()

    def _nonfinite_loss(
        self, micro_batches: Sequence[MicroBatch], outputs: Sequence[LossOutput]
    ) -> str | None:
        """Weights that are not finite, and the first sample whose loss is not."""
        row = self._first(_nonfinite_row(micro_batches, outputs))
        weights = self._first(next(iter(self._nonfinite("data")), None))
        if weights is None:
            return row
        return f"{weights} has weights that are not finite" + (f"; {row}" if row else "")

    def _nonfinite_gradient(self, micro_batches: Sequence[MicroBatch]) -> str | None:
        """Which of this rank's micro-batches give a gradient whose norm is not finite.

        Every rank runs all of its micro-batches again, since they communicate: one by one, or in
        the rounds that interleaved stages need.
        """
        findings = []
        round_size = self.config.layout.micro_batch_multiple
        for first in range(0, len(micro_batches), round_size):
            in_round = micro_batches[first : first + round_size]
            self._zero_gradients()
            with self._local_gradients():
                self._run(in_round, self.head)
            origins = ", ".join(_origin(t.sample) for m in in_round for t in m.samples)
            names = self._nonfinite("main_grad")
            findings += [f"gradient of {name} from {origins}" for name in names]
        self._zero_gradients()
        return findings[0] if findings else None

    @contextmanager
    def _local_gradients(self) -> Iterator[None]:
        """Leave every rank its own gradients: nothing is reduced, during the backward or after."""
        transformer = self.config.transformer
        saved = transformer.finalize_model_grads_func, transformer.no_sync_func
        transformer.finalize_model_grads_func = _leave_gradients_local
        transformer.no_sync_func = nullcontext
        with ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            yield
        transformer.finalize_model_grads_func, transformer.no_sync_func = saved

    def _nonfinite(self, part: Literal["data", "main_grad"]) -> list[str]:
        """The parameters of this rank whose weights, or gradient, are not finite in the norm."""
        return [
            name.removeprefix("module.")
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
            if not torch.isfinite(getattr(parameter, part).float().pow(2).sum())
        ]

    def _first(self, finding: str | None) -> str | None:
        """The finding of the lowest rank that has one, with that rank, on every rank."""
        findings = [None] * self.grid.world.world_size
        dist.all_gather_object(findings, finding)
        return next((f"rank {r}, {f}" for r, f in enumerate(findings) if f is not None), None)


def finalize_sum(model: list[MegatronModule], _num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Core's gradient reductions without its division by the number of tokens.

    Installed as `finalize_model_grads_func`: weights are global, gradients are a plain sum.
    """
    finalize_model_grads(model, None, **kwargs)


def _leave_gradients_local(*_args: Any, **_kwargs: Any) -> None:
    """Stands for `finalize_sum` while one rank's own gradients are looked at."""


def _forward_step(iterator: Iterator[MicroBatch], chunk: MegatronModule, *, head: Any) -> tuple:
    micro_batch = next(iterator)
    output = chunk(
        micro_batch.input_ids,
        micro_batch.position_ids,
        None,
        packed_seq_params=micro_batch.rows,
        output_processor=on_hidden(head),
        output_processor_context=micro_batch.batch,
    )
    # core handles tensors alone; the rest of the last stage's output waits in the loss function
    return output.loss if isinstance(output, LossOutput) else output, partial(_keep, output)


def _keep(
    output: LossOutput | Tensor, first: Tensor, non_loss_data: bool = False
) -> LossOutput | Tensor | tuple[Tensor, Tensor, LossOutput | Tensor]:
    """Core's loss function: the loss as it is, no token count, and the output for later."""
    if non_loss_data:
        return output
    return first, torch.zeros((), dtype=torch.int), output


def _nonfinite_row(
    micro_batches: Sequence[MicroBatch], outputs: Sequence[LossOutput]
) -> str | None:
    """The first row of this rank whose loss is not finite; None also on earlier stages."""
    for micro_batch, output in zip(micro_batches, outputs, strict=bool(outputs)):
        row = int(output.first_nonfinite_row)
        if row >= 0:
            sample, position = micro_batch.sample_at(row)
            return f"loss of {_origin(sample)}, row {position}"
    return None


def _origin(sample: Any) -> str:
    return f"sample {sample.index} ({sample.origin})"
