"""A tiny GPTModel of megatron-core, with core's own loss, trained in any topology on the CPU.

Weights are made from their names, so every topology begins with the same model.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron.rl.norm import SequenceParallelNorm

SEQUENCE, VOCABULARY, NUM_SAMPLES = 16, 64, 4


@dataclass(frozen=True)
class Topology:
    """How a model is spread over ranks, and what else differs from the plainest run."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    bf16: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    model: dict[str, Any] = field(default_factory=dict)

    def with_model(self, **fields: Any) -> "Topology":
        return replace(self, model={**self.model, **fields})

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def config(self) -> TransformerConfig:
        fields = {
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp,
            "overlap_p2p_comm": self.vp is not None,
            "batch_p2p_comm": self.vp is None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": 1,
            "bf16": self.bf16,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
        }
        return TransformerConfig(**{**fields, **self.model})


@dataclass
class Trainee:
    """A model with its optimizer, and what core's schedules read."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer

    def step(self) -> tuple[float, float]:
        """One optimizer step on all samples; their mean loss and the gradient norm."""
        data_parallel = parallel_state.get_data_parallel_world_size()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_samples() for _ in self.chunks],
            model=self.chunks,
            num_microbatches=NUM_SAMPLES // data_parallel,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, grad_norm, _ = self.optimizer.step()
        assert updated
        loss = torch.stack(losses).sum() if losses else torch.zeros(())
        dist.all_reduce(loss)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        return loss.item() / (NUM_SAMPLES * tp), float(grad_norm)


def build(topology: Topology) -> Trainee:
    """Make the groups, the seeds, the model and the optimizer."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = topology.config()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=topology.distributed_optimizer,
        overlap_grad_reduce=topology.overlap,
        overlap_param_gather=topology.overlap,
        check_for_nan_in_grad=True,
    )
    stages = [None] if topology.vp is None else range(topology.vp)
    chunks = [
        DistributedDataParallel(config, ddp, _chunk(topology, config, stage)) for stage in stages
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.01,
            bf16=topology.bf16,
            params_dtype=topology.dtype,
            use_distributed_optimizer=topology.distributed_optimizer,
            overlap_param_gather=topology.overlap,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if topology.overlap:
        config.no_sync_func = chunks[0].no_sync
        config.param_sync_func = chunks[0].start_param_sync
    return Trainee(config, chunks, optimizer)


def train(topology: Topology, num_steps: int = 3) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    trainee = build(topology)
    return [trainee.step() for _ in range(num_steps)]


def _chunk(topology: Topology, config: TransformerConfig, stage: int | None) -> torch.nn.Module:
    plain = stage is None
    model = GPTModel(
        config,
        _block_spec(config, stage),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=plain, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=plain, vp_stage=stage),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=stage,
    )
    _fill_by_name(model)
    return Float16Module(config, model) if topology.bf16 else model


def _block_spec(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = SequenceParallelNorm
        layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelNorm
    block.layer_norm = SequenceParallelNorm
    return block


@torch.no_grad()
def _fill_by_name(model: GPTModel) -> None:
    shards = model.sharded_state_dict()
    apply_factories(shards)
    for shard in nested_values(shards):
        if not isinstance(shard, ShardedTensor):
            continue
        seed = int.from_bytes(hashlib.sha256(shard.key.encode()).digest()[:4], "big")
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(shard.global_shape, generator=generator) * 0.2
        if "norm" in shard.key:
            whole += 1
        shard.data.copy_(whole[shard.global_slice()].reshape(shard.data.shape))


def _samples() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (NUM_SAMPLES, 1, SEQUENCE + 1), generator=generator)
    rank = parallel_state.get_data_parallel_rank()
    return iter(rows[rank :: parallel_state.get_data_parallel_world_size()])


def _forward_step(samples: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Any]:
    tokens = next(samples)
    positions = torch.arange(SEQUENCE)[None]
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return losses, _mean


def _mean(losses: Tensor) -> tuple[Tensor, Tensor]:
    mean = losses.float().mean()
    return mean, mean.detach().clone()  # core divides the first in place
