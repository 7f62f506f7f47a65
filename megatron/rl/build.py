"""From a checked configuration to a trainer that stands where the run stands."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.rl.checkpoint import Checkpointer, Progress, Restored
from megatron.rl.checkpoint_files import CheckpointError, find_checkpoint
from megatron.rl.checkpoint_model import load_model_weights
from megatron.rl.computed import needs_values, old_is_engines
from megatron.rl.config import RunConfig
from megatron.rl.guard import phase
from megatron.rl.hf import load_hf_weights
from megatron.rl.initialize import Grid, World
from megatron.rl.logging import RunLogger, log_info, log_warning
from megatron.rl.model import build_head, build_model, wrap_model
from megatron.rl.rollout import num_steps
from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import FileSource, ReadOptions, RolloutFiles, check_rollouts
from megatron.rl.step import Trainee, finalize_sum
from megatron.rl.trainer import Trainer
from slime_loss import RLHead

REFUSALS = (BadRowsError, CheckpointError, ValueError)
"""What a start says to flags, rollouts and checkpoints that do not fit."""


def build_trainer(config: RunConfig, grid: Grid) -> Trainer:
    """Open the rollouts, build and load the model, and place everything at the right step.

    Raises:
        BadRowsError: a rollout row breaks a rule; every rank raises it.
        CheckpointError: `--load` does not fit.
    """
    starting = partial(phase, step=0, watch=grid.watch, lets_pass=REFUSALS)
    with starting("checking rollouts"):
        source = open_source(config, grid)
    total_steps = count_steps(source, config)
    announce(config, source, total_steps)
    with starting("building the model"):
        trainee = build_trainee(config, grid)
    if isinstance(trainee.head, RLHead):  # a critic's has no choice to make
        log_info(f"head: {trainee.head.describe()}")
    scheduler = build_scheduler(config, trainee, total_steps)
    checkpointer = Checkpointer(config, grid, trainee, scheduler, data_identity(config, source))
    with starting("loading the checkpoint"):
        restored = restore(config, checkpointer) or Restored(Progress(), {})
    return Trainer(
        config=config,
        grid=grid,
        source=source,
        trainee=trainee,
        checkpointer=checkpointer,
        logger=RunLogger(
            config.logging,
            is_writer=grid.is_writer,
            first_step=restored.progress.step + 1,
            total_steps=total_steps,
            resolved_config=config.to_yaml(),
        ),
        total_steps=total_steps,
        progress=restored.progress,
        old_outputs=restored.old_outputs,
    )


def restore(config: RunConfig, checkpointer: Checkpointer) -> Restored | None:
    """Load `--load`; without a checkpoint there the run starts from its initial weights.

    Raises:
        CheckpointError: the checkpoint does not fit, or none there is complete.
    """
    if config.checkpoint.load is None:
        return None
    restored = checkpointer.load()
    if restored is None:
        log_info(f"no checkpoint in {config.checkpoint.load} yet: starting at step 1")
    else:
        log_info(f"loaded {config.checkpoint.load}: going on at step {restored.progress.step + 1}")
    return restored


def build_trainee(config: RunConfig, grid: Grid) -> Trainee:
    """Model, head and optimizer with the initial weights."""
    chunks = build_model(config, grid)
    pretrained, hf_directory = config.checkpoint.pretrained_checkpoint, config.model.hf_checkpoint
    log_info(f"initial weights: {pretrained or hf_directory or 'random'}")
    if pretrained is not None:
        load_model_weights(config, chunks, find_checkpoint(Path(pretrained)))
    elif hf_directory is not None:
        load_hf_weights(
            chunks, Path(hf_directory), tp_group=grid.groups.tp, show_progress=grid.is_writer
        )
    chunks = wrap_model(config, chunks)
    config.transformer.finalize_model_grads_func = finalize_sum
    if config.ddp.overlap_grad_reduce:
        config.transformer.no_sync_func = [chunk.no_sync for chunk in chunks]
        if len(chunks) == 1:
            config.transformer.no_sync_func = chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        config.optimizer, chunks, use_gloo_process_groups=False, pg_collection=None
    )
    return Trainee(config, grid, chunks, build_head(config, grid.groups), optimizer)


def build_scheduler(
    config: RunConfig, trainee: Trainee, total_steps: int
) -> OptimizerParamScheduler:
    """Core's learning rate and weight decay schedule, counted in optimizer steps."""
    schedule, optimizer = config.schedule, config.optimizer
    decay_steps = schedule.lr_decay_iters or max(total_steps, 1)
    warmup_steps = schedule.lr_warmup_iters
    if schedule.lr_warmup_fraction is not None:
        warmup_steps = int(schedule.lr_warmup_fraction * decay_steps)
    if warmup_steps >= decay_steps:
        raise ValueError(
            f"lr_warmup_iters must be less than the steps the rate decays over: "
            f"lr_warmup_iters={warmup_steps}, lr_decay_iters={decay_steps}"
        )
    weight_decay = optimizer.weight_decay
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    return OptimizerParamScheduler(
        trainee.optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr or 0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=weight_decay if start is None else start,
        end_wd=weight_decay if end is None else end,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


def row_rules(config: RunConfig) -> RowRules:
    """What this run demands of every rollout row."""
    loss, advantage = config.loss, config.advantage
    has_advantages = loss.loss_type != "sft_loss"
    # a function of the user's own takes what there is; a reward that is absent is 0
    estimates = has_advantages and not advantage.is_custom
    compares_prompts = config.aggregation.aggregation == "prompt_mean"
    limits = (config.model.max_position_embeddings, config.layout.tokens_per_pack)
    return RowRules(
        vocab_size=config.model.vocab_size,
        reward_key=config.data.reward_key,
        need_reward=estimates,
        need_group=compares_prompts or (estimates and advantage.compares_groups),
        need_rollout_log_probs=loss.use_tis or loss.use_rs or old_is_engines(config),
        need_ref_log_probs=loss.use_kl_loss or advantage.kl_coef > 0,
        need_values=estimates and needs_values(config),
        need_kept_ids=config.data.rollout_top_p < 1,
        max_length=min((limit for limit in limits if limit is not None), default=None),
        truncate=config.data.truncate_samples,
    )


def check_data(config: RunConfig) -> RolloutFiles:
    """Check every row of `--rollout-data`; in this process alone.

    Skipped rows are written aside where the run leaves its files; a dry run writes nothing.
    """
    aside = config.logging.tensorboard_dir or config.checkpoint.save
    if config.runtime.dry_run:
        aside = None
    options = ReadOptions(
        bad_rows=config.data.bad_rows,
        bad_rows_path=aside and str(Path(aside) / "bad_rows.jsonl"),
        trust_pickle=config.data.trust_pickle,
    )
    return check_rollouts(config.data.rollout_data, row_rules(config), options)


def make_source(config: RunConfig, files: RolloutFiles) -> FileSource:
    """The checked files as rollouts.

    Without `--rollout-batch-size` a rollout is the whole prompts that fit into
    `--num-steps-per-rollout` steps, so that none of them is a small remainder.
    """
    data = config.data
    prompts = data.rollout_batch_size
    if prompts is None and data.global_batch_size is not None:
        samples = data.global_batch_size * (data.num_steps_per_rollout or 1)
        prompts = max(samples // (data.n_samples_per_prompt or files.largest_group), 1)
    return FileSource(
        files,
        rollout_batch_size=prompts,
        num_epochs=data.num_epochs,
        seed=config.runtime.seed,
        shuffle=data.shuffle,
        n_samples_per_prompt=data.n_samples_per_prompt,
    )


def open_source(config: RunConfig, grid: Grid) -> FileSource:
    """Rank 0 checks the files once and sends the row index to all others.

    Raises:
        BadRowsError: on every rank alike.
    """
    found: list[RolloutFiles | BadRowsError | None] = [None]
    if grid.is_writer:
        try:
            found[0] = check_data(config)
        except BadRowsError as error:
            found[0] = error
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], BadRowsError):
        raise found[0]
    return make_source(config, found[0])


