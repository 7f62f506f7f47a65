"""What the flag generator cannot read off the dataclasses.

Which fields of megatron-core are no flags and why, Megatron-LM's names and defaults where core's
differ, and the groups of `--help`.
Patterns match "section.field", a section being a field of `RunConfig`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from megatron.rl.core_versions import NOT_OFFERED_BY_THIS_CORE

NOT_OFFERED = {
    ("*.fp16", "optimizer.*loss_scale*", "optimizer.hysteresis"): (
        "fp16 needs a dynamic loss scale, which overflows on purpose; use --bf16"
    ),
    ("*.overlap_param_gather", "*.align_param_gather"): (
        "the head reads the output weight outside of the module that megatron-core waits in"
    ),
    (
        "transformer.moe_expert_capacity_factor",
        "transformer.moe_pad_expert_input_to_capacity",
        "transformer.moe_token_drop_policy",
        "transformer.moe_input_jitter_eps",
        "transformer.moe_router_force_load_balancing",
    ): "the loss would depend on how samples are packed",
    ("transformer.calculate_per_token_loss",): "the loss reaches megatron-core as a sum already",
    (
        "*.params_dtype",
        "transformer.pipeline_dtype",
        "transformer.autocast_dtype",
        "transformer.enable_autocast",
    ): "it follows from --bf16 and --fp64",
    ("transformer.variable_seq_lengths", "transformer.*p2p*"): (
        "it follows from the pipeline parallel sizes"
    ),
    ("transformer.pipeline_model_parallel_comm_backend",): "it follows from --device",
    ("transformer.transformer_impl",): "transformer-engine is used where it is installed",
    ("transformer.gated_linear_unit",): "it is set by --swiglu",
    ("transformer.fp8_param",): "it is set by --fp8-param-gather",
    ("transformer.activation_func_clamp_value", "transformer.glu_linear_offset"): (
        "it belongs to an activation that is not offered"
    ),
    (
        "transformer.softmax_type",
        "transformer.window_*",
        "transformer.no_rope_freq",
        "transformer.rotary_interleaved",
        "transformer.qk_clip*",
        "transformer.log_max_attention_logit",
        "transformer.apply_query_key_layer_scaling",
        "transformer.masked_softmax_fusion",
        "transformer.apply_rope_fusion",
        "transformer.fused_single_qkv_rope",
        "transformer.cp_comm_type",
        "transformer.fp8_dot_product_attention",
        "transformer.fp8_multi_head_attention",
        "transformer.multi_latent_attention",
        "transformer.experimental_attention_variant*",
        "transformer.dsa_*",
        "transformer.linear_*",
        "transformer.mrope_section",
        "transformer.hierarchical_context_parallel_sizes",
        "transformer.hybrid_context_parallel",
        "transformer.max_seqlen_per_dp_cp_rank",
        "transformer.batch_invariant_mode",
        "transformer.*kitchen*",
    ): "attention over packed samples does not have it",
    ("transformer.persist_layer_norm", "transformer.memory_efficient_layer_norm"): (
        "norms are transformer-engine's or our own"
    ),
    (
        "transformer.mtp_*",
        "transformer.cross_entropy_*",
        "transformer.defer_embedding_wgrad_compute",
        "transformer.wgrad_deferral_limit",
    ): "the RL head replaces the output layer and the loss",
    ("transformer.tp_comm_*", "transformer.*cuda_graph*", "transformer.symmetric_ar_type"): (
        "it needs one sequence length, and packed micro-batches differ in theirs"
    ),
    (
        "transformer.num_microbatches_with_partial_activation_checkpoints",
        "transformer.overlap_moe_expert_parallel_comm",
        "transformer.ep_overlap_early_attn_memory_release",
        "*.delay_wgrad_compute",
        "transformer.fine_grained_activation_offloading",
        "transformer.offload_modules",
        "transformer.min_offloaded_tensor_size",
        "optimizer.overlap_param_gather_with_optimizer_step",
    ): "the training step does not do it",
    (
        "transformer.moe_per_layer_logging",
        "transformer.moe_enable_routing_replay",
        "optimizer.log_num_zeros_in_grad",
    ): "nothing here reads what it records",
    (
        "transformer.moe_router_topk_limited_devices",
        "transformer.moe_router_padding_for_fp8",
        "transformer.moe_enable_deepep",
        "transformer.moe_layer_recompute",
        "transformer.moe_token_dropping",
        "transformer.fp8_interval",
        "transformer.apply_residual_connection_post_layernorm",
        "optimizer.main_grads_dtype",
        "ddp.use_custom_fsdp",
    ): "megatron-core ignores it or has a newer flag for it",
    (
        "transformer.*inference*",
        "transformer.flash_decode",
        "transformer.mlp_chunks_for_prefill",
        "transformer.use_te_rng_tracker",
        "transformer.test_mode",
    ): "it is not for training",
    (
        "transformer.*mamba*",
        "transformer.is_hybrid_model",
        "transformer.het*",
        "transformer.init_model_with_meta_device",
    ): "only GPT models are built",
    (
        "ddp.*fsdp*",
        "ddp.*sharding_strategy",
        "ddp.suggested_communication_unit_size",
        "ddp.keep_fp8_transpose_cache",
        "ddp.gradient_reduce_div_fusion",
    ): "FSDP is not used",
    ("ddp.num_distributed_optimizer_instances",): "the distributed optimizer spans all replicas",
    ("ddp.check_for_nan_in_grad", "ddp.check_for_large_grads"): (
        "every step checks its gradient and is skipped when it is not finite"
    ),
    ("ddp.average_in_collective",): "gradients are summed, never averaged",
    ("optimizer.muon_*",): "the optimizer is adam or sgd",
    ("*.barrier_with_L1_time", "*.timers"): "megatron-core's timers are not used",
    ("*.config_logger_dir",): "the resolved configuration is saved with the run",
    **NOT_OFFERED_BY_THIS_CORE,
}
"""Fields of megatron-core that are no flags, and why."""

MEGATRON_NAMES = {
    "num_moe_experts": ("--num-experts",),
    "virtual_pipeline_model_parallel_size": ("--num-virtual-stages-per-pipeline-rank",),
    "num_layers_in_first_pipeline_stage": ("--decoder-first-pipeline-num-layers",),
    "num_layers_in_last_pipeline_stage": ("--decoder-last-pipeline-num-layers",),
    "grad_reduce_in_fp32": ("--accumulate-allreduce-grads-in-fp32",),
    "bucket_size": ("--ddp-bucket-size",),
    "pad_buckets_for_high_nccl_busbw": ("--ddp-pad-buckets-for-high-nccl-busbw",),
    "reduce_scatter_with_fp32_accumulation": ("--ddp-reduce-scatter-with-fp32-accumulation",),
    "bias_activation_fusion": ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
}
"""Megatron-LM's flags where core's field has another name and its metadata does not say so."""

DEFAULTS = {
    "hidden_dropout": 0.0,  # dropout would make log-probs of one policy differ from call to call
    "attention_dropout": 0.0,
    "min_lr": 0.0,
    "moe_token_dispatcher_type": "alltoall",  # all-gather needs equal lengths on all ranks
    "gradient_accumulation_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
}
"""Defaults that are not core's: Megatron-LM's, or what RL needs."""

CHOICES = {"optimizer": ("adam", "sgd")}
"""Values of core's fields whose annotation says only `str`."""

