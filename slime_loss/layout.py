"""Which rank holds which token: one index map per layout, everything else derived from it.

A pack lays samples end to end, T_total = sum(total_lengths) rows. A layout cuts it into equally
long local streams, one a context-parallel rank. Layouts take ranks as integers, so one process
can build all of them.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.collectives import gather_rows, group_rank, group_size

PADDING_ROW = -1
"""The token_index of a local row that holds no token of the pack."""


class SequenceLayout(ABC):
    """A pack of samples, and the rows of it that one context-parallel rank holds.

    A subclass says which pack row each local row of each rank holds; every pack row must be held
    by exactly one rank, and every rank must hold equally many rows, at least pad_to_multiple_of.

    Attributes:
        total_lengths: Tokens of each sample, prompt and response.
        cp_rank: The rank this layout is of.
        cp_size: Number of ranks that share the pack.
        pad_to_multiple_of: The local number of rows is a multiple of this.
    """

    def __init__(
        self,
        total_lengths: Sequence[int],
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        pad_to_multiple_of: int = 1,
    ) -> None:
        self.total_lengths = tuple(operator.index(length) for length in total_lengths)
        self.cp_rank = cp_rank
        self.cp_size = cp_size
        self.pad_to_multiple_of = pad_to_multiple_of
        self._check()

    @cached_property
    def token_index(self) -> Int64[Tensor, " rows"]:
        """[num_rows] int64, the pack row of each local row; -1 at padding rows."""
        return self.rank_token_index(self.cp_rank)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Local rows T_local, the same on every rank; known from the lengths alone."""

    @abstractmethod
    def rank_token_index(self, cp_rank: int) -> Int64[Tensor, " rows"]:
        """The pack row of each local row of rank `cp_rank`; -1 at padding rows."""

    @property
    @abstractmethod
    def cu_seqlens(self) -> Int32[Tensor, " samples_plus_one"]:
        """[num_samples + 1], where each sample starts and the last one ends, for attention."""

    @property
    def pack_rows(self) -> int:
        """Rows of the whole pack T_total, without padding."""
        return sum(self.total_lengths)

    def shard(
        self, stream: Shaped[Tensor, " pack_rows *rest"], fill: int | float = 0
    ) -> Shaped[Tensor, " rows *rest"]:
        """This rank's rows of a stream. Differentiable; no communication.

        Args:
            stream: [T_total, ...] of any dtype.
            fill: What padding rows hold.

        Returns:
            [T_local, ...], of the same dtype and connected to the stream even where no row of it
            is held here.

        Raises:
            ValueError: The stream has another number of rows.
        """
        self._check_rows("stream", stream, "pack_rows", self.pack_rows)
        # Padding picks one more row: an empty pack needs no case of its own.
        padding = stream.new_full((1, *stream.shape[1:]), fill)
        index = torch.where(self.token_index == PADDING_ROW, self.pack_rows, self.token_index)
        return torch.cat([stream, padding]).index_select(0, index.to(stream.device))

    def gather(
        self, local: Shaped[Tensor, " rows *rest"], cp_group: ProcessGroup | None
    ) -> Shaped[Tensor, " pack_rows *rest"]:
        """The whole pack's stream from every rank's rows; the inverse of shard. Differentiable.

        Communicates over cp_group: one all-gather forward, one reduce-scatter backward, in which
        the gradients of every rank's copy are summed to the rank that owns the row.

        Args:
            local: [T_local, ...] of any dtype.
            cp_group: The group of cp_size ranks; None is allowed when cp_size is 1.

        Returns:
            [T_total, ...], the same on every rank.

        Raises:
            ValueError: Another number of rows, or a group that is not this layout's.
        """
        self._check_rows("local", local, "num_rows", self.num_rows)
        self._check_group(cp_group)
        return self.join(gather_rows(local, cp_group))

    def join(self, rows: Shaped[Tensor, " all_rows *rest"]) -> Shaped[Tensor, " pack_rows *rest"]:
        """The pack's stream from all ranks' local rows, laid one rank after the other.

        Args:
            rows: [cp_size * T_local, ...].

        Returns:
            [T_total, ...].

        Raises:
            ValueError: The rows are not cp_size * num_rows in number.
        """
        self._check_rows("rows", rows, "cp_size * num_rows", self.cp_size * self.num_rows)
        return rows.index_select(0, self._owner_rows.to(rows.device))

    @cached_property
    def _owner_rows(self) -> Int64[Tensor, " pack_rows"]:
        """Where each pack row stands when all ranks' rows are laid one rank after the other."""
        held = torch.cat([self.rank_token_index(rank) for rank in range(self.cp_size)])
        positions = (held != PADDING_ROW).nonzero().squeeze(1)
        return positions[held[positions].argsort()]

    def _padded_up(self, num_rows: int) -> int:
        """The least positive multiple of pad_to_multiple_of that holds num_rows."""
        return _round_up(max(num_rows, 1), self.pad_to_multiple_of)

    def _check(self) -> None:
        for name in ("cp_size", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: {name}={getattr(self, name)}")
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(
                f"cp_rank must be in [0, cp_size): cp_rank={self.cp_rank}, cp_size={self.cp_size}"
            )
        for sample, length in enumerate(self.total_lengths):
            if length < 1:
                raise ValueError(f"total_lengths must be >= 1: total_lengths[{sample}]={length}")

    def _check_rows(self, name: str, stream: Tensor, rule: str, num_rows: int) -> None:
        if stream.dim() < 1 or stream.shape[0] != num_rows:
            raise ValueError(
                f"{name} must have {rule} rows: {name}.shape={tuple(stream.shape)}, "
                f"{rule}={num_rows}, cp_rank={self.cp_rank}"
            )

    def _check_group(self, cp_group: ProcessGroup | None) -> None:
        size, rank = group_size(cp_group), group_rank(cp_group)
        if (size, rank) != (self.cp_size, self.cp_rank):
            raise ValueError(
                "cp_group must have cp_size ranks, this one at cp_rank: "
                f"group size={size}, rank={rank}, cp_size={self.cp_size}, cp_rank={self.cp_rank}"
            )


class ContiguousLayout(SequenceLayout):
    """The pack, padded at its end, cut into cp_size equal slices: all-gather context parallelism.

    With cp_size 1 it is the plain packed layout without context parallelism. cu_seqlens counts
    the rows of the whole pack, without padding.
    """

    @property
    def num_rows(self) -> int:
        """Rows of a slice."""
        return self._padded_up(-(-self.pack_rows // self.cp_size))

    def rank_token_index(self, cp_rank: int) -> Int64[Tensor, " rows"]:
        """The slice's pack rows, then -1 behind the pack's end."""
        rows = torch.arange(cp_rank * self.num_rows, (cp_rank + 1) * self.num_rows)
        return torch.where(rows < self.pack_rows, rows, PADDING_ROW)

    @property
    def cu_seqlens(self) -> Int32[Tensor, " samples_plus_one"]:
        """[num_samples + 1], boundaries of the samples in the whole pack."""
        return _boundaries(self.total_lengths)


class ZigzagLayout(SequenceLayout):
    """Each sample padded to a multiple of 2 * cp_size and cut into 2 * cp_size chunks.

    Rank r holds chunks r and 2 * cp_size - 1 - r, which balances causal attention. cu_seqlens
    counts the rows of all ranks, each sample with its own padding, as ring attention expects.
    """

    @property
    def num_rows(self) -> int:
        """Two chunks of every sample, then padding."""
        return self._padded_up(sum(self._padded_lengths) // self.cp_size)

    def rank_token_index(self, cp_rank: int) -> Int64[Tensor, " rows"]:
        """The two chunks of every sample, sample after sample, then padding."""
        index = [torch.empty(0, dtype=torch.int64)]
        start = 0
        for length, padded in zip(self.total_lengths, self._padded_lengths, strict=True):
            chunks = torch.arange(padded).view(2 * self.cp_size, -1)
            positions = torch.cat([chunks[cp_rank], chunks[2 * self.cp_size - 1 - cp_rank]])
            index.append(torch.where(positions < length, start + positions, PADDING_ROW))
            start += length
        rows = torch.cat(index)
        padding = self.num_rows - rows.shape[0]
        return torch.cat([rows, torch.full((padding,), PADDING_ROW)])

    @property
    def cu_seqlens(self) -> Int32[Tensor, " samples_plus_one"]:
        """[num_samples + 1], boundaries of the padded samples over all ranks."""
        return _boundaries(self._padded_lengths)

    @property
    def _padded_lengths(self) -> list[int]:
        return [_round_up(length, 2 * self.cp_size) for length in self.total_lengths]


class PaddedLayout(SequenceLayout):
    """Samples side by side, each padded to one length: the bshd layout, without CP.

    Row s * batch_size + b holds token s of sample b, the order of a [seq, batch, hidden] tensor
    reshaped to [seq * batch, hidden]. An empty pack is one sample of padding. cu_seqlens counts
    the rows of the pack, without padding.
    """

    def __init__(self, total_lengths: Sequence[int], *, pad_to_multiple_of: int = 1) -> None:
        super().__init__(total_lengths, pad_to_multiple_of=pad_to_multiple_of)

    @property
    def batch_size(self) -> int:
        """Samples side by side, at least 1."""
        return max(len(self.total_lengths), 1)

    @property
    def seq_length(self) -> int:
        """The length every sample is padded to, a multiple of pad_to_multiple_of."""
        return self._padded_up(max(self.total_lengths, default=0))

    @property
    def num_rows(self) -> int:
        """Samples times the length they are padded to."""
        return self.batch_size * self.seq_length

    def rank_token_index(self, cp_rank: int) -> Int64[Tensor, " rows"]:  # noqa: ARG002
        """Token 0 of every sample, then token 1 of every sample, and so on."""
        lengths = torch.tensor(self.total_lengths or (0,))
        starts = lengths.cumsum(0) - lengths
        position = torch.arange(self.seq_length).unsqueeze(1)
        return torch.where(position < lengths, starts + position, PADDING_ROW).flatten()

    @property
    def cu_seqlens(self) -> Int32[Tensor, " samples_plus_one"]:
        """[num_samples + 1], boundaries of the samples in the pack."""
        return _boundaries(self.total_lengths)


def redistribute(
    local: Shaped[Tensor, " source_rows *rest"],
    source: SequenceLayout,
    target: SequenceLayout,
    cp_group: ProcessGroup | None,
) -> Shaped[Tensor, " target_rows *rest"]:
    """The same stream in another layout of the same pack. Differentiable.

    Communicates over cp_group as `SequenceLayout.gather` does, whatever a rank holds.

    Args:
        local: [T_local of source, ...] of any dtype.
        source: The layout `local` is in.
        target: The layout wanted.
        cp_group: The group both layouts are cut over.

    Returns:
        [T_local of target, ...], of the same dtype; padding rows hold 0.

    Raises:
        ValueError: The layouts are not of the same pack and rank.
    """
    for name in ("total_lengths", "cp_size", "cp_rank"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(
                f"source and target must have the same {name}: "
                f"source.{name}={ours}, target.{name}={theirs}"
            )
    return target.shard(source.gather(local, cp_group))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _boundaries(lengths: Sequence[int]) -> Int32[Tensor, " samples_plus_one"]:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
