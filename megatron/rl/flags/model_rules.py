"""Rules of the model, its parallel layout, its experts and the device."""

from __future__ import annotations

from typing import Any

from megatron.rl.flags.rule import Rule

MODEL = (
    Rule(
        "squared_relu",
        lambda s: s.squared_relu and s.swiglu,
        "excludes --swiglu",
        "leave one of the two out",
    ),
    Rule(
        "group_query_attention",
        lambda s: s.group_query_attention and s.num_query_groups is None,
        "needs --num-query-groups",
        "add --num-query-groups N",
    ),
    Rule(
        "num_query_groups",
        lambda s: s.num_query_groups is not None and s.num_attention_heads % s.num_query_groups,
        "must divide --num-attention-heads {num_attention_heads}",
        "use a divisor of {num_attention_heads}",
    ),
    Rule(
        "hidden_size",
        lambda s: s.kv_channels is None and s.hidden_size % s.num_attention_heads,
        "must be a multiple of --num-attention-heads {num_attention_heads}",
        "change one of the two, or give the channels of a head by --kv-channels",
    ),
    Rule(
        "rotary_percent",
        lambda s: s.rotated < 2 or s.rotated % 2,
        "must rotate an even number of a head's channels",
        "use 1.0",
    ),
    Rule(
        "rope_high_freq_factor",
        lambda s: s.rope_high_freq_factor <= s.rope_low_freq_factor,
        "must be above --rope-low-freq-factor {rope_low_freq_factor}",
        "use 4.0, and --rope-low-freq-factor 1.0",
    ),
    Rule(
        "attention_dropout",
        lambda s: s.attention_dropout > 0,
        "must be 0: attention over packed samples has no dropout",
        "leave --attention-dropout out",
    ),
    Rule(
        "attention_softmax_in_fp32",
        lambda s: not s.attention_softmax_in_fp32,
        "must stay on: attention computes its softmax in fp32",
        "leave --no-attention-softmax-in-fp32 out",
    ),
    Rule(
        "attention_backend",
        lambda s: s.attention_backend.name == "fused",
        "must be flash, unfused, local or auto: transformer-engine's fused attention is not used",
        "use --attention-backend auto",
    ),
    Rule(
        "recompute_granularity",
        lambda s: (
            s.recompute_granularity == "full"
            and (s.recompute_method is None or s.recompute_num_layers is None)
        ),
        "full needs --recompute-method and --recompute-num-layers",
        "add --recompute-method uniform --recompute-num-layers 1",
    ),
    Rule(
        "recompute_num_layers",
        lambda s: (
            s.recompute_num_layers is not None
            and s.num_layers is not None
            and s.recompute_num_layers * s.pp * (s.virtual_pipeline_model_parallel_size or 1)
            > s.num_layers
        ),
        "must be at most the layers of one pipeline stage",
        "lower it; 1 recomputes each layer by itself",
    ),
    Rule(
        "recompute_num_layers",
        lambda s: s.recompute_num_layers is not None and s.recompute_granularity != "full",
        "needs --recompute-granularity full",
        "add --recompute-granularity full, or leave --recompute-num-layers out",
    ),
)

