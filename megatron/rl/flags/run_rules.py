"""Rules of batches, schedule and checkpoints, and flags that have no effect."""

from __future__ import annotations

from megatron.rl.flags.rule import Rule, is_same_place

REQUIRED = {
    "lr": "add --lr X; 1e-6 is usual for RL",
    **{
        name: f"add --{name.replace('_', '-')} N, or --hf-checkpoint DIR, which sets it"
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    },
}
"""Flags without which there is no run, and what to do."""

ROLLOUTS = (
    Rule(
        "rollout_data",
        lambda s: not s.rollout_data and not s.comes_during_run,
        "or --rollout-watch or --rollout-engine must be given",
        "add --rollout-data PATH..., --rollout-watch DIR or --rollout-engine NAME",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s[name] is not None and bool(s.rollout_data),
            "excludes --rollout-data",
            "leave one of the two out",
        )
        for name in ("rollout_watch", "rollout_engine")
    ),
    Rule(
        "rollout_engine",
        lambda s: s.rollout_engine is not None and s.rollout_watch is not None,
        "excludes --rollout-watch",
        "leave one of the two out",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s[name] is not None and s.rollout_dir is None and s.save is None,
            "needs --save or --rollout-dir, to note which rollouts were taken",
            "add --save DIR",
        )
        for name in ("rollout_watch", "rollout_engine")
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s.rollout_engine is not None and s[name] is None,
            "must be given with --rollout-engine",
            f"add --{name.replace('_', '-')} N",
        )
        for name in ("rollout_batch_size", "n_samples_per_prompt")
    ),
    Rule(
        "num_rollout",
        lambda s: s.rollout_engine is not None and s.num_rollout is None and s.train_iters is None,
        "or --train-iters must be given with --rollout-engine, which never ends by itself",
        "add --num-rollout N",
    ),
    Rule(
        "rollout_engine",
        lambda s: s.rollout_engine == "native" and (s.pp > 1 or s.ep > 1),
        "native draws without pipeline and expert parallelism",
        "use --rollout-engine sglang, or no such parallelism",
    ),
    Rule(
        "rollout_engine",
        lambda s: s.rollout_engine is not None and s.loss_type == "value_loss",
        "{rollout_engine} needs a policy, and a critic draws nothing",
        "train a critic on --rollout-data",
    ),
    Rule(
        "rollout_dir",
        lambda s: s.rollout_dir is not None and not s.comes_during_run,
        "needs --rollout-watch or --rollout-engine",
        "leave it out",
    ),
    Rule(
        "max_staleness",
        lambda s: s.max_staleness is not None and not s.comes_during_run,
        "needs --rollout-watch or --rollout-engine",
        "leave it out",
    ),
    Rule(
        "num_epochs",
        lambda s: s.comes_during_run and s.num_epochs > 1,
        "needs --rollout-data: other rollouts come once",
        "leave --num-epochs out",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: (
                not s.steps_foreseen
                and s.lr_decay_iters is None
                and s[name] not in (None, "constant")
            ),
            "needs --train-iters or --lr-decay-iters: --rollout-watch does not say how long the "
            "run is",
            "add --lr-decay-iters N",
        )
        for name in ("lr_decay_style", "lr_warmup_fraction")
    ),
    Rule(
        "weight_decay_incr_style",
        lambda s: not s.steps_foreseen and s.weight_decay_incr_style != "constant",
        "needs --train-iters: --rollout-watch does not say how long the run is",
        "add --train-iters N",
    ),
)

