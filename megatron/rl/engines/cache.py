"""Keys and values of the tokens so far, so that a token more costs one row and not a whole pass.

Both kinds of rows travel through the model as core's `packed_seq_params`, as those of training do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.rl.attention import PackedAttention, PackedRows


@dataclass
class KeyValueCache:
    """Keys and values of a batch of sequences, by layer.

    Args:
        capacity: the most tokens of a sequence.
        layers: keys and values [sequences, capacity, groups/tp, d] by layer number; filled by the
            first pass of a prompt.
    """

    capacity: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def select(self, sequences: Tensor) -> None:
        """Keep these sequences, in this order; one may be wanted several times.

        Args:
            sequences: int64 [wanted].
        """
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = keys[sequences], values[sequences]


@dataclass
class PromptRows(PackedRows):
    """Whole prompts, packed; attention keeps their keys and values. Made by `PackedRows.of`."""

    cache: KeyValueCache | None = None

    def attend(
        self, attention: PackedAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention within each prompt; the cache holds the prompts afterwards."""
        kept = [self._padded(rows) for rows in (key, value)]
        self.cache.layers[attention.layer_number] = kept[0], kept[1]
        attended = attention.attend(
            query[self.order], key, value, self.runs, attention.softmax_scale
        )
        return torch.zeros_like(query).index_copy(0, self.order, attended)

    def _padded(self, rows: Tensor) -> Tensor:
        lengths = self.layout.total_lengths
        padded = rows.new_zeros(len(lengths), self.cache.capacity, *rows.shape[1:])
        start = 0
        for sequence, length in enumerate(lengths):
            padded[sequence, :length] = rows[start : start + length]
            start += length
        return padded


@dataclass
class TokenRows(PackedRows):
    """One new token of each sequence, at `positions` [sequences]; attention adds it to the cache.

    Rows beyond the cache's sequences are padding, which sequence parallelism may need.
    """

    cache: KeyValueCache | None = None
    positions: Tensor | None = None

    def attend(
        self, attention: PackedAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of each token to its sequence so far and to itself."""
        keys, values = self.cache.layers[attention.layer_number]
        count = len(self.positions)
        every = torch.arange(count, device=query.device)
        keys[every, self.positions] = key[:count]
        values[every, self.positions] = value[:count]
        longest = int(self.positions.max()) + 1
        seen = torch.arange(longest, device=query.device) <= self.positions[:, None]
        attended = scaled_dot_product_attention(
            query[:count, :, None],
            keys[:, :longest].transpose(1, 2),
            values[:, :longest].transpose(1, 2),
            attn_mask=seen[:, None, None],
            scale=attention.softmax_scale,
            enable_gqa=True,
        )
        output = torch.zeros_like(query)
        output[:count] = attended[:, :, 0]
        return output