def dry_run(config: RunConfig, world: World) -> None:
    """Check flags and data and say what a run would do; nothing is built or written."""
    if world.rank == 0:
        source = make_source(config, check_data(config))
        announce(config, source, count_steps(source, config))


def announce(config: RunConfig, source: FileSource, total_steps: int) -> None:
    """Print the resolved configuration, the layout and the data, once."""
    log_info(f"configuration:\n{config.describe()}")
    log_info(f"rollouts:\n{source.describe()}\n{'optimizer steps':<18}{total_steps}")
    wanted = config.data.num_rollout
    if wanted is not None and wanted > source.num_rollouts:
        log_warning(f"--num-rollout {wanted}: the epochs give {source.num_rollouts} rollouts")
    scored = int(source.files.rows["has_rollout_log_probs"].sum())
    if 0 < scored < len(source.files) and config.loss.loss_type == "policy_loss":
        log_warning(
            f"rollout_log_probs in {scored} of {len(source.files)} samples: rollouts that lack "
            "some are not compared with the engine (train_rollout_* are left out there)"
        )


def data_identity(config: RunConfig, source: FileSource) -> dict[str, object]:
    """What the number of a rollout and of a step within it mean."""
    data = config.data
    return {
        "rollouts": source.files.fingerprint,
        "rollout_batch_size": source.groups_per_rollout,
        "global_batch_size": data.global_batch_size,
        "num_steps_per_rollout": data.num_steps_per_rollout,
        "shuffle": data.shuffle,
        "seed": config.runtime.seed,
    }


def count_steps(source: FileSource, config: RunConfig) -> int:
    """Optimizer steps of the whole run, known from the rollout index."""
    limit = config.schedule.train_iters
    steps = 0
    for size in islice(source.rollout_sizes(), config.data.num_rollout):
        if limit is not None and steps >= limit:
            return limit
        steps += num_steps(size, config.data)
    return steps if limit is None else min(steps, limit)
