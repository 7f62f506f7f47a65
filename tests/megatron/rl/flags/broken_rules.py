"""For every rule a command line that breaks it."""

MOE = "--num-experts 4 --moe-ffn-hidden-size 64 --disable-bias-linear"
FUNCTION = "tests.slime_loss.user_functions:anything"
CUSTOM_LOSS = f"--custom-loss-function-path {FUNCTION}"
ROLLOUT = "--rollout-batch-size 4 --n-samples-per-prompt 2"

WATCH = "--rollout-watch {tmp}/drop"
UNKNOWN_LENGTH = f"{WATCH} --save {{tmp}} --lr-decay-style cosine --lr-warmup-fraction 0.1"
ENGINE = "--rollout-engine native --prompt-task chain_sum --reward exact"

BROKEN = [
    ("--rollout-watch null", 1, "rollout_data", "or --rollout-watch or --rollout-engine must"),
    (f"{WATCH} --rollout-data a", 1, "rollout_watch", "excludes --rollout-data"),
    (f"{ENGINE} --rollout-data a", 1, "rollout_engine", "excludes --rollout-data"),
    (f"{ENGINE} {WATCH}", 1, "rollout_engine", "excludes --rollout-watch"),
    (WATCH, 1, "rollout_watch", "needs --save or --rollout-dir"),
    (ENGINE, 1, "rollout_engine", "needs --save or --rollout-dir"),
    (ENGINE, 1, "rollout_batch_size", "must be given with --rollout-engine"),
    (ENGINE, 1, "n_samples_per_prompt", "must be given with --rollout-engine"),
    (ENGINE, 1, "num_rollout", "or --train-iters must be given with --rollout-engine"),
    (f"{ENGINE} --pipeline-model-parallel-size 2", 2, "rollout_engine", "without pipeline"),
    (f"{ENGINE} --loss-type value_loss", 1, "rollout_engine", "needs a policy"),
    ("--rollout-dir {tmp}", 1, "rollout_dir", "needs --rollout-watch or --rollout-engine"),
    ("--max-staleness 2", 1, "max_staleness", "needs --rollout-watch or --rollout-engine"),
    (f"{WATCH} --num-epochs 2", 1, "num_epochs", "needs --rollout-data"),
    (UNKNOWN_LENGTH, 1, "lr_decay_style", "needs --train-iters or --lr-decay-iters"),
    (UNKNOWN_LENGTH, 1, "lr_warmup_fraction", "needs --train-iters or --lr-decay-iters"),
    (
        f"{WATCH} --weight-decay-incr-style linear",
        1,
        "weight_decay_incr_style",
        "needs --train-iters",
    ),
    ("--use-dynamic-batch-size", 1, "use_dynamic_batch_size", "needs --max-tokens-per-gpu"),
    ("--max-tokens-per-gpu 99", 1, "max_tokens_per_gpu", "needs --use-dynamic-batch-size"),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 1",
        1,
        "max_tokens_per_gpu",
        "times --context-parallel-size 1 must take the shortest sample",
    ),
    ("--max-position-embeddings 1", 1, "max_position_embeddings", "must take the shortest sample"),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 99 --qkv-format bshd",
        1,
        "use_dynamic_batch_size",
        "needs --qkv-format thd",
    ),
    (f"{ROLLOUT} --num-steps-per-rollout 3", 1, "num_steps_per_rollout", "must divide"),
    (
        f"{ROLLOUT} --num-steps-per-rollout 2 --global-batch-size 2",
        1,
        "global_batch_size",
        "times --num-steps-per-rollout 2 must be",
    ),
    (f"{ROLLOUT} --global-batch-size 9", 1, "global_batch_size", "must not be more than"),
    ("--n-samples-per-prompt 1", 1, "n_samples_per_prompt", "must be > 1: --advantage-estimator"),
    ("--rollout-top-p 0.9 --loss-type sft_loss", 1, "rollout_top_p", "no meaning in sft_loss"),
    *(
        (f"--advantage-estimator {estimator} --policy-objective ppo", 1, "policy_objective", rule)
        for estimator, rule in (("gspo", "must be gspo with"), ("cispo", "must be cispo with"))
    ),
    ("--kl-loss-type k3", 1, "kl_loss_type", "needs --use-kl-loss or --kl-coef"),
    ("--value-clip 0.3", 1, "value_clip", "needs --loss-type value_loss"),
    *(
        (f"--loss-type sft_loss {option}", 1, name, "has no meaning in sft_loss: nothing is")
        for option, name in (
            ("--advantage-estimator rloo", "advantage_estimator"),
            (f"--custom-advantage-function-path {FUNCTION}", "custom_advantage_function_path"),
            ("--normalize-advantages", "normalize_advantages"),
            ("--gamma 0.9", "gamma"),
            ("--lambd 0.9", "lambd"),
            ("--kl-coef 0.1", "kl_coef"),
        )
    ),
    *(
        (
            f"--loss-type value_loss --advantage-estimator ppo {flags}",
            1,
            flags.split()[0][2:].replace("-", "_"),
            "has no meaning in value_loss: a critic has no logits",
        )
        for flags in (
            "--rollout-temperature 0.7",
            "--log-probs-chunk-size 3",
            "--log-probs-memory-mb 3",
            "--recompute-loss-function",
        )
    ),
    ("--loss-type value_loss", 1, "advantage_estimator", "must be ppo with --loss-type value_l"),
    (
        f"--loss-type value_loss --custom-advantage-function-path {FUNCTION}",
        1,
        "advantage_estimator",
        "must be ppo with --loss-type value_loss",
    ),
    (
        "--loss-type value_loss --advantage-estimator ppo --normalize-advantages",
        1,
        "normalize_advantages",
        "has no meaning in value_loss",
    ),
    ("--reward-key=", 1, "reward_key", "must not be empty"),
    ("--min-lr 1e-3", 1, "min_lr", "must not be above --lr 1e-06"),
    ("--decoupled-min-lr 1e-3", 1, "decoupled_min_lr", "must not be above --decoupled-lr None"),
    ("--lr-warmup-init 1", 1, "lr_warmup_init", "must not be above --lr 1e-06"),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
        1,
        "lr_warmup_fraction",
        "excludes --lr-warmup-iters 3",
    ),
    ("--lr-warmup-iters 5 --train-iters 5", 1, "lr_warmup_iters", "must be less than"),
    ("--lr-decay-style WSD", 1, "lr_decay_style", "WSD needs --lr-wsd-decay-iters"),
    ("--lr-wsd-decay-iters 4", 1, "lr_wsd_decay_iters", "needs --lr-decay-style WSD"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-iters 8",
        1,
        "lr_wsd_decay_iters",
        "must not be more than --lr-decay-iters 8",
    ),
    (
        "--weight-decay-incr-style linear",
        1,
        "weight_decay_incr_style",
        "linear needs --start-weight-decay",
    ),
    (
        "--start-weight-decay 0.1",
        1,
        "weight_decay_incr_style",
        "constant excludes --start-weight-decay",
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
        1,
        "end_weight_decay",
        "must not be below --start-weight-decay 0.2",
    ),
    (
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        1,
        "override_opt_param_scheduler",
        "excludes --use-checkpoint",
    ),
    ("--save-interval 5", 1, "save_interval", "needs --save"),
    ("--save-retain-interval 5", 1, "save_retain_interval", "needs --save"),
    ("--save-keep-last 5", 1, "save_keep_last", "needs --save"),
    ("--async-save", 1, "async_save", "needs --save"),
    ("--save {tmp} --save-retain-interval 5", 1, "save_retain_interval", "needs --save-interval"),
    (
        "--save {tmp} --save-interval 4 --save-retain-interval 6",
        1,
        "save_retain_interval",
        "must be a multiple of --save-interval 4",
    ),
    ("--save {tmp} --load {tmp} --finetune", 1, "finetune", "restarts at step 0"),
    ("--save {tmp}/x/.. --load {tmp}/ --finetune", 1, "finetune", "restarts at step 0"),
    ("--exit-on-missing-checkpoint", 1, "exit_on_missing_checkpoint", "needs --load"),
    ("--squared-relu --swiglu", 1, "squared_relu", "excludes --swiglu"),
    ("--group-query-attention", 1, "group_query_attention", "needs --num-query-groups"),
    ("--num-query-groups 3", 1, "num_query_groups", "must divide --num-attention-heads 4"),
    ("--hidden-size 66", 1, "hidden_size", "must be a multiple of --num-attention-heads 4"),
    ("--rotary-percent 0.2", 1, "rotary_percent", "an even number of a head's channels"),
    (
        "--rope-high-freq-factor 1 --rope-low-freq-factor 1",
        1,
        "rope_high_freq_factor",
        "must be above --rope-low-freq-factor 1.0",
    ),
    ("--attention-dropout 0.1", 1, "attention_dropout", "must be 0"),
    ("--no-attention-softmax-in-fp32", 1, "attention_softmax_in_fp32", "must stay on"),
    ("--attention-backend fused", 1, "attention_backend", "fused attention is not used"),
    ("--recompute-granularity full", 1, "recompute_granularity", "full needs --recompute-method"),
    ("--recompute-num-layers 1", 1, "recompute_num_layers", "needs --recompute-granularity full"),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 99",
        1,
        "recompute_num_layers",
        "at most the layers of one pipeline stage",
    ),
    (
        f"{MOE} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
        1,
        "moe_router_load_balancing_type",
        "must not be sinkhorn",
    ),
    (
        f"{MOE} --moe-router-load-balancing-type quantile_balancing",
        1,
        "moe_router_load_balancing_type",
        "must not be sinkhorn or quantile_balancing",
    ),
    (
        "--context-parallel-size 2",
        3,
        "tensor_model_parallel_size",
        "must divide the number of rank",
    ),
    (
        "--tensor-model-parallel-size 3",
        3,
        "num_attention_heads",
        "must be a multiple of --tensor-model-parallel-size 3",
    ),
    (
        "--tensor-model-parallel-size 4 --num-query-groups 2",
        4,
        "num_query_groups",
        "must be a multiple of --tensor-model-parallel-size 4",
    ),
    (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 33",
        2,
        "ffn_hidden_size",
        "must be a multiple of --tensor-model-parallel-size 2",
    ),
    ("--no-initialization --tensor-model-parallel-size 2", 2, "perform_initialization", "must not"),
    ("--pipeline-model-parallel-size 3", 3, "num_layers", "times the model chunks of a stage, 1"),
    (
        "--virtual-pipeline-model-parallel-size 2",
        1,
        "virtual_pipeline_model_parallel_size",
        "needs --pipeline-model-parallel-size > 1",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL",
        2,
        "pipeline_model_parallel_layout",
        "has 4 stages, and must have --pipeline-model-parallel-size 2 times",
    ),
    (
        "--pipeline-model-parallel-size 2 --microbatch-group-size-per-vp-stage 1",
        2,
        "microbatch_group_size_per_vp_stage",
        "must not be less than --pipeline-model-parallel-size 2",
    ),
    ("--allgather-cp --qkv-format bshd", 1, "allgather_cp", "needs --qkv-format thd"),
    ("--context-parallel-size 2 --qkv-format bshd", 2, "context_parallel_size", "must be 1 with"),
    ("--use-distributed-optimizer --optimizer sgd", 1, "use_distributed_optimizer", "needs --opt"),
    (
        "--use-precision-aware-optimizer",
        1,
        "use_precision_aware_optimizer",
        "needs --use-distributed-optimizer",
    ),
    (
        "--reuse-grad-buf-for-mxfp8-param-ag",
        1,
        "reuse_grad_buf_for_mxfp8_param_ag",
        "needs --fp8-param-gather",
    ),
    ("--expert-model-parallel-size 2", 2, "expert_model_parallel_size", "needs --num-experts"),
    (f"{MOE} --num-experts 3 --expert-model-parallel-size 2", 2, "num_moe_experts", "a multiple"),
    (
        f"{MOE} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
        2,
        "expert_model_parallel_size",
        "must divide the number of ranks, 2",
    ),
    (f"{MOE} --moe-router-topk 5", 1, "moe_router_topk", "must not be more than --num-experts 4"),
    (f"{MOE} --tensor-model-parallel-size 2", 2, "sequence_parallel", "must be on with"),
    (
        f"{MOE} --moe-token-dispatcher-type allgather",
        1,
        "moe_token_dispatcher_type",
        "must be alltoall or flex",
    ),
    (
        f"{MOE} --moe-token-dispatcher-type flex",
        1,
        "moe_token_dispatcher_type",
        "flex needs experts on several ranks",
    ),
    (f"{MOE} --moe-token-dispatcher-type flex", 1, "moe_token_dispatcher_type", "needs a GPU"),
    (f"{MOE} --add-bias-linear", 1, "add_bias_linear", "must be given with --num-experts"),
    *(
        (f"{option} --fp64 --use-distributed-optimizer", 1, name, "excludes --fp64")
        for option, name in (
            ("--bf16", "bf16"),
            ("--fp8-format hybrid", "fp8"),
            ("--fp4-format e2m1", "fp4"),
            ("--use-precision-aware-optimizer", "use_precision_aware_optimizer"),
            ("--cpu-offloading", "cpu_offloading"),
            (
                "--reduce-scatter-with-fp32-accumulation",
                "reduce_scatter_with_fp32_accumulation",
            ),
        )
    ),
    ("--fp64 --attention-backend flash", 1, "attention_backend", "flash excludes --fp64"),
    ("--moe-aux-loss-coeff 0.01", 1, "moe_aux_loss_coeff", "must be 0"),
    ("--moe-z-loss-coeff 0.001", 1, "moe_z_loss_coeff", "must be 0"),
    *(
        (f"{option} --use-distributed-optimizer", 1, name, "needs a GPU")
        for option, name in (
            ("--fp8-format hybrid", "fp8"),
            ("--fp4-format e2m1", "fp4"),
            ("--moe-grouped-gemm", "moe_grouped_gemm"),
            ("--use-precision-aware-optimizer", "use_precision_aware_optimizer"),
            ("--optimizer-cpu-offload", "optimizer_cpu_offload"),
            ("--cpu-offloading", "cpu_offloading"),
            ("--nccl-ub", "nccl_ub"),
            ("--moe-latent-size 8", "moe_latent_size"),
            ("--moe-permute-fusion", "moe_permute_fusion"),
            ("--moe-router-fusion", "moe_router_fusion"),
        )
    ),
    ("--attention-backend flash", 1, "attention_backend", "flash needs a GPU"),
    (
        f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "expert_tensor_parallel_size",
        "must be 1 on a CPU",
    ),
    *(
        (f"{option} --device cuda --use-distributed-optimizer", 1, name, "transformer-engine")
        for option, name in (
            ("--fp8-format hybrid", "fp8"),
            ("--fp4-format e2m1", "fp4"),
            ("--use-precision-aware-optimizer", "use_precision_aware_optimizer"),
            ("--moe-latent-size 8", "moe_latent_size"),
            ("--moe-permute-fusion", "moe_permute_fusion"),
            ("--moe-router-fusion", "moe_router_fusion"),
            ("--cpu-offloading", "cpu_offloading"),
        )
    ),
]
"""Flags, ranks, the flag of the violation, and a part of its rule."""