GROUPS = {
    "DataConfig": "Rollouts and batches",
    "EngineConfig": "Rollouts that the run makes",
    "AdvantageConfig": "Advantages",
    "PolicyLossConfig": "Loss",
    "ValueLossConfig": "Loss of a critic",
    "AggregationConfig": "Loss aggregation",
    "HeadConfig": "Log-probabilities",
    "ScheduleConfig": "Schedule",
    "OptimizerConfig": "Optimizer (megatron-core)",
    "ModelConfig": "Model",
    "TransformerConfig": "Transformer (megatron-core)",
    "ModelParallelConfig": "Parallelism and precision (megatron-core)",
    "DistributedDataParallelConfig": "Data parallelism (megatron-core)",
    "CheckpointConfig": "Checkpoints",
    "LoggingConfig": "Logging",
    "RuntimeConfig": "Process",
}
"""Titles of the groups of `--help`, in their order, by the class that declares the fields."""

CORE_GROUPS = frozenset(name for name, title in GROUPS.items() if "megatron-core" in title)

METAVARS = {
    "save": "DIR",
    "load": "DIR",
    "pretrained_checkpoint": "DIR",
    "hf_checkpoint": "DIR",
    "tensorboard_dir": "DIR",
    "rollout_data": "PATH",
    "rollout_watch": "DIR",
    "rollout_dir": "DIR",
    "prompt_data": "PATH",
    "prompt_task": "NAME",
    "prompt_task_parameters": "JSON",
    "tokenizer_type": "TYPE",
    "tokenizer_model": "PATH",
    "chat_template": "FILE",
    "rollout_url": "URL",
    "rollout_weights_dir": "DIR",
    "reward": "NAME",
    "config": "FILE",
    "reward_key": "KEY",
    "advantage_estimator": "NAME",
    "custom_loss_function_path": "MODULE:FUNCTION",
    "custom_advantage_function_path": "MODULE:FUNCTION",
    "custom_tis_function_path": "MODULE:FUNCTION",
}
"""What stands for a value in `--help` where its type says too little."""

_COMMON_NAMES = """
    lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad optimizer
    use_distributed_optimizer use_precision_aware_optimizer optimizer_cpu_offload
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    normalization layernorm_epsilon add_bias_linear add_qkv_bias qk_layernorm
    attention_backend attention_dropout hidden_dropout init_method_std
    recompute_granularity recompute_method recompute_num_layers recompute_modules fp8
    num_moe_experts moe_router_topk moe_ffn_hidden_size moe_grouped_gemm
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    sequence_parallel bf16 use_cpu_initialization deterministic_mode
    overlap_grad_reduce grad_reduce_in_fp32
"""
COMMON = frozenset(_COMMON_NAMES.split())
"""Fields of megatron-core that `--help` shows; `--help-all` shows the rest too."""


def why_not_offered(field: str) -> str | None:
    """Why "section.field" is no flag; None if it is one."""
    for patterns, reason in NOT_OFFERED.items():
        if any(fnmatchcase(field, pattern) for pattern in patterns):
            return reason
    return None
