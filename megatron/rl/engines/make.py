"""The engine that the flags name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron.rl.config import RunConfig
from megatron.rl.engines.engine import Engine
from megatron.rl.engines.http import HttpEngine
from megatron.rl.engines.native import NativeEngine
from megatron.rl.hf import architecture_of, export_hf_weights, export_new_hf_weights
from megatron.rl.step import Trainee


def make_engine(config: RunConfig, trainee: Trainee) -> tuple[Engine, bool]:
    """The engine of `--rollout-engine`, and whether this rank draws with it.

    Args:
        config: the run.
        trainee: the model in training, which draws itself or whose weights are sent.
    """
    own, grid = config.engine, trainee.grid
    if own.rollout_engine == "native":
        draws = grid.groups.tp.rank() == 0
        return NativeEngine(trainee, own.rollout_native_batch_size), draws
    engine = HttpEngine(
        own.servers(),
        rank=grid.world.rank,
        export=partial(_export, config, trainee),
        vocab_size=config.model.vocab_size,
    )
    return engine, grid.is_writer


def _export(config: RunConfig, trainee: Trainee, directory: Path) -> None:
    """Write the weights for the servers; every rank calls it, those of one replica write.

    In the dtypes of `--hf-checkpoint`, which the servers began with, or as they are trained.
    """
    groups = trainee.grid.groups
    if groups.dp_cp.rank() != 0:
        return
    source = config.model.hf_checkpoint
    if source is not None:
        export_hf_weights(
            trainee.chunks, Path(source), directory, tp_group=groups.tp, pp_group=groups.pp
        )
        return
    architecture = architecture_of(config.transformer, config.model)
    export_new_hf_weights(
        trainee.chunks, architecture, directory, tp_group=groups.tp, pp_group=groups.pp
    )