BATCHES = (
    Rule(
        "use_dynamic_batch_size",
        lambda s: s.use_dynamic_batch_size and s.max_tokens_per_gpu is None,
        "needs --max-tokens-per-gpu",
        "add --max-tokens-per-gpu N, a little above the longest sample divided by "
        "--context-parallel-size",
    ),
    Rule(
        "max_tokens_per_gpu",
        lambda s: s.max_tokens_per_gpu is not None and not s.use_dynamic_batch_size,
        "needs --use-dynamic-batch-size",
        "add --use-dynamic-batch-size, or leave --max-tokens-per-gpu out",
    ),
    Rule(
        "max_tokens_per_gpu",
        lambda s: s.max_tokens_per_gpu is not None and s.max_tokens_per_gpu * s.cp < 2,
        "times --context-parallel-size {context_parallel_size} must take the shortest sample: one "
        "token of a prompt and one of a response",
        "use a little more than the longest sample divided by --context-parallel-size",
    ),
    Rule(
        "max_position_embeddings",
        lambda s: s.max_position_embeddings is not None and s.max_position_embeddings < 2,
        "must take the shortest sample: one token of a prompt and one of a response",
        "use what the model takes",
    ),
    Rule(
        "use_dynamic_batch_size",
        lambda s: s.use_dynamic_batch_size and s.qkv_format == "bshd",
        "needs --qkv-format thd: bshd pads samples and cannot pack them",
        "use --qkv-format thd, or --micro-batch-size N in place of --use-dynamic-batch-size",
    ),
    Rule(
        "num_steps_per_rollout",
        lambda s: (
            s.num_steps_per_rollout is not None
            and s.rollout_samples is not None
            and s.rollout_samples % s.num_steps_per_rollout != 0
        ),
        "must divide the samples of a rollout, --rollout-batch-size {rollout_batch_size} times "
        "--n-samples-per-prompt {n_samples_per_prompt}",
        "change one of the three, or give --global-batch-size in its place",
    ),
    Rule(
        "global_batch_size",
        lambda s: (
            s.num_steps_per_rollout is not None
            and s.rollout_samples is not None
            and s.global_batch_size is not None
            and s.global_batch_size * s.num_steps_per_rollout != s.rollout_samples
        ),
        "times --num-steps-per-rollout {num_steps_per_rollout} must be the samples of a rollout, "
        "--rollout-batch-size {rollout_batch_size} times --n-samples-per-prompt "
        "{n_samples_per_prompt}",
        "leave --global-batch-size out: it follows from the others",
    ),
    Rule(
        "global_batch_size",
        lambda s: (
            s.num_steps_per_rollout is None
            and s.rollout_samples is not None
            and s.global_batch_size is not None
            and s.global_batch_size > s.rollout_samples
        ),
        "must not be more than the samples of a rollout, --rollout-batch-size "
        "{rollout_batch_size} times --n-samples-per-prompt {n_samples_per_prompt}",
        "make it smaller, or --rollout-batch-size larger",
    ),
    Rule(
        "reward_key",
        lambda s: s.reward_key == "",
        "must not be empty",
        "name an entry of the rows' reward dict, or leave --reward-key out",
    ),
)

SCHEDULE = (
    Rule(
        "min_lr",
        lambda s: s.min_lr > s.lr,
        "must not be above --lr {lr}",
        "lower --min-lr, or raise --lr",
    ),
    Rule(
        "decoupled_min_lr",
        lambda s: (
            s.decoupled_min_lr is not None
            and (s.decoupled_lr is None or s.decoupled_min_lr > s.decoupled_lr)
        ),
        "must not be above --decoupled-lr {decoupled_lr}",
        "lower it, or raise --decoupled-lr",
    ),
    Rule(
        "lr_warmup_init",
        lambda s: s.lr_warmup_init > s.lr,
        "must not be above --lr {lr}",
        "use 0",
    ),
    Rule(
        "lr_warmup_fraction",
        lambda s: s.lr_warmup_fraction is not None and s.lr_warmup_iters > 0,
        "excludes --lr-warmup-iters {lr_warmup_iters}",
        "leave one of the two out",
    ),
    Rule(
        "lr_warmup_iters",
        lambda s: bool(s.steps_known) and s.lr_warmup_iters >= s.steps_known,
        "must be less than --lr-decay-iters {lr_decay_iters} or, without it, --train-iters "
        "{train_iters}",
        "shorten the warmup",
    ),
    Rule(
        "lr_decay_style",
        lambda s: s.lr_decay_style == "WSD" and s.lr_wsd_decay_iters is None,
        "WSD needs --lr-wsd-decay-iters",
        "add --lr-wsd-decay-iters N",
    ),
    Rule(
        "lr_wsd_decay_iters",
        lambda s: s.lr_wsd_decay_iters is not None and s.lr_decay_style != "WSD",
        "needs --lr-decay-style WSD",
        "add --lr-decay-style WSD, or leave it out",
    ),
    Rule(
        "lr_wsd_decay_iters",
        lambda s: (
            s.lr_wsd_decay_iters is not None
            and bool(s.steps_known)
            and s.lr_wsd_decay_iters > s.steps_known
        ),
        "must not be more than --lr-decay-iters {lr_decay_iters} or, without it, --train-iters "
        "{train_iters}",
        "shorten the annealing",
    ),
    Rule(
        "weight_decay_incr_style",
        lambda s: (
            s.weight_decay_incr_style != "constant"
            and (s.start_weight_decay is None or s.end_weight_decay is None)
        ),
        "{weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay",
        "add both, or use --weight-decay-incr-style constant",
    ),
    Rule(
        "weight_decay_incr_style",
        lambda s: (
            s.weight_decay_incr_style == "constant"
            and (s.start_weight_decay, s.end_weight_decay) != (None, None)
        ),
        "constant excludes --start-weight-decay and --end-weight-decay",
        "give --weight-decay alone, or --weight-decay-incr-style linear or cosine",
    ),
    Rule(
        "end_weight_decay",
        lambda s: (
            None not in (s.start_weight_decay, s.end_weight_decay)
            and s.end_weight_decay < s.start_weight_decay
        ),
        "must not be below --start-weight-decay {start_weight_decay}",
        "raise it",
    ),
    Rule(
        "override_opt_param_scheduler",
        lambda s: s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler,
        "excludes --use-checkpoint-opt-param-scheduler",
        "leave one of the two out",
    ),
)

