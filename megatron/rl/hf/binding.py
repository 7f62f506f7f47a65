"""The parameters of this rank's model chunks, each with the Hugging Face tensors it is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import nn

from megatron.rl.hf.mapping import EMBEDDING, FINAL_NORM, Row, WeightTable, layer_prefix
from megatron.rl.model import Critic

LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# equal sizes do not make equal models: 8 heads of 16 and 4 heads of 32 have the same shapes
SAME_IN_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
)


@dataclass(frozen=True)
class Weight:
    """One parameter of this rank.

    Args:
        name: its Megatron name with the layer's global number.
        parameter: its storage, this rank's shard.
        row: the line of the table that it is.
        tensors: full names of the tensors that it is made of.
    """

    name: str
    parameter: nn.Parameter
    row: Row
    tensors: tuple[str, ...]


def bind_weights(
    model_chunks: Sequence[nn.Module], table: WeightTable, architecture: Mapping[str, Any]
) -> list[Weight]:
    """Find every parameter of this rank in the table.

    Args:
        model_chunks: GPTModels, wrapped (Float16Module, DistributedDataParallel) or not.
        table: of the architecture.
        architecture: what the checkpoint holds.

    Returns:
        One weight a parameter, in the order of the parameters.

    Raises:
        ValueError: the model is built differently, a parameter has no line in the table, or the
            model lacks the parameter for a tensor.
    """
    weights = []
    for chunk in model_chunks:
        model = _unwrap(chunk)
        _check_same_model(model, architecture)
        weights += _bind_chunk(model, table)
    return weights


def _unwrap(chunk: nn.Module) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        inner = getattr(chunk, "module", None)
        if not isinstance(inner, nn.Module):
            raise ValueError(f"a model chunk must hold a GPTModel: chunk={type(chunk).__name__}")
        chunk = inner
    return chunk


def _check_same_model(model: GPTModel, architecture: Mapping[str, Any]) -> None:
    wanted = {field: architecture[field] for field in SAME_IN_MODEL}
    wanted["layernorm_zero_centered_gamma"] = False
    built = {field: getattr(model.config, field) for field in wanted}
    if not isinstance(model, Critic):
        wanted["untie_embeddings_and_output_weights"] = architecture[
            "untie_embeddings_and_output_weights"
        ]
        built["untie_embeddings_and_output_weights"] = not model.share_embeddings_and_output_weights
    for field, value in wanted.items():
        if built[field] != value:
            raise ValueError(
                f"{field} must be the same in model and checkpoint: "
                f"model={built[field]!r}, checkpoint={value!r}"
            )


def _bind_chunk(model: GPTModel, table: WeightTable) -> list[Weight]:
    layer_rows = {name: row for row in table.layer for name in row.megatron}
    outer_rows = {
        name: row for row in (EMBEDDING, FINAL_NORM, table.output) for name in row.megatron
    }
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]  # core counts from 1
    weights = []
    for name, parameter in model.named_parameters():
        if isinstance(model, Critic) and name in table.output.megatron:
            continue  # its value head, which no language model has
        in_layer = LAYER_NAME.fullmatch(name)
        if in_layer:
            number, short = numbers[int(in_layer[1])], in_layer[2]
            row, prefix = layer_rows.get(short), layer_prefix(number)
            name = f"decoder.layers.{number}.{short}"
        else:
            row, prefix = outer_rows.get(name), ""
        if row is None:
            raise ValueError(f"a parameter must have a Hugging Face counterpart: parameter={name}")
        tensors = tuple(prefix + tensor.name for tensor in row.tensors)
        weights.append(Weight(name, parameter, row, tensors))
    bound = {tensor for weight in weights for tensor in weight.tensors}
    of_chunk = table.tensors(numbers, first=model.pre_process, last=model.post_process)
    if isinstance(model, Critic):
        bound |= {tensor.name for tensor in table.output.tensors}
    for tensor in of_chunk:
        if tensor not in bound:
            raise ValueError(f"a tensor must have a parameter in the model: tensor={tensor}")
    return weights
