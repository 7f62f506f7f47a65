"""The streams of one micro-batch, and what the loss makes of them.

Every stream has one entry per local row, T = T_local of a SequenceLayout; row t predicts labels[t].
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from slime_loss.metrics import Metrics

IGNORED_LABEL = -100
"""The label of a row that predicts nothing."""


@dataclass(frozen=True)
class KeptIds:
    """The vocabulary ids that top-p or top-k sampling kept for each row, row after row.

    Row t kept `ids[offsets[t]:offsets[t + 1]]`; a row with none listed kept the whole vocabulary.

    Attributes:
        ids: [K], vocabulary ids.
        offsets: [T + 1], from 0 to K, never decreasing.
    """

    ids: Int64[Tensor, " kept"]
    offsets: Int64[Tensor, " rows_plus_one"]

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        for name in ("ids", "offsets"):
            check_vector(name, getattr(self, name), torch.int64)
        if self.offsets.shape[0] < 1:
            raise ValueError("offsets must have rows + 1 entries: offsets.shape=(0,)")

    @property
    def num_rows(self) -> int:
        """Number of rows T."""
        return self.offsets.shape[0] - 1

    def check(self, rows: Int64[Tensor, " selected"], vocab_size: int) -> None:
        """Raise ValueError where the offsets, or the ids of the given rows, break their rules."""
        ends = (int(self.offsets[0]), int(self.offsets[-1]))
        if ends != (0, self.ids.shape[0]) or bool((self.offsets.diff() < 0).any()):
            raise ValueError(
                "offsets must go from 0 to the number of ids and never decrease: "
                f"offsets[0]={ends[0]}, offsets[-1]={ends[1]}, ids.shape={tuple(self.ids.shape)}"
            )
        chosen = self.select(rows)
        outside = (chosen.ids < 0) | (chosen.ids >= vocab_size)
        if bool(outside.any()):
            place = outside.nonzero()[0]
            row = int(rows[torch.searchsorted(chosen.offsets, place, right=True) - 1])
            raise ValueError(
                "kept ids must be in [0, vocab_size): "
                f"row {row} has {int(chosen.ids[place])}, vocab_size={vocab_size}"
            )

    def select(self, rows: Int64[Tensor, " selected"]) -> "KeptIds":
        """The kept ids of the given rows, in their order.

        Args:
            rows: [R], row numbers; -1 (padding) gives a row that kept the whole vocabulary. The
                token_index of a layout therefore cuts a pack's kept ids for this rank.

        Returns:
            The kept ids of R rows.
        """
        # A count of 0 behind the last row is what -1 picks.
        counts = functional.pad(self.offsets.diff(), (0, 1))[rows]
        offsets = functional.pad(counts.cumsum(0), (1, 0))
        shift = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], counts)
        positions = torch.arange(shift.shape[0], device=shift.device) + shift
        return KeptIds(self.ids[positions], offsets)

    def mask(self, first_column: int, num_columns: int) -> Bool[Tensor, "rows columns"]:
        """The dense mask over one rank's slice of the vocabulary.

        Args:
            first_column: The vocabulary id of the slice's first column.
            num_columns: The columns of the slice.

        Returns:
            [T, num_columns], true where the column was kept.
        """
        counts = self.offsets.diff()
        row = torch.repeat_interleave(
            torch.arange(self.num_rows, device=self.ids.device),
            counts,
            output_size=self.ids.shape[0],
        )
        column = self.ids - first_column
        inside = (column >= 0) & (column < num_columns)
        # Ids of other ranks land in one column too many, which is cut off again.
        mask = torch.zeros(self.num_rows, num_columns + 1, dtype=torch.bool, device=row.device)
        mask[row, torch.where(inside, column, num_columns)] = True
        return mask[:, :num_columns] | (counts == 0).unsqueeze(1)


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch's streams, one entry per local row.

    What a stream holds where loss_mask is false is never read into a loss, gradient or metric.

    Attributes:
        labels: [T], the next token of the same sample; -100 where there is none.
        loss_mask: [T], true where the row trains.
        loss_weight: [T], the token's weight in the step's loss, as `loss_weights` gives it.
        sample_index: [T], the sample's index in the pack; -1 at padding rows.
        advantages: [T]; needed by policy_loss.
        old_log_probs: [T], nats, of the policy at the start of the optimizer steps on this
            rollout; None means on policy, that is the current ones without gradient.
        rollout_log_probs: [T], nats, as the rollout engine gave them.
        ref_log_probs: [T], nats, of the reference model.
        values: [T], of the critic at the start of the optimizer steps on this rollout; needed by
            value_loss.
        returns: [T], what the critic learns; needed by value_loss.
        num_trained_tokens: [samples], of every sample of the pack, over all ranks of the
            context-parallel group; needed by what looks at whole samples.
        kept_ids: What top-p or top-k sampling kept for each row; None keeps everything.
    """

    labels: Int64[Tensor, " tokens"]
    loss_mask: Bool[Tensor, " tokens"]
    loss_weight: Float[Tensor, " tokens"]
    sample_index: Int64[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"] | None = None
    old_log_probs: Float[Tensor, " tokens"] | None = None
    rollout_log_probs: Float[Tensor, " tokens"] | None = None
    ref_log_probs: Float[Tensor, " tokens"] | None = None
    values: Float[Tensor, " tokens"] | None = None
    returns: Float[Tensor, " tokens"] | None = None
    num_trained_tokens: Int64[Tensor, " samples"] | None = None
    kept_ids: KeptIds | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices."""
        dtypes = {"labels": torch.int64, "loss_mask": torch.bool, "sample_index": torch.int64}
        for name, stream in self._streams():
            check_vector(name, stream, dtypes.get(name))
            check_alike(name, stream, "labels", self.labels)
        if self.num_trained_tokens is not None:
            check_vector("num_trained_tokens", self.num_trained_tokens, torch.int64)
        if self.kept_ids is not None and self.kept_ids.num_rows != self.num_rows:
            raise ValueError(
                "kept_ids must have one row per label: "
                f"kept_ids.num_rows={self.kept_ids.num_rows}, num_rows={self.num_rows}"
            )

    @property
    def num_rows(self) -> int:
        """Number of local rows T."""
        return self.labels.shape[0]

    def select(self, rows: Int64[Tensor, " selected"]) -> "TokenBatch":
        """The batch of the given rows, in their order; what belongs to samples stays whole.

        Args:
            rows: [R], row numbers.

        Returns:
            R rows.
        """
        chosen = {name: stream.index_select(0, rows) for name, stream in self._streams()}
        kept_ids = None if self.kept_ids is None else self.kept_ids.select(rows)
        return replace(self, kept_ids=kept_ids, **chosen)

    def _streams(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that have one entry per row, by name."""
        for field in fields(self):
            stream = getattr(self, field.name)
            if isinstance(stream, Tensor) and field.name != "num_trained_tokens":
                yield field.name, stream

    @property
    def trained_labels(self) -> Int64[Tensor, " tokens"]:
        """The labels of the rows that train, -100 at every other row, whatever is there.

        Raises:
            ValueError: A row trains that has no label.
        """
        without = self.loss_mask & (self.labels == IGNORED_LABEL)
        if bool(without.any()):
            row = int(without.nonzero()[0])
            raise ValueError(
                "labels must be vocabulary ids where loss_mask is true: "
                f"labels[{row}]={IGNORED_LABEL}"
            )
        return torch.where(self.loss_mask, self.labels, IGNORED_LABEL)


@dataclass(frozen=True)
class TokenLogProbs:
    """What the head gives for each row; 0 where a row's label is -100.

    Attributes:
        log_probs: [T], nats, of the label.
        entropy: [T], nats, over the full vocabulary; None when it was not asked for.
    """

    log_probs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None = None


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch on one rank.

    Attributes:
        loss: [], this rank's part of the plain sum over the step.
        metrics: This micro-batch's metrics, not yet reduced.
        first_nonfinite_row: [], the first local row that trains and whose loss or log-prob is not
            finite; -1 when there is none.
    """

    loss: Float[Tensor, ""]
    metrics: Metrics
    first_nonfinite_row: Int64[Tensor, ""]


def check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless two tensors have one shape and one device: nothing broadcasts."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have the shape of {other_name}: "
            f"{name}.shape={tuple(tensor.shape)}, {other_name}.shape={tuple(other.shape)}"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}: "
            f"{name}.device={tensor.device}, {other_name}.device={other.device}"
        )


def check_floats(name: str, stream: Tensor) -> None:
    """Raise ValueError unless `stream` is of a floating point type."""
    if not stream.is_floating_point():
        raise ValueError(f"{name} must be floating point: {name}.dtype={stream.dtype}")


def check_vector(name: str, stream: Tensor, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless `stream` is a vector of `dtype` (None: any floating point type)."""
    if stream.dim() != 1:
        raise ValueError(f"{name} must have one dimension: {name}.shape={tuple(stream.shape)}")
    if dtype is None:
        check_floats(name, stream)
    elif stream.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}: {name}.dtype={stream.dtype}")
