"""How a rule is written, checked and reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Args:
        flag: the flag as it is written on a command line, or what else is wrong.
        rule: what must hold.
        given: the value, and where it comes from.
        fix: what to do.
        on_machine: whether it may differ from one machine of the job to the next (a path, a GPU).
    """

    flag: str
    rule: str
    given: str
    fix: str
    on_machine: bool = False

    def __str__(self) -> str:
        """Two lines: flag, rule and value; and the fix."""
        return f"{self.flag} {self.rule}: {self.given}\n      fix: {self.fix}"


def is_same_place(directory: str | None, other: str | None) -> bool:
    """Whether two paths lead to one directory, however they are written; None leads nowhere."""
    return bool(directory and other) and os.path.realpath(directory) == os.path.realpath(other)


class UnreadableError(Exception):
    """A rule asked for a flag whose value is already reported as wrong or missing."""


class FlagView:
    """Flags as attributes, and what follows from them; a wrong one raises UnreadableError."""

    def __init__(self, values: Mapping[str, Any], unreadable: frozenset[str]) -> None:
        self._values = values
        self._unreadable = unreadable

    def __getattr__(self, name: str) -> Any:
        """The value of flag `name`."""
        if name in self._unreadable:
            raise UnreadableError(name)
        return self._values[name]

    def __getitem__(self, name: str) -> Any:
        """The same, for the `{name}` of texts."""
        return getattr(self, name)

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline parallel size."""
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        """Model chunks per pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def cp(self) -> int:
        """Context parallel size."""
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        """Expert parallel size."""
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        """Tensor parallel size of experts."""
        return self.expert_tensor_parallel_size or self.tp

    @property
    def rotated(self) -> int:
        """Channels of a head that rotary embedding turns."""
        return int(
            (self.kv_channels or self.hidden_size // self.num_attention_heads) * self.rotary_percent
        )

    @property
    def rollout_samples(self) -> int | None:
        """Samples of a rollout, where the flags say."""
        if self.rollout_batch_size is None or self.n_samples_per_prompt is None:
            return None
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def steps_known(self) -> int | None:
        """Steps over which the learning rate decays, where the flags say."""
        return self.lr_decay_iters or self.train_iters

    @property
    def comes_during_run(self) -> bool:
        """Whether rollouts come while the run trains."""
        return self.rollout_watch is not None or self.rollout_engine is not None

    @property
    def steps_foreseen(self) -> bool:
        """Whether the number of optimizer steps follows from flags and files."""
        sizes_known = self.rollout_samples is not None and self.num_rollout is not None
        return not self.comes_during_run or self.train_iters is not None or sizes_known

    @property
    def layout_stages(self) -> int | None:
        """Stages of --pipeline-model-parallel-layout; None where core will say what is wrong."""
        layout = self.pipeline_model_parallel_layout
        try:
            return layout and PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        except AssertionError:
            return None

    @property
    def even_stages(self) -> bool:
        """Whether layers are to be divided evenly over pipeline stages."""
        return not (
            self.num_layers_in_first_pipeline_stage
            or self.num_layers_in_last_pipeline_stage
            or self.account_for_embedding_in_pipeline_split
            or self.account_for_loss_in_pipeline_split
            or self.pipeline_model_parallel_layout
        )


@dataclass(frozen=True)
class Rule:
    """One rule of one flag; in its texts `{name}` is the value of another.

    Args:
        flag: the flag that is wrong, by its field's name.
        broken: whether it is.
        rule: what must hold.
        fix: what to do.
    """

    flag: str
    broken: Callable[[FlagView], Any]
    rule: str
    fix: str

    def is_broken(self, flags: FlagView) -> bool:
        """Whether the rule is broken; a flag that is wrong in itself breaks no rule of others."""
        try:
            return bool(self.broken(flags))
        except UnreadableError:
            return False
