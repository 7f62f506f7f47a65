"""What the tests of loading and exporting run on every rank: models, topologies, the oracle."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch import distributed as dist
from transformers import AutoConfig

from megatron.rl import cpu_backend
from megatron.rl.hf import architecture_from_hf, load_hf_weights

PADDED_VOCAB = 64


@dataclass(frozen=True)
class Topology:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}" + (f"-vpp{self.vpp}" if self.vpp else "")


@dataclass(frozen=True)
class Place:
    groups: ProcessGroupCollection
    topology: Topology

    @property
    def is_first_replica(self) -> bool:
        return self.groups.dp.rank() == 0


def enter(topology: Topology) -> Place:
    """Divide the ranks of the world; once a call, since the world ends a call's groups after it."""
    cpu_backend.install()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return Place(ProcessGroupCollection.use_mpu_process_groups(), topology)


class FusedNormLinear(ColumnParallelLinear):
    """Core's linear layer with the norm inside, parameters named as transformer-engine does."""

    def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        eps = self.config.layernorm_epsilon
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, eps))


def layer_spec(config: TransformerConfig, *, fused: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    if fused:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        layer.self_attention.submodules.linear_qkv = FusedNormLinear
        mlp = layer.mlp  # a spec, or from 0.19 on a partial
        submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        submodules.linear_fc1 = FusedNormLinear
    return spec


def build(
    place: Place,
    architecture: dict[str, Any],
    *,
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
    padded_vocab: int = PADDED_VOCAB,
) -> list[GPTModel]:
    """This rank's chunks of core's own model, every parameter NaN."""
    topology = place.topology
    core = {field.name for field in fields(TransformerConfig)}
    config = TransformerConfig(
        **{field: value for field, value in architecture.items() if field in core},
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp,
    )
    stage, last_chunk = place.groups.pp.rank(), (topology.vpp or 1) - 1
    chunks = []
    for chunk in range(last_chunk + 1):
        model = GPTModel(
            config,
            layer_spec(config, fused=fused),
            vocab_size=padded_vocab,
            max_sequence_length=architecture["max_position_embeddings"],
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == topology.pp - 1 and chunk == last_chunk,
            share_embeddings_and_output_weights=not architecture[
                "untie_embeddings_and_output_weights"
            ],
            position_embedding_type="rope",
            rotary_base=architecture["rotary_base"],
            rope_scaling=architecture["use_rope_scaling"],
            rope_scaling_factor=architecture.get("rope_scaling_factor", 8.0),
            pg_collection=place.groups,
            vp_stage=chunk if topology.vpp else None,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        chunks.append(model.eval())
    return chunks


def build_and_load(
    place: Place, directory: Path, *, fused: bool = False
) -> tuple[list[GPTModel], dict[str, Any]]:
    architecture = architecture_from_hf(directory)
    chunks = build(place, architecture, fused=fused)
    load_hf_weights(chunks, directory, tp_group=place.groups.tp)
    return chunks, architecture


def whole_logits(place: Place, model: GPTModel, ids: Tensor) -> Tensor:
    """[b, s, PADDED_VOCAB] of a model in one stage."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        shard = model(ids, positions, None).contiguous()
    shards = [torch.empty_like(shard) for _ in range(place.topology.tp)]
    dist.all_gather(shards, shard, group=place.groups.tp)
    return torch.cat(shards, dim=-1)


def oracle(place: Place, directory: Path) -> list[GPTModel]:
    """The same chunks, loaded by mbridge.

    mbridge knows transformer-engine's layer names only, no tied Llama over several stages, and
    pads a vocabulary that its own model provider has padded.
    """
    architecture = architecture_from_hf(directory)
    chunks = build(place, architecture)
    bridge = AutoBridge.from_config(
        AutoConfig.from_pretrained(directory),
        dtype=torch.float32,
        make_vocab_size_divisible_by=PADDED_VOCAB,
    )
    bridge.vocab_size, bridge.padded_vocab_size = architecture["vocab_size"], PADDED_VOCAB
    untied = architecture["untie_embeddings_and_output_weights"]
    output = "lm_head.weight" if untied else "model.embed_tokens.weight"
    bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": output}
    theirs = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    to_hf = bridge._weight_name_mapping_mcore_to_hf

    def to_hf_from_local(name: str) -> list[str]:
        for local, fused in theirs.items():
            name = name.replace(local, fused)
        return to_hf(name)

    with (
        patch.object(bridge, "_weight_name_mapping_mcore_to_hf", to_hf_from_local),
        torch.no_grad(),
    ):
        bridge.load_weights(chunks, str(directory))
    return chunks
