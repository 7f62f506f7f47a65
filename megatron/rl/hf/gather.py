"""Brings the tensors of a sharded model to one writer, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.rl.hf.binding import Weight, bind_weights
from megatron.rl.hf.files import Slot
from megatron.rl.hf.mapping import WeightTable

T = TypeVar("T")


@dataclass(frozen=True)
class WriterGroups:
    """The ranks of one replica of the model; the first of both groups is the writer.

    Args:
        tp: tensor parallel group; None: one rank.
        pp: pipeline group; None: one stage.
    """

    tp: ProcessGroup | None
    pp: ProcessGroup | None

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor parallel group."""
        return 0 if self.tp is None else self.tp.rank()

    @property
    def stage(self) -> int:
        """Rank in the pipeline group."""
        return 0 if self.pp is None else self.pp.rank()

    @property
    def is_writer(self) -> bool:
        """Whether tensors arrive at this rank."""
        return self.tp_rank == 0 and self.stage == 0

    def from_writer(self, make: Callable[[], T]) -> T:
        """What `make` returns on the writer, or its ValueError or OSError, on every rank."""
        outcome: list[Any] = [None]
        if self.is_writer:
            try:
                outcome = [make()]
            except (ValueError, OSError) as error:
                outcome = [error]
        for group in (self.pp, self.tp):
            if group is not None:
                dist.broadcast_object_list(outcome, group=group, group_src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def from_stages(self, make: Callable[[], T]) -> list[T]:
        """What `make` returns on every stage, or the ValueError of one, on every rank."""
        try:
            own: Any = make()
        except ValueError as error:
            own = error
        outcomes: list[Any] = [own]
        if self.pp is not None:
            outcomes = [None] * self.pp.size()
            dist.all_gather_object(outcomes, own, group=self.pp)
        for outcome in outcomes:
            if isinstance(outcome, ValueError):
                raise outcome
        return outcomes


class ModelTensors:
    """The tensors of a live model, unsharded, as they arrive at the writer.

    Iterating communicates: every rank of the groups must do it, to the end. The writer gets every
    tensor of the model once, as (name, tensor); the other ranks get nothing.
    """

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        architecture: Mapping[str, Any],
        slots: Mapping[str, Slot],
        groups: WriterGroups,
    ) -> None:
        self._table = WeightTable.of(architecture)
        self._slots = slots
        self._groups = groups
        self._weights: list[Weight] = []

        def bind() -> list[tuple[str, ...]]:
            self._weights += bind_weights(model_chunks, self._table, architecture)
            return [weight.tensors for weight in self._weights]

        self._stages = groups.from_stages(bind)
        everywhere = {name for stage in self._stages for names in stage for name in names}
        for name in self._table.tensors(range(self._table.num_layers), first=True, last=True):
            if name not in everywhere:
                raise ValueError(f"every tensor must be in a pipeline stage: missing={name}")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        done: set[str] = set()
        for stage, stage_tensors in enumerate(self._stages):
            for position, names in enumerate(stage_tensors):
                if done.issuperset(names):
                    continue  # the last stage's copy of a tied embedding
                done.update(names)
                own = self._weights[position] if stage == self._groups.stage else None
                tensors = self._to_stage_zero(stage, names, self._whole(own) if own else [])
                if self._groups.is_writer:
                    yield from zip(names, tensors, strict=True)

    def _whole(self, weight: Weight) -> list[Tensor]:
        """The tensors of a parameter on the stage's first tensor parallel rank, else none."""
        row, group = weight.row, self._groups.tp
        shard = weight.parameter.detach().contiguous()
        shards = [shard]
        if row.tp_dim is not None and group is not None:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.gather(shard, shards if group.rank() == 0 else None, group=group, group_dst=0)
        if self._groups.tp_rank != 0:
            return []
        if row.tp_dim is None:
            return list(row.join.divide(shard, self._table.sizes))
        num_blocks = row.num_blocks(len(shards), self._table.sizes)
        ranks_per_block = len(shards) // num_blocks
        blocks = [
            torch.cat(shards[first : first + ranks_per_block], row.tp_dim)
            for first in range(0, len(shards), ranks_per_block)
        ]
        divided = [row.join.divide(block, self._table.sizes) for block in blocks]
        whole = [torch.cat(parts, row.tp_dim) for parts in zip(*divided, strict=True)]
        return [part[: self._table.sizes.vocab] for part in whole] if row.is_padded else whole

    def _to_stage_zero(
        self, stage: int, names: tuple[str, ...], tensors: list[Tensor]
    ) -> list[Tensor]:
        """Send a stage's tensors, already cast, over the pipeline group."""
        if stage == 0 or self._groups.tp_rank != 0:
            return tensors
        slots = [self._slots[name] for name in names]
        if stage == self._groups.stage:
            for slot, tensor in zip(slots, tensors, strict=True):
                cast = tensor.to(slot.dtype).contiguous()
                dist.send(cast, group=self._groups.pp, group_dst=0)
            return []
        if not self._groups.is_writer:
            return []
        device = self._weights[0].parameter.device
        received = [torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in slots]
        for tensor in received:
            dist.recv(tensor, group=self._groups.pp, group_src=stage)
        return received