CHECKPOINT = (
    *(
        Rule(
            name,
            lambda s, name=name: s[name] is not None and s.save is None,
            "needs --save",
            "add --save DIR",
        )
        for name in ("save_interval", "save_retain_interval", "save_keep_last")
    ),
    Rule("async_save", lambda s: s.async_save and s.save is None, "needs --save", "add --save DIR"),
    Rule(
        "save_retain_interval",
        lambda s: (
            s.save_retain_interval is not None
            and s.save_interval is not None
            and s.save_retain_interval % s.save_interval
        ),
        "must be a multiple of --save-interval {save_interval}",
        "use a multiple of {save_interval}",
    ),
    Rule(
        "save_retain_interval",
        lambda s: (
            s.save is not None and s.save_retain_interval is not None and s.save_interval is None
        ),
        "needs --save-interval",
        "add --save-interval N",
    ),
    Rule(
        "finetune",
        lambda s: s.finetune and is_same_place(s.load, s.save),
        "restarts at step 0, so --load must not be --save {save}: no restart would ever get on",
        "save into another directory, or leave --finetune out to continue",
    ),
    Rule(
        "exit_on_missing_checkpoint",
        lambda s: s.exit_on_missing_checkpoint and s.load is None,
        "needs --load",
        "add --load DIR",
    ),
)

RUN_RULES = (*ROLLOUTS, *BATCHES, *SCHEDULE, *CHECKPOINT)

NOTES = (
    Rule(
        "allgather_cp",
        lambda s: s.allgather_cp and s.cp == 1,
        "has no effect with --context-parallel-size 1",
        "",
    ),
    Rule(
        "sequence_parallel",
        lambda s: s.sequence_parallel and s.tp == 1,
        "has no effect with --tensor-model-parallel-size 1",
        "",
    ),
    Rule(
        "truncate_samples",
        lambda s: (
            s.truncate_samples and (s.max_position_embeddings, s.max_tokens_per_gpu) == (None, None)
        ),
        "has no effect without --max-position-embeddings or --max-tokens-per-gpu",
        "",
    ),
    Rule(
        "micro_batch_size",
        lambda s: s.use_dynamic_batch_size and s.micro_batch_size != 1,
        "has no effect with --use-dynamic-batch-size",
        "",
    ),
    Rule(
        "global_batch_size",
        lambda s: (
            s.rollout_samples is not None
            and s.global_batch_size is not None
            and s.rollout_samples % s.global_batch_size
        ),
        "does not divide the samples of a rollout: its last step is smaller",
        "",
    ),
    Rule(
        "global_batch_size",
        lambda s: (
            s.global_batch_size is not None
            and s.global_batch_size * s.tp * s.pp * s.cp < s.world_size
        ),
        "is less than the number of model replicas: some have nothing to do",
        "",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s[name] and s.load is None,
            "has no effect without --load",
            "",
        )
        for name in ("finetune", "no_load_optim", "no_load_rng")
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s[name] and s.save is None,
            "has no effect without --save",
            "",
        )
        for name in ("no_save_optim", "no_save_rng")
    ),
)