LAYOUT = (
    Rule(
        "tensor_model_parallel_size",
        lambda s: s.world_size % (s.tp * s.pp * s.cp),
        "times --pipeline-model-parallel-size {pipeline_model_parallel_size} times "
        "--context-parallel-size {context_parallel_size} must divide the number of ranks, "
        "{world_size}",
        "start another number of ranks (torchrun --nproc-per-node), or lower one of the three",
    ),
    Rule(
        "num_attention_heads",
        lambda s: s.num_attention_heads % s.tp,
        "must be a multiple of --tensor-model-parallel-size {tensor_model_parallel_size}",
        "lower --tensor-model-parallel-size to a divisor of {num_attention_heads}",
    ),
    Rule(
        "num_query_groups",
        lambda s: s.num_query_groups is not None and s.num_query_groups % s.tp,
        "must be a multiple of --tensor-model-parallel-size {tensor_model_parallel_size}",
        "lower --tensor-model-parallel-size to a divisor of {num_query_groups}",
    ),
    Rule(
        "perform_initialization",
        lambda s: not s.perform_initialization and s.tp > 1,
        "must not be given with --tensor-model-parallel-size > 1: as it initializes a weight, "
        "megatron-core marks it as divided, and the gradient norm counts only one rank of others",
        "leave --no-initialization out",
    ),
    Rule(
        "ffn_hidden_size",
        lambda s: (s.ffn_hidden_size or 4 * s.hidden_size) % s.tp,
        "must be a multiple of --tensor-model-parallel-size {tensor_model_parallel_size}",
        "lower --tensor-model-parallel-size, or change --ffn-hidden-size",
    ),
    Rule(
        "num_layers",
        lambda s: s.even_stages and s.num_layers % (s.pp * s.vpp),
        "must be a multiple of --pipeline-model-parallel-size {pipeline_model_parallel_size} times "
        "the model chunks of a stage, {vpp}",
        "lower the pipeline sizes, or set --decoder-first-pipeline-num-layers or "
        "--decoder-last-pipeline-num-layers",
    ),
    Rule(
        "virtual_pipeline_model_parallel_size",
        lambda s: s.vpp > 1 and s.pp == 1,
        "needs --pipeline-model-parallel-size > 1",
        "leave it out, or use pipeline parallelism",
    ),
    Rule(
        "pipeline_model_parallel_layout",
        lambda s: s.layout_stages not in (None, s.pp * s.vpp),
        "has {layout_stages} stages, and must have --pipeline-model-parallel-size "
        "{pipeline_model_parallel_size} times the model chunks of a stage, {vpp}",
        "divide the layers otherwise, or set --num-virtual-stages-per-pipeline-rank",
    ),
    Rule(
        "microbatch_group_size_per_vp_stage",
        lambda s: (
            s.microbatch_group_size_per_vp_stage is not None
            and s.microbatch_group_size_per_vp_stage < s.pp
        ),
        "must not be less than --pipeline-model-parallel-size {pipeline_model_parallel_size}",
        "leave it out",
    ),
    Rule(
        "allgather_cp",
        lambda s: s.allgather_cp and s.qkv_format != "thd",
        "needs --qkv-format thd",
        "use --qkv-format thd, or leave --allgather-cp out",
    ),
    Rule(
        "context_parallel_size",
        lambda s: s.cp > 1 and s.qkv_format == "bshd",
        "must be 1 with --qkv-format bshd",
        "use --qkv-format thd",
    ),
    Rule(
        "use_distributed_optimizer",
        lambda s: s.use_distributed_optimizer and s.optimizer != "adam",
        "needs --optimizer adam: megatron-core divides no other one over ranks",
        "use --optimizer adam, or leave --use-distributed-optimizer out",
    ),
    Rule(
        "use_precision_aware_optimizer",
        lambda s: s.use_precision_aware_optimizer and not s.use_distributed_optimizer,
        "needs --use-distributed-optimizer",
        "add --use-distributed-optimizer",
    ),
    Rule(
        "reuse_grad_buf_for_mxfp8_param_ag",
        lambda s: s.reuse_grad_buf_for_mxfp8_param_ag and not s.fp8_param_gather,
        "needs --fp8-param-gather",
        "add --fp8-param-gather",
    ),
)

PACK_WISE = frozenset({"sinkhorn", "quantile_balancing"})
"""Load balancing that gives a token other experts where other tokens share its micro-batch."""

