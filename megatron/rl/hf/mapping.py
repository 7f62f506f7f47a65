"""Which Hugging Face tensors a Megatron parameter is made of; one table for load and export.

A tensor parallel rank's shard of a parameter is made of the same shards of its tensors, so the
functions that join and divide tensors never see the tensor parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The dimensions that name the shapes below."""

    hidden: int
    ffn: int
    query: int
    key: int
    head: int
    vocab: int

    @classmethod
    def of(cls, architecture: Mapping[str, Any]) -> Sizes:
        """Sizes of an architecture (see `megatron.rl.hf.architectures`)."""
        head = architecture["kv_channels"]
        return cls(
            hidden=architecture["hidden_size"],
            ffn=architecture["ffn_hidden_size"],
            query=architecture["num_attention_heads"] * head,
            key=architecture["num_query_groups"] * head,
            head=head,
            vocab=architecture["vocab_size"],
        )

    @property
    def groups(self) -> int:
        """Query groups of the whole model."""
        return self.key // self.head


@dataclass(frozen=True)
class Join:
    """How several tensors lie in one parameter: `divide(join(tensors))` gives them back.

    Args:
        join: (tensors, sizes) -> parameter, of whole tensors or of one rank's shards.
        divide: (parameter, sizes) -> tensors.
    """

    join: Callable[[Sequence[Tensor], Sizes], Tensor]
    divide: Callable[[Tensor, Sizes], Sequence[Tensor]]


