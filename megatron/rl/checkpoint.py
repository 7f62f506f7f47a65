"""Checkpoints through megatron-core's distributed checkpointing: what is saved, loaded, compared.

How it is written is checkpoint_write's; which one is loaded, checkpoint_files'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron.rl.checkpoint_files import (
    FIX,
    CheckpointError,
    complete_steps,
    usable_checkpoints,
)
from megatron.rl.checkpoint_keep import Keep
from megatron.rl.checkpoint_model import (
    architecture_of,
    check_architecture,
    contents_complaint,
    fill,
    load_common,
    load_strictly,
    refuse_differences,
    sharded,
)
from megatron.rl.checkpoint_schedule import settle_rates
from megatron.rl.checkpoint_write import Saver
from megatron.rl.config import RunConfig
from megatron.rl.initialize import Grid
from megatron.rl.logging import log_warning
from megatron.rl.model import RLModel, unwrap
from megatron.rl.rng import restore_rng, rng_state
from megatron.rl.step import Trainee


@dataclass(frozen=True)
class Progress:
    """How far a run has come; all that a resumed run must know besides its tensors.

    Args:
        step: optimizer steps taken (skipped ones included).
        rollout: rollout in training, from 0: the position in the data.
        step_in_rollout: steps taken within it.
        consumed_samples: samples trained on.
        skipped_steps: steps whose loss or gradient was not finite.
    """

    step: int = 0
    rollout: int = 0
    step_in_rollout: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave.

    Args:
        progress: where to go on.
        old_outputs: old log-probs, or a critic's values, of the rollout in training, by position;
            empty between rollouts.
    """

    progress: Progress
    old_outputs: Mapping[int, Tensor]


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads one run.

    Args:
        config: the run.
        grid: this rank; every method is called by all ranks together.
        trainee: model and optimizer.
        scheduler: learning rate and weight decay.
        data: what the position in the data is counted in; a resumed run must have the same.
    """

    config: RunConfig
    grid: Grid
    trainee: Trainee
    scheduler: OptimizerParamScheduler
    data: Mapping[str, Any]

    @cached_property
    def saver(self) -> Saver:
        """What writes this run's checkpoints; asked for by runs that have --save."""
        flags = self.config.checkpoint
        assert flags.save is not None
        return Saver(
            Path(flags.save),
            self.grid,
            self.config.to_yaml(),
            Keep(flags.save_retain_interval, flags.save_keep_last),
            in_background=flags.async_save,
        )

    def save(self, progress: Progress, old_outputs: Mapping[int, Tensor]) -> None:
        """Write a checkpoint; with --async-save, go on while its files are written.

        Raises:
            CheckpointError: it, or the former one, cannot be written.
        """
        flags = self.config.checkpoint
        optimizer_format = self._optimizer_format()
        state = self._model_and_optimizer(None if flags.no_save_optim else optimizer_format)
        if not flags.no_save_rng:
            state["rng"] = self._rng_state()
        state["contents"] = sorted(state)
        state["optimizer_format"] = optimizer_format
        state["optimizer_kind"] = self._optimizer_kind()
        state["progress"] = asdict(progress)
        state["architecture"] = architecture_of(self.config)
        state["topology"] = self._topology()
        state["data"] = dict(self.data)
        state["old_outputs"] = self._everyones(old_outputs)
        self.saver.save(progress.step, state)

    def load(self) -> Restored | None:
        """Load the newest complete checkpoint of `--load`; None where there is none.

        Raises:
            CheckpointError: naming every architecture field that differs, or every tensor that
                is missing or unexpected.
        """
        directory = self._newest()
        if directory is None:
            return None
        common = load_common(directory)
        self._check_common(common, directory)
        state = self._load_state(directory, common)
        flags = self.config.checkpoint
        fill(self._chunks, state)
        if self._with_optimizer:
            self._load_scheduler(state["scheduler"])
            settle_rates(
                self.trainee.optimizer.param_groups,
                state["optimizer"],
                keep_saved=self.config.schedule.use_checkpoint_opt_param_scheduler,
            )
            self.trainee.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.step(increment=0)  # the rate that the schedule gives at this step
        else:
            self.trainee.optimizer.reload_model_params()
        if "rng" in state:
            restore_rng(state["rng"])
        if flags.finetune:
            return Restored(Progress(), {})
        return Restored(Progress(**common["progress"]), common["old_outputs"])

    def check_place(self, step: int) -> None:
        """A run replaces no checkpoints in `--save` but those that it goes on from.

        Args:
            step: the last step before this run's first.

        Raises:
            CheckpointError: there are later ones.
        """
        flags = self.config.checkpoint
        came_from = flags.load and {Path(flags.load).resolve(), Path(flags.load).resolve().parent}
        if flags.save is None or (came_from and Path(flags.save).resolve() in came_from):
            return
        newest: list[Any] = [None]
        if self.grid.is_writer:
            newest[0] = max(complete_steps(Path(flags.save)), default=0)
        dist.broadcast_object_list(newest, src=0)
        if newest[0] > step:
            raise CheckpointError(
                f"--save must not hold checkpoints that this run would replace: {flags.save} has "
                f"step {newest[0]}, and this run starts at step {step + 1}; fix: --load "
                f"{flags.save} to go on from there, or --save to another directory"
            )

    @property
    def _with_optimizer(self) -> bool:
        return not (self.config.checkpoint.finetune or self.config.checkpoint.no_load_optim)

    def _model_and_optimizer(
        self, optimizer_format: str | None, *, is_loading: bool = False
    ) -> dict[str, Any]:
        """What of model, optimizer (None: without it) and schedule is written or read."""
        state = sharded(self._chunks)
        if optimizer_format is not None:
            state["optimizer"] = self.trainee.optimizer.sharded_state_dict(
                sharded(self._chunks),
                is_loading,
                metadata={
                    "distrib_optim_sharding_type": optimizer_format,
                    "chained_optim_avoid_prefix": True,
                    "dp_cp_group": self.grid.groups.dp_cp,
                },
            )
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def _optimizer_format(self) -> str:
        """Core's format of the distributed optimizer's state.

        The format that any number of replicas can load is corrupt where gradients lie in several
        padded buckets, which overlapping their reduction makes.
        """
        ddp = self.config.ddp
        overlapped = ddp.use_distributed_optimizer and ddp.overlap_grad_reduce
        return "dp_reshardable" if overlapped else "fully_reshardable"

    @property
    def _chunks(self) -> list[RLModel]:
        return [unwrap(chunk) for chunk in self.trainee.chunks]

    def _load_state(self, directory: Path, common: Mapping[str, Any]) -> dict[str, Any]:
        optimizer_format = (
            self._loadable_format(directory, common) if self._with_optimizer else None
        )
        state = self._model_and_optimizer(optimizer_format, is_loading=True)
        if self._rng_fits(common):
            state["rng"] = self._rng_state()
        whole = set(common["contents"]) == set(state)
        return load_strictly(state, directory, whole=whole)

    def _optimizer_kind(self) -> dict[str, Any]:
        optimizer = self.config.optimizer
        return {
            "optimizer": optimizer.optimizer,
            "use_distributed_optimizer": optimizer.use_distributed_optimizer,
            "bf16": optimizer.bf16,
        }

    def _loadable_format(self, directory: Path, common: Mapping[str, Any]) -> str:
        if "optimizer" not in common["contents"]:
            raise CheckpointError(
                f"{directory} has no optimizer state (saved with --no-save-optim); "
                "fix: --no-load-optim"
            )
        refuse_differences(
            directory,
            common["optimizer_kind"],
            self._optimizer_kind(),
            "use the optimizer that it was saved with, or --no-load-optim",
        )
        saved, here = common["topology"], self._topology()
        if common["optimizer_format"] == "dp_reshardable" and saved != here:
            raise CheckpointError(
                f"{directory} has an optimizer state of one layout (saved with "
                f"--use-distributed-optimizer and --overlap-grad-reduce): checkpoint {saved}, "
                f"this run {here}; fix: load it with the same layout and save it without "
                "--overlap-grad-reduce, or --no-load-optim"
            )
        if saved.get("ep") != here["ep"]:
            raise CheckpointError(
                f"{directory} has an optimizer state of other groups of experts: checkpoint "
                f"{saved}, this run {here}; fix: the same --expert-model-parallel-size, or "
                "--no-load-optim"
            )
        return common["optimizer_format"]

    def _rng_fits(self, common: Mapping[str, Any]) -> bool:
        """Generators belong to ranks: they are restored where the ranks are the same."""
        saved, here = common["topology"], self._topology()
        flags = self.config.checkpoint
        if "rng" not in common["contents"] or flags.no_load_rng or flags.finetune:
            return False
        if saved != here:
            log_warning(
                f"random number generators start anew: the checkpoint has the layout {saved}, "
                f"this run {here}"
            )
        return saved == here

    def _load_scheduler(self, state: dict[str, Any]) -> None:
        try:
            self.scheduler.load_state_dict(state)
        except AssertionError as error:
            raise CheckpointError(
                f"the learning rate schedule of the checkpoint differs from the flags ({error}); "
                "fix: --override-opt-param-scheduler takes the flags', "
                "--use-checkpoint-opt-param-scheduler the checkpoint's"
            ) from error

    def _check_common(self, common: Mapping[str, Any], directory: Path) -> None:
        check_architecture(common, directory, architecture_of(self.config))
        fix = "use the same rollouts and batches, or --finetune to start anew from the weights"
        if not self.config.checkpoint.finetune:
            refuse_differences(directory, common["data"], self.data, fix)

    def _topology(self) -> dict[str, int]:
        layout = self.config.layout
        return {
            "tp": layout.tensor_parallel,
            "pp": layout.pipeline_parallel,
            "cp": layout.context_parallel,
            "dp": layout.data_parallel,
            "ep": layout.expert_parallel,
        }

    def _rng_state(self) -> ShardedObject:
        world = self.grid.world
        return ShardedObject("rng", rng_state(), (world.world_size,), (world.rank,), replica_id=0)

    def _everyones(self, old_outputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Old outputs of every data-parallel rank's samples; the same on all ranks."""
        mine = {position: values.cpu() for position, values in old_outputs.items()}
        parts: list[Any] = [None] * self.grid.world.world_size
        dist.all_gather_object(parts, mine)
        return {position: part[position] for part in parts for position in sorted(part)}

    def _newest(self) -> Path | None:
        """Rank 0's choice, so that all ranks load the same, if every byte of it is as written."""
        found: list[Any] = [None]
        if self.grid.is_writer:
            try:
                found[0] = usable_checkpoints(Path(self.config.checkpoint.load))
            except CheckpointError as error:
                found[0] = error
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], CheckpointError):
            raise found[0]
        complaints = []
        for directory in found[0]:
            if (complaint := contents_complaint(directory)) is None:
                return directory
            log_warning(f"{complaint}; not loading it")
            complaints.append(complaint)
        if complaints:
            raise CheckpointError(
                f"{'; '.join(complaints)}; {self.config.checkpoint.load} holds no other complete "
                f"checkpoint; {FIX}"
            )
        return None
