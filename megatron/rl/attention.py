"""Core attention over packed samples, for every layout of the rows.

Keys and values are gathered over the context-parallel group into pack order (backward: a
reduce-scatter); every run of rows then attends to the keys of its own sample, causally by position.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.rl.rotary import rotate
from slime_loss import SequenceLayout


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sample that this rank holds, and the keys they may see.

    `first:last` are rows of the local stream in pack order; `keys:keys_end` are pack rows from the
    sample's first token to the run's last one, so causality is aligned at the bottom right.
    """

    first: int
    last: int
    keys: int
    keys_end: int

    @property
    def is_whole_sample(self) -> bool:
        """Whether the run begins at its sample's first token."""
        return self.last - self.first == self.keys_end - self.keys


def runs_of(layout: SequenceLayout) -> tuple[Tensor, list[Run]]:
    """The local rows of a layout as runs.

    Returns:
        `order` [valid rows] int64, the local rows that hold a token, in pack order; and the runs,
        which index into `order`.
    """
    held = layout.token_index >= 0
    order = held.nonzero().squeeze(1)
    order = order[layout.token_index[order].argsort()]
    pack_rows = layout.token_index[order]
    lengths = torch.tensor(layout.total_lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    sample = torch.bucketize(pack_rows, ends, right=True)
    begins_run = torch.ones_like(pack_rows, dtype=torch.bool)
    begins_run[1:] = (pack_rows.diff() != 1) | (sample.diff() != 0)
    first = begins_run.nonzero().squeeze(1)
    last = torch.cat([first, first.new_tensor([len(order)])])[1:]
    keys = (ends - lengths)[sample[first]]
    bounds = torch.stack([first, last, keys, pack_rows[last - 1] + 1], dim=1)
    runs = [Run(*of_run) for of_run in bounds.tolist()]
    return order, runs


@dataclass
class PackedRows(PackedSeqParams):
    """What attention must know of a micro-batch; travels as core's `packed_seq_params`.

    Made by `PackedRows.of`. `layout` decides which pack row each local row holds; `order` and
    `runs` are derived from it once and used by every layer, as are the rotary tables.
    """

    layout: SequenceLayout | None = None
    order: Tensor | None = None
    runs: tuple[Run, ...] = ()
    cosines: Tensor | None = None
    sines: Tensor | None = None

    @classmethod
    def of(
        cls,
        layout: SequenceLayout,
        qkv_format: str,
        tables: tuple[Tensor, Tensor],
        device: torch.device,
    ) -> PackedRows:
        """Derive runs and move everything that the layers index with to `device`."""
        order, runs = runs_of(layout)
        cu_seqlens = layout.cu_seqlens.to(device)
        cosines, sines = tables
        return cls(
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            layout=layout,
            order=order.to(device),
            runs=tuple(runs),
            cosines=cosines.to(device),
            sines=sines.to(device),
        )

    def attend(
        self, attention: PackedAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of the local rows, whose queries and keys are rotated already.

        Args:
            attention: the layer's.
            query: [t, heads/tp, d].
            key: [t, groups/tp, d]; value is alike.
            value: see key.

        Returns:
            [t, heads/tp, d]; zero where a row holds no token.
        """
        keys_and_values = self.layout.gather(torch.stack([key, value], dim=1), attention.cp_group)
        pack_keys, pack_values = keys_and_values.unbind(1)
        if self.runs:
            attended = attention.attend(
                query[self.order], pack_keys, pack_values, self.runs, attention.softmax_scale
            )
        else:  # a rank that holds padding alone still takes part in the gather's backward
            attended = query[self.order] + keys_and_values[:0].sum()
        return torch.zeros_like(query).index_copy(0, self.order, attended)


class PackedAttention(torch.nn.Module):
    """Replaces core's `core_attention` through a ModuleSpec; holds no parameter.

    Shapes: thd q [t, heads/tp, d], k and v [t, groups/tp, d]; bshd the same with [s, b] for [t].
    Communicates over the context-parallel group only. Core passes what other attention modules
    need as well.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,  # noqa: ARG002 -- always causal here
        attention_type: str,  # noqa: ARG002 -- core passes it
        *,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp
        self.attend = choose_attention(config.attention_backend)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 -- core passes it
        *,
        packed_seq_params: PackedRows,
        **_: Any,
    ) -> Tensor:
        """Attend; see the module docstring.

        Returns:
            [t, heads * d] for thd, [s, b, heads * d] for bshd.
        """
        rows = packed_seq_params
        leading = query.shape[:-2]
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        query = rotate(query, rows.cosines, rows.sines)
        key = rotate(key, rows.cosines, rows.sines)
        output = rows.attend(self, query, key, value)
        return output.reshape(*leading, -1)


Attend = Callable[[Tensor, Tensor, Tensor, tuple[Run, ...], float | None], Tensor]


def choose_attention(backend: AttnBackend) -> Attend:
    """The attention function of `--attention-backend`.

    `flash` needs flash-attn and a GPU; `auto` takes it when both are there and PyTorch's own
    attention otherwise; `unfused` and `local` mean PyTorch's.
    """
    available = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    if backend is AttnBackend.flash and not available:
        raise ValueError(
            "attention_backend flash needs a GPU and the flash-attn package: "
            f"attention_backend={backend.name}"
        )
    if backend in (AttnBackend.flash, AttnBackend.auto) and available:
        return flash_attention
    return sdpa_attention


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], softmax_scale: float | None
) -> Tensor:
    """PyTorch's attention, one call a run.

    Args:
        query: [valid rows, heads, d], in pack order.
        key: [pack rows, groups, d].
        value: the same.
        runs: see `Run`.
        softmax_scale: multiplies q.k; None is 1/sqrt(d).

    Returns:
        [valid rows, heads, d].
    """
    outputs = []
    for run in runs:
        q, k, v = (
            x.transpose(0, 1)[None]
            for x in (
                query[run.first : run.last],
                key[run.keys : run.keys_end],
                value[run.keys : run.keys_end],
            )
        )
        mask = None
        if not run.is_whole_sample:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            mask = mask.tril(diagonal=k.shape[-2] - q.shape[-2])
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], softmax_scale: float | None
) -> Tensor:
    """flash-attn's variable-length kernel, all runs in one call; the shapes of `sdpa_attention`.

    The kernel aligns causality at the bottom right, as runs need. A sample of which this rank
    holds two runs (zigzag) has its keys laid out twice.
    """
    from flash_attn import flash_attn_varlen_func

    query_lengths = torch.tensor([run.last - run.first for run in runs])
    key_lengths = torch.tensor([run.keys_end - run.keys for run in runs])

    def offsets(lengths: Tensor) -> Tensor:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(query.device, torch.int32)

    seen = [slice(run.keys, run.keys_end) for run in runs]
    return flash_attn_varlen_func(
        query,
        torch.cat([key[part] for part in seen]),
        torch.cat([value[part] for part in seen]),
        offsets(query_lengths),
        offsets(key_lengths),
        int(query_lengths.max()),
        int(key_lengths.max()),
        softmax_scale=softmax_scale,
        causal=True,
    )
