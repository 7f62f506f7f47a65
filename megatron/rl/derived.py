"""What follows from the flags and the world size: ranks, padded vocabulary, batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron.rl.config import DataConfig, RunConfig


@dataclass(frozen=True)
class DerivedLayout:
    """The layout of a run; None where only the rollout files can tell."""

    world_size: int
    """Ranks of the job."""
    tensor_parallel: int
    """Ranks that share one layer."""
    pipeline_parallel: int
    """Pipeline stages."""
    virtual_pipeline: int
    """Model chunks per pipeline stage."""
    context_parallel: int
    """Ranks that share one sequence."""
    expert_parallel: int
    """Ranks that share the experts of one layer."""
    data_parallel: int
    """Replicas of the model: world_size / (tensor * pipeline * context)."""
    vocab_size: int
    """True vocabulary."""
    padded_vocab_size: int
    """Rows of the embedding: a multiple of make_vocab_size_divisible_by * tensor_parallel."""
    samples_per_rollout: int | None
    """rollout_batch_size * n_samples_per_prompt."""
    samples_per_step: int | None
    """Samples of one optimizer step."""
    steps_per_rollout: int | None
    """Optimizer steps of one rollout, the last one possibly smaller."""
    micro_batches_per_rank: int | None
    """Micro-batches of one step on each data-parallel rank; None with dynamic packing."""
    micro_batch_multiple: int
    """The micro-batches of a step are a multiple of this: interleaved stages take whole rounds."""
    tokens_per_pack: int | None
    """Most tokens of one micro-batch over its context-parallel ranks."""
    tokens_per_step: int | None
    """Most tokens of one optimizer step: samples_per_step * max_position_embeddings."""
    row_multiple: int
    """Each rank's rows are padded to a multiple of this (sequence parallelism cuts them)."""

    @classmethod
    def of(cls, config: RunConfig) -> DerivedLayout:
        """Derive the layout of a checked configuration."""
        transformer, data = config.transformer, config.data
        tensor_parallel = transformer.tensor_model_parallel_size
        context_parallel = transformer.context_parallel_size
        data_parallel = config.world_size // (
            tensor_parallel * transformer.pipeline_model_parallel_size * context_parallel
        )
        rollout, step = samples_per_rollout(data), samples_per_step(data)
        longest = config.model.max_position_embeddings
        return cls(
            world_size=config.world_size,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=transformer.pipeline_model_parallel_size,
            virtual_pipeline=transformer.virtual_pipeline_model_parallel_size or 1,
            context_parallel=context_parallel,
            expert_parallel=transformer.expert_model_parallel_size,
            data_parallel=data_parallel,
            vocab_size=config.model.vocab_size,
            padded_vocab_size=padded_vocab_size(
                config.model.vocab_size, config.model.make_vocab_size_divisible_by, tensor_parallel
            ),
            samples_per_rollout=rollout,
            samples_per_step=step,
            steps_per_rollout=steps_per_rollout(data),
            micro_batches_per_rank=None
            if data.use_dynamic_batch_size
            else _ceil_div(step, data.micro_batch_size * data_parallel),
            micro_batch_multiple=micro_batch_multiple(transformer),
            tokens_per_pack=data.max_tokens_per_gpu and data.max_tokens_per_gpu * context_parallel,
            tokens_per_step=step * longest if step and longest else None,
            row_multiple=row_multiple(transformer),
        )

    def describe(self) -> str:
        """The layout as an aligned table, one quantity a line."""
        ranks = " x ".join(
            f"{name} {size}"
            for name, size in (
                ("dp", self.data_parallel),
                ("pp", self.pipeline_parallel),
                ("cp", self.context_parallel),
                ("tp", self.tensor_parallel),
            )
        )
        if self.virtual_pipeline > 1:
            ranks += f", {self.virtual_pipeline} model chunks a stage"
        if self.expert_parallel > 1:
            ranks += f", experts over {self.expert_parallel}"
        padding = self.padded_vocab_size - self.vocab_size
        lines = {
            "ranks": f"{self.world_size} = {ranks}",
            "vocabulary": f"{self.padded_vocab_size:,} = {self.vocab_size:,} + {padding:,} padding",
            "samples per rollout": _or(self.samples_per_rollout, "as the rollout files give"),
            "samples per step": _or(self.samples_per_step, "as the rollout files give"),
            "steps per rollout": _or(self.steps_per_rollout, "as the rollout files give"),
            "micro-batches per rank": _or(self.micro_batches_per_rank, "as packing gives"),
            "tokens per pack": _or(self.tokens_per_pack, "not bounded"),
            "tokens per step": _or(self.tokens_per_step, "not bounded", prefix="at most "),
            "rows padded to": f"a multiple of {self.row_multiple}",
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Smallest multiple of `divisible_by * tensor_parallel` that holds the vocabulary."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def samples_per_rollout(data: DataConfig) -> int | None:
    """Samples of one rollout, None where only the rollout files can tell."""
    if data.rollout_batch_size is None or data.n_samples_per_prompt is None:
        return None
    return data.rollout_batch_size * data.n_samples_per_prompt


def samples_per_step(data: DataConfig) -> int | None:
    """Samples of one optimizer step, None where only the rollout files can tell."""
    if data.global_batch_size is not None:
        return data.global_batch_size
    rollout = samples_per_rollout(data)
    return rollout and rollout // (data.num_steps_per_rollout or 1)


def steps_per_rollout(data: DataConfig) -> int | None:
    """Optimizer steps of one rollout, None where only the rollout files can tell."""
    if data.global_batch_size is None:
        return data.num_steps_per_rollout or 1
    return _ceil_div(samples_per_rollout(data), data.global_batch_size)


def micro_batch_multiple(transformer: TransformerConfig) -> int:
    """Micro-batches that the schedule takes at a time: 1, unless stages are interleaved."""
    if (transformer.virtual_pipeline_model_parallel_size or 1) == 1:
        return 1
    return transformer.microbatch_group_size_per_vp_stage


def row_multiple(transformer: TransformerConfig) -> int:
    """Sequence parallelism cuts a rank's rows over tp; FP8 and FP4 kernels want 16 and 32."""
    parts = transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
    kernel = 16 if transformer.fp8 else 32 if transformer.fp4 else 1
    return parts * kernel


def _ceil_div(total: int | None, part: int | None) -> int | None:
    return -(-total // part) if total and part else None


def _or(value: int | None, unknown: str, prefix: str = "") -> str:
    return unknown if value is None else f"{prefix}{value:,}"
