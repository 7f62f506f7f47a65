"""From a checked configuration to a trainer that stands where the run stands."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.rl.checkpoint import Checkpointer, Progress, Restored
from megatron.rl.checkpoint_files import CheckpointError, find_checkpoint
from megatron.rl.checkpoint_model import load_model_weights
from megatron.rl.config import RunConfig
from megatron.rl.data import announce, count_steps, data_identity, open_files, open_spooled
from megatron.rl.guard import phase
from megatron.rl.hf import load_hf_weights
from megatron.rl.initialize import Grid
from megatron.rl.logging import RunLogger, log_info
from megatron.rl.model import build_head, build_model, wrap_model
from megatron.rl.samples import BadRowsError
from megatron.rl.sources import SpoolError
from megatron.rl.step import Trainee, finalize_sum
from megatron.rl.trainer import Trainer
from slime_loss import RLHead

REFUSALS = (BadRowsError, CheckpointError, SpoolError, ValueError)
"""What a start says to flags, rollouts and checkpoints that do not fit."""

UNKNOWN_STEPS = 2**31 - 1


def build_trainer(config: RunConfig, grid: Grid) -> Trainer:
    """Open the rollouts, build and load the model, and place everything at the right step.

    Raises:
        BadRowsError: a rollout row breaks a rule; every rank raises it.
        CheckpointError: `--load` does not fit.
    """
    starting = partial(phase, step=0, watch=grid.watch, lets_pass=REFUSALS)
    source = None
    if config.data.rollout_data:  # before what may take minutes
        with starting("checking rollouts"):
            source = open_files(config)
    with starting("building the model"):
        trainee = build_trainee(config, grid)
    if source is None:
        with starting("opening rollouts"):
            source = open_spooled(config, trainee)
    total_steps = count_steps(source, config)
    announce(config, source, total_steps)
    if isinstance(trainee.head, RLHead):  # a critic's has no choice to make
        log_info(f"head: {trainee.head.describe()}")
    scheduler = build_scheduler(config, trainee, total_steps)
    checkpointer = Checkpointer(config, grid, trainee, scheduler, data_identity(config, source))
    with starting("loading the checkpoint"):
        restored = restore(config, checkpointer) or Restored(Progress(), {})
    with starting("opening the logs"):
        logger = RunLogger(
            config.logging,
            is_writer=grid.is_writer,
            first_step=restored.progress.step + 1,
            total_steps=total_steps,
            resolved_config=config.to_yaml(),
        )
    return Trainer(
        config=config,
        grid=grid,
        source=source,
        trainee=trainee,
        checkpointer=checkpointer,
        logger=logger,
        total_steps=total_steps,
        progress=restored.progress,
        old_outputs=restored.old_outputs,
    )


def restore(config: RunConfig, checkpointer: Checkpointer) -> Restored | None:
    """Load `--load`; without a checkpoint there the run starts from its initial weights.

    Raises:
        CheckpointError: the checkpoint does not fit, or none there is complete; or `--save` holds
            those of another run.
    """
    restored = None if config.checkpoint.load is None else checkpointer.load()
    checkpointer.check_place(0 if restored is None else restored.progress.step)
    if config.checkpoint.load is None:
        return None
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
    config: RunConfig, trainee: Trainee, total_steps: int | None
) -> OptimizerParamScheduler:
    """Core's learning rate and weight decay schedule, counted in optimizer steps."""
    schedule, optimizer = config.schedule, config.optimizer
    if total_steps is None:  # nothing but the warmup changes then
        total_steps = UNKNOWN_STEPS
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