def join_qkv(tensors: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Interleave by query group: the queries of a group, then its key, then its value.

    Args:
        tensors: query [groups * queries * head, ...], key and value [groups * head, ...].
        sizes: for the head size.

    Returns:
        [groups * (queries + 2) * head, ...].
    """
    groups = tensors[1].shape[0] // sizes.head
    return torch.cat([part.unflatten(0, (groups, -1)) for part in tensors], dim=1).flatten(0, 1)


def divide_qkv(parameter: Tensor, sizes: Sizes) -> list[Tensor]:
    """The inverse of `join_qkv`."""
    rows = [sizes.query // sizes.groups, sizes.head, sizes.head]
    by_group = parameter.unflatten(0, (-1, sum(rows)))
    return [part.flatten(0, 1) for part in by_group.split(rows, dim=1)]


ONE = Join(lambda tensors, _: tensors[0], lambda parameter, _: [parameter])
QKV = Join(join_qkv, divide_qkv)
GATE_UP = Join(lambda tensors, _: torch.cat(list(tensors)), lambda parameter, _: parameter.chunk(2))


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a checkpoint: its name (in a layer: below the layer's) and its shape."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        megatron: the parameter's names; core's local and transformer-engine layers differ in one.
        tensors: what it is made of, in order.
        join: how they lie in it.
        tp_dim: the dimension divided over tensor parallel ranks, of tensors and parameter alike;
            None: every rank holds the whole.
    """

    megatron: tuple[str, ...]
    tensors: tuple[HFTensor, ...]
    join: Join = ONE
    tp_dim: int | None = None

    @property
    def is_padded(self) -> bool:
        """Whether the parameter has rows beyond the vocabulary."""
        return self.tensors[0].dims[0] == "vocab"

    def num_blocks(self, tp_size: int, sizes: Sizes) -> int:
        """Parts into which the tensors are divided over `tp_size` ranks.

        One a rank; where query groups are fewer than ranks, several ranks share a group's block.
        """
        return min(tp_size, sizes.groups) if self.join is QKV else tp_size


def _hf(name: str, *dims: str) -> HFTensor:
    return HFTensor(name, dims)


EMBEDDING = Row(
    ("embedding.word_embeddings.weight",),
    (_hf("model.embed_tokens.weight", "vocab", "hidden"),),
    tp_dim=0,
)
FINAL_NORM = Row(("decoder.final_layernorm.weight",), (_hf("model.norm.weight", "hidden"),))
OUTPUT = Row(("output_layer.weight",), (_hf("lm_head.weight", "vocab", "hidden"),), tp_dim=0)
# the copy of the embedding that the last pipeline stage keeps
TIED_OUTPUT = Row(("output_layer.weight",), EMBEDDING.tensors, tp_dim=0)
LAYER = (
    Row(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        (_hf("input_layernorm.weight", "hidden"),),
    ),
    Row(
        ("self_attention.linear_qkv.weight",),
        (
            _hf("self_attn.q_proj.weight", "query", "hidden"),
            _hf("self_attn.k_proj.weight", "key", "hidden"),
            _hf("self_attn.v_proj.weight", "key", "hidden"),
        ),
        QKV,
        tp_dim=0,
    ),
    Row(
        ("self_attention.linear_proj.weight",),
        (_hf("self_attn.o_proj.weight", "hidden", "query"),),
        tp_dim=1,
    ),
    Row(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        (_hf("post_attention_layernorm.weight", "hidden"),),
    ),
    Row(
        ("mlp.linear_fc1.weight",),
        (
            _hf("mlp.gate_proj.weight", "ffn", "hidden"),
            _hf("mlp.up_proj.weight", "ffn", "hidden"),
        ),
        GATE_UP,
        tp_dim=0,
    ),
    Row(
        ("mlp.linear_fc2.weight",),
        (_hf("mlp.down_proj.weight", "hidden", "ffn"),),
        tp_dim=1,
    ),
)
# Qwen2, and Llama with biases
QKV_BIAS = (
    Row(
        ("self_attention.linear_qkv.bias",),
        (
            _hf("self_attn.q_proj.bias", "query"),
            _hf("self_attn.k_proj.bias", "key"),
            _hf("self_attn.v_proj.bias", "key"),
        ),
        QKV,
        tp_dim=0,
    ),
)
# Llama with biases
LINEAR_BIAS = (
    Row(("self_attention.linear_proj.bias",), (_hf("self_attn.o_proj.bias", "hidden"),)),
    Row(
        ("mlp.linear_fc1.bias",),
        (_hf("mlp.gate_proj.bias", "ffn"), _hf("mlp.up_proj.bias", "ffn")),
        GATE_UP,
        tp_dim=0,
    ),
    Row(("mlp.linear_fc2.bias",), (_hf("mlp.down_proj.bias", "hidden"),)),
)
# Qwen3
QK_NORM = (
    Row(("self_attention.q_layernorm.weight",), (_hf("self_attn.q_norm.weight", "head"),)),
    Row(("self_attention.k_layernorm.weight",), (_hf("self_attn.k_norm.weight", "head"),)),
)


@dataclass(frozen=True)
class WeightTable:
    """The table of one architecture.

    Args:
        sizes: what the shapes mean.
        num_layers: of the whole model.
        tied: the output layer uses the embedding's weight.
        layer: the rows of every layer.
    """

    sizes: Sizes
    num_layers: int
    tied: bool
    layer: tuple[Row, ...]

    @classmethod
    def of(cls, architecture: Mapping[str, Any]) -> WeightTable:
        """The table of an architecture (see `megatron.rl.hf.architectures`)."""
        layer = LAYER
        if architecture["add_qkv_bias"] or architecture["add_bias_linear"]:
            layer += QKV_BIAS
        if architecture["add_bias_linear"]:
            layer += LINEAR_BIAS
        if architecture["qk_layernorm"]:
            layer += QK_NORM
        return cls(
            sizes=Sizes.of(architecture),
            num_layers=architecture["num_layers"],
            tied=not architecture["untie_embeddings_and_output_weights"],
            layer=layer,
        )

    @property
    def output(self) -> Row:
        """The row of the output layer's own parameter."""
        return TIED_OUTPUT if self.tied else OUTPUT

    def tensors(
        self, layers: Iterable[int], *, first: bool, last: bool
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a part of the model is made of.

        Args:
            layers: global layer numbers, from 0.
            first: with the embedding.
            last: with the final norm and the output layer.

        Returns:
            Shape by full tensor name, unpadded and undivided.
        """
        tensors = [(t.name, t.dims) for t in EMBEDDING.tensors if first]
        for number in layers:
            prefix = layer_prefix(number)
            tensors += [(prefix + t.name, t.dims) for row in self.layer for t in row.tensors]
        if last:
            rows = (FINAL_NORM, self.output)
            tensors += [(t.name, t.dims) for row in rows for t in row.tensors]
        return {name: tuple(getattr(self.sizes, dim) for dim in dims) for name, dims in tensors}


def layer_prefix(number: int) -> str:
    """What the tensor names of a layer begin with; layers count from 0."""
    return f"model.layers.{number}."
