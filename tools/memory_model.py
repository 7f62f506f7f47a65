"""Bytes that one rank of a run holds, from its flags: a sum over what is kept, tensor by tensor.

Activations follow Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models (arXiv 2205.05198), eq. 1 to 5, with grouped keys, gated MLPs, packed rows and attention that
keeps no scores in place of its terms. Dense models alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.rl.config import RunConfig
from megatron.rl.flags.generate import all_flags
from slime_loss import RLHead
from slime_loss.projection import RowPlan, plan_rows
from slime_loss.row_sums import cache_bytes
from slime_loss.vocab_softmax import SoftmaxOptions, VocabSoftmax

FP32 = 4


class MemoryModelError(ValueError):
    """A run that the formulas do not cover, and why."""


@dataclass(frozen=True)
class Part:
    """One line of the estimate: what it is, how many bytes, and the formula."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class StageMemory:
    """What one rank of a pipeline stage holds.

    Args:
        stage: of the pipeline, from 0.
        num_parameters: of this rank.
        held: from the first step on: parameters, gradients, optimizer state.
        kept: activations that wait for their backward.
        working: the largest of what is needed besides for a while: head, or one layer's backward.
    """

    stage: int
    num_parameters: int
    held: tuple[Part, ...]
    kept: Part
    working: tuple[Part, ...]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment: head and layers are not at work at the same time."""
        most = max(part.num_bytes for part in self.working)
        return sum(part.num_bytes for part in self.held) + self.kept.num_bytes + most

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every part, those that take turns included."""
        return (*self.held, self.kept, *self.working)