EXPERTS = (
    Rule(
        "moe_router_load_balancing_type",
        lambda s: not PACK_WISE.isdisjoint(_as_list(s.moe_router_load_balancing_type)),
        "must not be sinkhorn or quantile_balancing: the loss would depend on how samples are "
        "packed",
        "use none or aux_loss",
    ),
    Rule(
        "expert_model_parallel_size",
        lambda s: s.ep > 1 and s.num_moe_experts is None,
        "needs --num-experts",
        "leave it out, or give --num-experts",
    ),
    Rule(
        "num_moe_experts",
        lambda s: s.num_moe_experts is not None and s.num_moe_experts % s.ep,
        "must be a multiple of --expert-model-parallel-size {expert_model_parallel_size}",
        "lower --expert-model-parallel-size to a divisor of {num_moe_experts}",
    ),
    Rule(
        "expert_model_parallel_size",
        lambda s: s.num_moe_experts is not None and s.world_size % (s.etp * s.ep * s.pp),
        "times the experts' tensor parallel size times --pipeline-model-parallel-size "
        "{pipeline_model_parallel_size} must divide the number of ranks, {world_size}",
        "lower it, or set --expert-tensor-parallel-size 1",
    ),
    Rule(
        "moe_router_topk",
        lambda s: s.num_moe_experts is not None and s.moe_router_topk > s.num_moe_experts,
        "must not be more than --num-experts {num_moe_experts}",
        "lower it",
    ),
    Rule(
        "sequence_parallel",
        lambda s: s.num_moe_experts is not None and s.tp > 1 and not s.sequence_parallel,
        "must be on with --num-experts and --tensor-model-parallel-size > 1",
        "add --sequence-parallel",
    ),
    Rule(
        "moe_token_dispatcher_type",
        lambda s: s.num_moe_experts is not None and s.moe_token_dispatcher_type == "allgather",
        "must be alltoall or flex: ranks hold different numbers of tokens",
        "use --moe-token-dispatcher-type alltoall",
    ),
    Rule(
        "moe_token_dispatcher_type",
        lambda s: (
            s.num_moe_experts is not None
            and s.moe_token_dispatcher_type == "flex"
            and s.ep * s.etp == 1
        ),
        "flex needs experts on several ranks: --expert-model-parallel-size > 1",
        "use --moe-token-dispatcher-type alltoall",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s[name] is not None and any(_as_list(s[name])),
            "must be 0: the loss is a plain sum, in which core's router losses have no scale",
            f"leave --{name.replace('_', '-')} out",
        )
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
    ),
)

TRANSFORMER_ENGINE = (
    "fp8",
    "fp4",
    "use_precision_aware_optimizer",
    "cpu_offloading",
    "moe_latent_size",
    "moe_permute_fusion",
    "moe_router_fusion",
)
"""What only transformer-engine has."""
BELOW_FP64 = (
    "bf16",
    "fp8",
    "fp4",
    "use_precision_aware_optimizer",
    "cpu_offloading",
    "reduce_scatter_with_fp32_accumulation",
)
"""What names a precision of its own, in megatron-core's code or on the wire."""

DEVICE = (
    *(
        Rule(
            name,
            lambda s, name=name: s.device_type == "cpu" and s[name],
            "needs a GPU",
            "leave it out, or run on a GPU",
        )
        for name in (*TRANSFORMER_ENGINE, "moe_grouped_gemm", "optimizer_cpu_offload", "nccl_ub")
    ),
    Rule(
        "moe_token_dispatcher_type",
        lambda s: s.device_type == "cpu" and s.moe_token_dispatcher_type == "flex",
        "flex needs a GPU",
        "use --moe-token-dispatcher-type alltoall",
    ),
    Rule(
        "add_bias_linear",
        lambda s: (
            s.num_moe_experts is not None
            and s.add_bias_linear
            and not (s.device_type == "cuda" and s.has_transformer_engine)
        ),
        "must be given with --num-experts where transformer-engine is absent: megatron-core adds "
        "an expert's bias in a way that has no gradient",
        "add --disable-bias-linear",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s.fp64 and s[name],
            "excludes --fp64",
            "leave one of the two out",
        )
        for name in BELOW_FP64
    ),
    Rule(
        "attention_backend",
        lambda s: s.fp64 and s.attention_backend.name == "flash",
        "flash excludes --fp64, which flash-attn does not know",
        "use --attention-backend auto",
    ),
    Rule(
        "attention_backend",
        lambda s: (
            s.attention_backend.name == "flash"
            and not (s.device_type == "cuda" and s.has_flash_attn)
        ),
        "flash needs a GPU and the package flash-attn",
        "use --attention-backend auto",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: (
                s.device_type == "cuda" and s[name] and not s.has_transformer_engine
            ),
            "needs the package transformer-engine",
            "install it (pip install megatron-slime[gpu]), or leave the flag out",
        )
        for name in TRANSFORMER_ENGINE
    ),
    Rule(
        "expert_tensor_parallel_size",
        lambda s: s.device_type == "cpu" and s.num_moe_experts is not None and s.etp > 1,
        "must be 1 on a CPU, where experts hold different numbers of tokens",
        "add --expert-tensor-parallel-size 1",
    ),
)

MODEL_RULES = (*MODEL, *LAYOUT, *EXPERTS, *DEVICE)


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]
