"""Weights of a Hugging Face directory into a live model, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.rl.hf.architectures import architecture_from_hf
from megatron.rl.hf.binding import Weight, bind_weights
from megatron.rl.hf.files import Slot, TensorReader, read_layout
from megatron.rl.hf.mapping import OUTPUT, Sizes, WeightTable
from megatron.rl.logging import progress

# old Llama checkpoints store the rotary frequencies, which follow from config.json
CARRIED_SUFFIX = ".rotary_emb.inv_freq"


def load_hf_weights(
    model_chunks: Sequence[nn.Module],
    directory: Path,
    *,
    tp_group: ProcessGroup | None = None,
    show_progress: bool = False,
) -> None:
    """Fill every parameter of this rank; reads only the rows and columns that the rank holds.

    Parameters keep their dtype and device; rows beyond the vocabulary become zero. Communicates
    over no group.

    Args:
        model_chunks: this rank's GPTModels (one, or one per virtual pipeline stage), wrapped or
            not. An optimizer with parameter copies of its own must be made, or reloaded, after.
        directory: with config.json and safetensors.
        tp_group: whose rank and size say which shard is this rank's; None: one rank.
        show_progress: draw a progress bar.

    Raises:
        ValueError: directory and model do not fit; the tensor, parameter or field is named.
    """
    directory = Path(directory)
    architecture = architecture_from_hf(directory)
    table = WeightTable.of(architecture)
    layout = read_layout(directory)
    check_tensors(directory, table, layout.slots)
    weights = bind_weights(model_chunks, table, architecture)
    shards = ShardReader(TensorReader(directory, layout), table.sizes, tp_group)
    has_tied_copy = any(is_tied_copy(name, table) for name in layout.slots)
    for weight in progress(weights, desc="loading weights", unit="weight", is_writer=show_progress):
        shard = shards.read(weight)
        if has_tied_copy:
            _check_tied_copy(shards, weight, shard)
        if shard.shape != weight.parameter.shape:
            raise ValueError(
                f"{weight.name} must have the shape of its shard of {', '.join(weight.tensors)}: "
                f"parameter={tuple(weight.parameter.shape)}, shard={tuple(shard.shape)}"
            )
        with torch.no_grad():
            weight.parameter.copy_(shard)


def check_tensors(directory: Path, table: WeightTable, slots: Mapping[str, Slot]) -> None:
    """Compare the tensors of a checkpoint with those that its architecture has.

    Raises:
        ValueError: one is missing, not used, or of another shape.
    """
    shapes = table.tensors(range(table.num_layers), first=True, last=True)
    for name, shape in shapes.items():
        if name not in slots:
            raise ValueError(f"{directory} must hold every tensor of its model: missing={name}")
        if slots[name].shape != shape:
            raise ValueError(
                f"{directory}: {name} must have the shape that config.json says: "
                f"tensor={slots[name].shape}, config.json={shape}"
            )
    unused = sorted(name for name in slots.keys() - shapes.keys() if not is_carried(name, table))
    if unused:
        raise ValueError(
            f"{directory} must hold no tensor that its model does not use: "
            f"unused={unused[0]}" + (f" and {len(unused) - 1} more" if unused[1:] else "")
        )


def _check_tied_copy(shards: ShardReader, weight: Weight, shard: Tensor) -> None:
    """A stored copy of a tied embedding is not read, so it must be no weight of its own."""
    copy = OUTPUT.tensors[0].name
    if weight.row.is_padded and not torch.equal(
        shards.read(replace(weight, tensors=(copy,))), shard
    ):
        raise ValueError(
            f"{copy} must equal {weight.tensors[0]} where config.json says tie_word_embeddings=true"
        )


def is_carried(name: str, table: WeightTable) -> bool:
    """Whether a tensor that no parameter is made of may lie in a checkpoint."""
    return name.endswith(CARRIED_SUFFIX) or is_tied_copy(name, table)


def is_tied_copy(name: str, table: WeightTable) -> bool:
    """Whether a tensor is the embedding, stored once more for the output layer that shares it."""
    return table.tied and name == OUTPUT.tensors[0].name


class ShardReader:
    """Reads one tensor parallel rank's shards."""

    def __init__(self, reader: TensorReader, sizes: Sizes, tp_group: ProcessGroup | None) -> None:
        self._reader = reader
        self._sizes = sizes
        self._rank = 0 if tp_group is None else tp_group.rank()
        self._size = 1 if tp_group is None else tp_group.size()

    def read(self, weight: Weight) -> Tensor:
        """This rank's shard of a parameter."""
        row = weight.row
        if row.tp_dim is None:
            tensors = [self._reader.read(name) for name in weight.tensors]
            return row.join.join(tensors, self._sizes)
        num_blocks = row.num_blocks(self._size, self._sizes)
        ranks_per_block = self._size // num_blocks
        block, position = divmod(self._rank, ranks_per_block)
        tensors = [self._read_block(weight, name, block, num_blocks) for name in weight.tensors]
        joined = row.join.join(tensors, self._sizes)
        return joined.chunk(ranks_per_block, row.tp_dim)[position]

    def _read_block(self, weight: Weight, name: str, block: int, num_blocks: int) -> Tensor:
        """One of equal parts of a tensor, after it is padded with zeros where it is padded."""
        dim = weight.row.tp_dim
        assert dim is not None
        stored = padded = self._reader.slots[name].shape[dim]
        if weight.row.is_padded:
            padded = weight.parameter.shape[dim] * self._size
            if padded < stored:
                raise ValueError(
                    f"the padded vocabulary must hold {name}: rows={stored}, {weight.name}={padded}"
                )
        length = padded // num_blocks
        start, stop = (min(edge * length, stored) for edge in (block, block + 1))
        part = self._reader.read(name, dim, start, stop)
        missing = length - (stop - start)
        return F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, missing))
