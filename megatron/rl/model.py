"""megatron-core's GPTModel with the RL head in place of the output layer and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.rl.attention import PackedAttention
from megatron.rl.config import RunConfig
from megatron.rl.core_versions import HookedGPTModel
from megatron.rl.initialize import Grid
from megatron.rl.norm import SequenceParallelNorm
from megatron.rl.rotary import Llama3Scaling, Rotary
from slime_loss import RLHead, ValueHead


class RLModel(HookedGPTModel):
    """The model of a run; its forward is called with an output processor."""


class Critic(RLModel):
    """An RLModel whose output layer is a value head [1, H].

    The head starts at zero: every value is 0 until it has learned.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        if self.post_process:
            self.output_layer = nn.Linear(config.hidden_size, 1, bias=False)
            self.output_layer.to(config.params_dtype)
            nn.init.zeros_(self.output_layer.weight)
            # each tensor-parallel rank has the values of its own rows: core sums the gradients
            self.output_layer.weight.sequence_parallel = config.sequence_parallel


def rotary_of(config: RunConfig) -> Rotary:
    """The rotary embedding that the flags describe."""
    model = config.model
    scaling = None
    if model.use_rope_scaling:
        scaling = Llama3Scaling(
            model.rope_scaling_factor,
            model.rope_low_freq_factor,
            model.rope_high_freq_factor,
            model.rope_original_max_position_embeddings,
        )
    head_dim = config.transformer.kv_channels
    return Rotary(head_dim, model.rotary_base, model.rotary_percent, scaling)


def build_head(config: RunConfig, groups: ProcessGroupCollection) -> RLHead | ValueHead:
    """The loss as a model head; it has no parameter of its own."""
    if config.is_critic:
        return ValueHead(
            config.value_loss,
            tp_group=groups.tp if groups.tp.size() > 1 else None,
            sequence_parallel=config.transformer.sequence_parallel,
        )
    return RLHead(
        config.head,
        config.loss,
        vocab_size=config.model.vocab_size,
        tp_group=groups.tp if groups.tp.size() > 1 else None,
        cp_group=groups.cp if groups.cp.size() > 1 else None,
        sequence_parallel=config.transformer.sequence_parallel,
        accumulate_into_main_grad=True,
    )


def build_model(config: RunConfig, grid: Grid) -> list[MegatronModule]:
    """This rank's model chunks (one, or one per virtual stage), on its device, not yet wrapped."""
    chunks = config.transformer.virtual_pipeline_model_parallel_size
    stages = [None] if chunks is None else range(chunks)
    return [_build_chunk(config, grid, stage).to(grid.device) for stage in stages]


def wrap_model(config: RunConfig, chunks: list[MegatronModule]) -> list[MegatronModule]:
    """Wrap chunks for training: 16-bit parameters where asked for, gradient buffers, overlap."""
    transformer = config.transformer
    if transformer.bf16:
        chunks = [Float16Module(transformer, chunk) for chunk in chunks]
    return [
        DistributedDataParallel(
            config=transformer,
            ddp_config=config.ddp,
            module=chunk,
            # later chunks finish their backward first: their buckets would wait for nothing
            disable_bucketing=position > 0,
        )
        for position, chunk in enumerate(chunks)
    ]


def _build_chunk(config: RunConfig, grid: Grid, vp_stage: int | None) -> RLModel:
    stage, last = grid.groups.pp.rank(), grid.pp_size - 1
    chunks = config.transformer.virtual_pipeline_model_parallel_size or 1
    return (Critic if config.is_critic else RLModel)(
        config.transformer,
        transformer_layer_spec=block_spec(config, grid, vp_stage),
        vocab_size=config.layout.padded_vocab_size,
        max_sequence_length=config.model.max_position_embeddings or 0,
        pre_process=stage == 0 and vp_stage in (None, 0),
        post_process=stage == last and vp_stage in (None, chunks - 1),
        share_embeddings_and_output_weights=not (
            config.is_critic or config.model.untie_embeddings_and_output_weights
        ),
        position_embedding_type="none",
        pg_collection=grid.groups,
        vp_stage=vp_stage,
    )


def block_spec(config: RunConfig, grid: Grid, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Core's layer specs with our attention, and our norm where transformer-engine is absent."""
    transformer = config.transformer
    use_te = transformer.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        vp_stage=vp_stage,
        pp_rank=grid.groups.pp.rank(),
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = ModuleSpec(module=PackedAttention)
        if not use_te:
            layer.submodules.input_layernorm = SequenceParallelNorm
            layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
            for name in ("q_layernorm", "k_layernorm"):
                if getattr(attention, name) is not IdentityOp:
                    setattr(attention, name, SequenceParallelNorm)
    if not use_te:
        block.layer_norm = SequenceParallelNorm
    return block


def unwrap(chunk: torch.nn.Module) -> RLModel:
    """The RLModel inside its wrappers."""
    while not isinstance(chunk, RLModel):
        chunk = chunk.module
    return chunk


def on_hidden(function: Callable[[Tensor, Tensor, Any], Any]) -> Callable[..., Any]:
    """An output processor that calls function(hidden states [rows, H], weight [V/tp, H], context).

    Under sequence parallelism the rows are this rank's.
    """

    def process(
        *,
        hidden_states: Tensor,
        output_layer: nn.Module,
        output_weight: Tensor | None,
        context: Any,
        **_others: Any,  # core's hook hands out all that its output layer and loss could use
    ) -> Any:
        weight = output_layer.weight if output_weight is None else output_weight
        return function(hidden_states.flatten(0, 1), weight, context)

    return process