@dataclass(frozen=True)
class MemoryModel:
    """The formulas for one run.

    Args:
        config: the run, with as many ranks as it is planned for.
        rows: tokens of a micro-batch on one rank, padding included.
        trained_rows: how many of them train.

    Raises:
        MemoryModelError: the model or the optimizer is of a kind that is not covered.
    """

    config: RunConfig
    rows: int
    trained_rows: int

    def __post_init__(self) -> None:
        """Refuse what would be estimated wrong."""
        flags = self.config.flags
        refused = {
            "num_moe_experts": flags["num_moe_experts"] is not None,
            "pipeline_model_parallel_layout": flags["pipeline_model_parallel_layout"] is not None,
            "fp8": flags["fp8"] is not None,
            "fp4": flags["fp4"] is not None,
            "cpu_offloading": bool(flags["cpu_offloading"]),
            "optimizer_cpu_offload": bool(flags["optimizer_cpu_offload"]),
            "optimizer": flags["optimizer"] not in ("adam", "sgd"),
        }
        for name, is_refused in refused.items():
            if is_refused:
                flag = all_flags()[name].spelling
                raise MemoryModelError(
                    f"{flag} is not covered by the formulas: {flag}={flags[name]}; "
                    f"fix: estimate without {flag}"
                )

    @property
    def item_bytes(self) -> int:
        """Bytes of a parameter, and of an activation."""
        return self.config.transformer.params_dtype.itemsize

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.layout.tensor_parallel

    @cached_property
    def sequence_tp(self) -> int:
        """Ranks that share the rows between the products, by sequence parallelism."""
        return self.tp if self.config.transformer.sequence_parallel else 1

    @cached_property
    def query_width(self) -> int:
        """Channels of a rank's queries."""
        transformer = self.config.transformer
        return transformer.num_attention_heads * transformer.kv_channels // self.tp

    @cached_property
    def key_width(self) -> int:
        """Channels of a rank's keys."""
        transformer = self.config.transformer
        groups = transformer.num_query_groups or transformer.num_attention_heads
        return max(groups // self.tp, 1) * transformer.kv_channels

    @cached_property
    def mlp_width(self) -> int:
        """Channels between a rank's MLP products."""
        return self.config.transformer.ffn_hidden_size // self.tp

    def stages(self) -> list[StageMemory]:
        """Every stage of the pipeline."""
        return [self._stage(stage) for stage in range(self.config.layout.pipeline_parallel)]

    def layer_parameters(self) -> int:
        """Parameters of a layer on one rank."""
        transformer, hidden = self.config.transformer, self.config.transformer.hidden_size
        qkv = self.query_width + 2 * self.key_width
        fc1 = self.mlp_width * (2 if transformer.gated_linear_unit else 1)
        count = hidden * (qkv + self.query_width + fc1 + self.mlp_width)
        if transformer.add_bias_linear or transformer.add_qkv_bias:
            count += qkv
        if transformer.add_bias_linear:
            count += fc1 + 2 * hidden
        of_a_norm = 1 if transformer.normalization == "RMSNorm" else 2
        count += 2 * hidden * of_a_norm
        if transformer.qk_layernorm:
            count += 2 * transformer.kv_channels * of_a_norm
        return count

    def stage_parameters(self, stage: int) -> int:
        """Parameters of a stage on one rank."""
        config, hidden = self.config, self.config.transformer.hidden_size
        last = config.layout.pipeline_parallel - 1
        vocabulary = config.layout.padded_vocab_size // self.tp * hidden
        count = self.num_layers(stage) * self.layer_parameters()
        count += vocabulary if stage == 0 else 0
        if stage == last:
            count += hidden * (1 if config.transformer.normalization == "RMSNorm" else 2)
            is_untied = config.model.untie_embeddings_and_output_weights
            if config.loss.loss_type == "value_loss":
                count += hidden
            elif is_untied or stage > 0:  # tied weights have a copy on the last stage
                count += vocabulary
        return count

    def num_layers(self, stage: int) -> int:
        """Layers of a stage, all its model chunks together."""
        transformer = self.config.transformer
        chunks = transformer.virtual_pipeline_model_parallel_size
        return sum(
            get_num_layers_to_build(transformer, vp_stage=chunk, pp_rank=stage)
            for chunk in ([None] if chunks is None else range(chunks))
        )

    def layer_activations(self) -> int:
        """Bytes that a layer keeps of a micro-batch for its backward, nothing recomputed."""
        selected = self._selected_modules
        parts = self._attention_bytes(recomputed="core_attn" in selected)
        parts += self._mlp_bytes(recomputed="mlp" in selected)
        return self.rows * (parts + 2 * self._norm_bytes())

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage keeps at the same time, in 1F1B schedules."""
        layout = self.config.layout
        most = layout.micro_batches_per_rank or layout.pipeline_parallel
        behind = layout.pipeline_parallel - stage - 1
        if layout.virtual_pipeline == 1:
            return min(behind + 1, most)
        chunks = layout.virtual_pipeline
        warmup = 2 * behind + (chunks - 1) * layout.micro_batch_multiple + 1
        return min(warmup / chunks, most)

    def _stage(self, stage: int) -> StageMemory:
        count = self.stage_parameters(stage)
        kept = self._kept(stage)
        working = [self._layer_work(), self._update_work(stage)]
        if stage == self.config.layout.pipeline_parallel - 1:
            working.append(self._head_work())
        return StageMemory(stage, count, tuple(self._held(count)), kept, tuple(working))

    def _held(self, count: int) -> Iterator[Part]:
        config = self.config
        layout, optimizer = config.layout, config.optimizer
        yield Part("parameters", count * self.item_bytes, f"{self.item_bytes} a parameter")
        gradient = FP32 if config.ddp.grad_reduce_in_fp32 else self.item_bytes
        yield Part("gradients", count * gradient, f"{gradient} a parameter")
        state = self._state_bytes()
        replicas = layout.data_parallel * layout.context_parallel
        shards = replicas if optimizer.use_distributed_optimizer else 1
        share = f" / (dp {layout.data_parallel} x cp {layout.context_parallel})"
        formula = f"{state} a parameter{share if shards > 1 else ''}"
        yield Part("optimizer state", -(-count * state // shards), formula)

    def _state_bytes(self) -> int:
        """Of a parameter: master copy where it is of 16 bits, and the moments."""
        optimizer = self.config.optimizer
        is_adam = optimizer.optimizer == "adam"
        if optimizer.use_precision_aware_optimizer:
            moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
            return optimizer.main_params_dtype.itemsize + sum(one.itemsize for one in moments)
        precise = max(self.item_bytes, FP32)
        num_moments = 2 if is_adam else int(bool(optimizer.sgd_momentum))
        return num_moments * precise + (FP32 if self.item_bytes < FP32 else 0)

    @property
    def _selected_modules(self) -> frozenset[str]:
        transformer = self.config.transformer
        is_selective = transformer.recompute_granularity == "selective"
        return frozenset(transformer.recompute_modules or () if is_selective else ())

    def _norm_bytes(self) -> int:
        """A row of a norm: its input, and its output, which the product after it keeps."""
        transformer = self.config.transformer
        item, width = self.item_bytes, transformer.hidden_size // self.sequence_tp
        if transformer.transformer_impl == "transformer_engine":
            return 2 * item * width
        if transformer.normalization != "RMSNorm":
            return 2 * item * width
        # ours computes in fp32 and keeps the normalised row before it is scaled too
        return (max(item, FP32) + 2 * item) * width

    def _attention_bytes(self, *, recomputed: bool) -> int:
        """A row of attention: queries, the whole pack's keys and values, output, log-sum-exp."""
        item, context = self.item_bytes, self.config.layout.context_parallel
        heads = self.config.transformer.num_attention_heads // self.tp
        outer = item * self.query_width  # what the output projection keeps
        if self.config.transformer.qk_layernorm:
            outer += self._query_norm_bytes()
        if recomputed:
            return outer + item * (self.query_width + 2 * self.key_width)
        kept = 2 * item * self.query_width + 2 * item * self.key_width * context + FP32 * heads
        return outer + kept

    def _query_norm_bytes(self) -> int:
        """A row of the norms of queries and keys."""
        transformer, item = self.config.transformer, self.item_bytes
        normed = self.query_width + self.key_width
        is_ours = transformer.transformer_impl != "transformer_engine"
        is_ours &= transformer.normalization == "RMSNorm"
        if is_ours and item < FP32:
            return (FP32 + item) * normed
        # keys are a view, which holds the whole product; queries are copied out of it
        inputs = self.query_width + (normed + self.key_width)
        return item * (inputs + (normed if is_ours else 0))

    def _mlp_bytes(self, *, recomputed: bool) -> int:
        """A row between the MLP's products: what the first gave and the second takes.

        A gate without fusion keeps both of its factors as well.
        """
        if recomputed:
            return 0
        transformer, width = self.config.transformer, self.item_bytes * self.mlp_width
        if not transformer.gated_linear_unit:
            return 2 * width
        return (3 if transformer.bias_activation_fusion else 5) * width

    def _kept(self, stage: int) -> Part:
        transformer = self.config.transformer
        layers, flying = self.num_layers(stage), self.in_flight(stage)
        row = self.item_bytes * transformer.hidden_size // self.sequence_tp
        whole, at_edge = self.layer_activations(), self.rows * row
        name = "no recomputation"
        of_layers = layers * whole
        if transformer.recompute_granularity == "full":
            unit = transformer.recompute_num_layers
            name = f"{transformer.recompute_method} recomputation"
            if transformer.recompute_method == "uniform":
                of_layers = -(-layers // unit) * at_edge
            else:
                num = min(unit * self.config.layout.virtual_pipeline, layers)
                of_layers = num * at_edge + (layers - num) * whole
        elif self._selected_modules:
            name = f"{', '.join(sorted(self._selected_modules))} recomputed"
        formula = f"{layers} layers, {name}, {flying:g} micro-batches of {self.rows:,} rows"
        ends = self.rows * self._norm_bytes() if self._is_last(stage) else 0
        return Part("activations", int(of_layers * flying) + ends, formula)

    def _is_last(self, stage: int) -> bool:
        return stage == self.config.layout.pipeline_parallel - 1

    def _layer_work(self) -> Part:
        """Gradients of a layer's widest tensors, and what is computed again for it."""
        transformer = self.config.transformer
        wide = (3 if transformer.gated_linear_unit else 2) * self.mlp_width
        gradients = self.rows * self.item_bytes * (wide + 2 * transformer.hidden_size)
        again = 0
        if transformer.recompute_granularity == "full":
            is_uniform = transformer.recompute_method == "uniform"
            again = self.layer_activations() * (
                transformer.recompute_num_layers if is_uniform else 1
            )
        return Part(
            "a layer's backward", gradients + again, "its gradients, and what it recomputes"
        )

    def _update_work(self, stage: int) -> Part:
        """Adam's temporaries of the largest parameter; activations are gone by then."""
        transformer = self.config.transformer
        fc1 = self.mlp_width * (2 if transformer.gated_linear_unit else 1)
        widest = max(fc1, self.config.layout.padded_vocab_size // self.tp if stage == 0 else 0)
        temporaries = 2 * max(self.item_bytes, FP32) * widest * transformer.hidden_size
        left = max(temporaries - self._kept(stage).num_bytes, 0)
        return Part("the update, beyond activations", left, "2 copies of the largest parameter")

    def _head_work(self) -> Part:
        config, rows = self.config, self.trained_rows
        hidden = config.transformer.hidden_size
        if config.loss.loss_type == "value_loss":
            return Part("head", 3 * self.rows * FP32, "values and their loss")
        plan, columns, of_blocks = self._head_plan()
        precise = max(self.item_bytes, FP32)
        is_fused = self._forms_gradients()
        num_chunks = 1 if is_fused else 1 + plan.num_kept
        logits = min(plan.chunk_rows * num_chunks, rows) * columns * precise
        features = rows * hidden * (self.item_bytes + precise)
        gradient = self.rows * hidden * self.item_bytes
        of_weight = columns * hidden * precise if is_fused else 0
        total = logits + min(of_blocks, 3 * logits) + features + gradient + of_weight
        formula = f"{min(plan.chunk_rows, rows):,} rows of logits, {rows:,} rows' gradients"
        return Part("head", total, formula + (", the weight's gradient" if is_fused else ""))

    def _forms_gradients(self) -> bool:
        config = self.config
        head = RLHead(config.head, config.loss, vocab_size=config.model.vocab_size)
        return head.objective.is_row_separable and not config.head.recompute_loss_function

    def _head_plan(self) -> tuple[RowPlan, int, int]:
        """The head's own plan for a weight that is not there; columns; bytes of its temporaries."""
        config, head = self.config, self.config.head
        columns = config.layout.padded_vocab_size // self.tp
        dtype = config.transformer.params_dtype
        options = SoftmaxOptions(vocab_size=min(config.model.vocab_size, columns))
        softmax = VocabSoftmax(torch.zeros(0, dtype=torch.int64), columns, dtype, options)
        memory = head.log_probs_memory_mb
        memory_bytes = None if memory is None else memory * 2**20
        with FakeTensorMode():  # takes no memory, on a device that need not be there
            shape = (columns, config.transformer.hidden_size)
            weight = torch.empty(shape, dtype=dtype, device=config.device_type)
            plan = plan_rows(softmax, weight, head.log_probs_chunk_size, memory_bytes)
            block = max(cache_bytes(weight), columns * softmax.dtype.itemsize)
        return plan, columns, softmax.temporaries * block
