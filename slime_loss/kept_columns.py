"""The kept columns of rows that list few ids: their statistics and gradients, entry after entry.

Nothing here is of the size of a row. Sums are taken in a fixed order, without atomic additions, so
that the same entries always give the same bits.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from slime_loss.batch import KeptIds
from slime_loss.row_sums import GradientTerms, Temperature, cache_bytes, compute_dtype

# The share of the vocabulary up to which gathering a CPU row's entries is cheaper than the dense
# products, by measurement: of 32000 columns, 512 hidden and 500 ids a row it takes 0.8 of their
# time, of 1000 ids 1.2.
_FEW = 1 / 64

# What an entry holds while it is worked on: several numbers of 8 bytes.
_ENTRY_BYTES = 64


class Entries(NamedTuple):
    """The kept columns of some rows, row after row and rising within a row.

    Attributes:
        row: [k], which of these rows, from 0.
        column: [k].
        is_label: [k], whether it is the column of the row's label.
        counts: [r], how many a row has.
    """

    row: Tensor
    column: Tensor
    is_label: Tensor
    counts: Tensor

    def statistics(
        self,
        logits: Float[Tensor, "all_rows columns"],
        chosen: Int64[Tensor, " rows"],
        temperature: Temperature,
    ) -> Float[Tensor, "rows three"]:
        """Of each row's kept columns what `row_statistics` gives, without a moment.

        Args:
            logits: [C, num_columns]; not changed.
            chosen: [r], which of the logits' rows these rows are.
            temperature: Divides the logits: a number, or [r].
        """
        scaled = self._scaled(logits, chosen, temperature)
        lowest = torch.finfo(scaled.dtype).min
        maximum = torch.segment_reduce(scaled, "max", lengths=self.counts, initial=lowest)
        weights = (scaled - maximum[self.row]).exp_()
        total = torch.segment_reduce(weights, "sum", lengths=self.counts, initial=0)
        at_label = torch.zeros_like(maximum)
        at_label[self.row[self.is_label]] = scaled[self.is_label]
        return torch.stack([at_label, maximum, total], dim=1)

    def gradient(
        self,
        logits: Float[Tensor, "all_rows columns"],
        chosen: Int64[Tensor, " rows"],
        terms: GradientTerms,
    ) -> Float[Tensor, " entries"]:
        """The gradient of rows of logits at these entries; it is 0 elsewhere.

        Args:
            logits: [C, num_columns]; not changed.
            chosen: [r], which of the logits' rows these rows are.
            terms: What it is made of; a slope is not looked at.
        """
        shifted = self._scaled(logits, chosen, terms.temperature) - terms.maximum[self.row]
        at_label = torch.where(self.is_label, terms.at_label[self.row], 0.0)
        return shifted.exp_().mul_(terms.constant[self.row]).add_(at_label)

    def _scaled(self, logits: Tensor, chosen: Tensor, temperature: Temperature) -> Tensor:
        values = logits[chosen[self.row], self.column].to(compute_dtype(logits.dtype))
        if isinstance(temperature, Tensor):
            return values / temperature[self.row]
        return values / temperature


class SparseRows(NamedTuple):
    """A matrix of few non-zeros, row after row.

    Attributes:
        values: [k].
        column: [k].
        counts: [r], how many a row has.
    """

    values: Tensor
    column: Tensor
    counts: Tensor

    def times(self, table: Float[Tensor, "columns width"]) -> Float[Tensor, "rows width"]:
        """The product with a matrix [columns, width], accumulated in the dtype of the values."""
        column = self.column
        if table.dtype != self.values.dtype:
            used, column = column.unique(return_inverse=True)
            table = table.index_select(0, used).to(self.values.dtype)
        offsets = self.counts.cumsum(0) - self.counts
        return functional.embedding_bag(
            column, table, offsets, mode="sum", per_sample_weights=self.values
        )

    def transposed(self) -> tuple[Int64[Tensor, " used"], "SparseRows"]:
        """The columns that have an entry, rising, and the transposed matrix's rows of them."""
        rows = torch.arange(self.counts.shape[0], device=self.column.device)
        row = rows.repeat_interleave(self.counts)
        column, order = self.column.sort(stable=True)
        used, counts = column.unique_consecutive(return_counts=True)
        return used, SparseRows(self.values[order], row[order], counts)


class KeptColumns:
    """A rank's kept columns of the labelled rows of a call.

    Args:
        kept_ids: Of the labelled rows.
        label_columns: [n], the column of the row's label, which counts as kept; -1 where it is
            not among this rank's.
        columns: This rank's part of the true vocabulary, as ids.
        vocab_size: The true vocabulary.

    Attributes:
        is_whole: [n], the rows that kept everything.
        is_few: [n], the rows that list so few ids that their entries are cheaper than the row.
    """

    def __init__(
        self,
        kept_ids: KeptIds,
        label_columns: Int64[Tensor, " rows"],
        columns: range,
        vocab_size: int,
    ) -> None:
        self._kept_ids, self._label_columns = kept_ids, label_columns
        self._columns = columns
        self._counts = kept_ids.offsets.diff()
        self.is_whole: Bool[Tensor, " rows"] = self._counts == 0
        self.is_few: Bool[Tensor, " rows"] = ~self.is_whole & (self._counts <= _FEW * vocab_size)

    def split(self, rows: Int64[Tensor, " chosen"]) -> list[Tensor]:
        """Numbers of those of the rows that list few ids, kept everything, or neither."""
        is_few, is_whole = self.is_few[rows], self.is_whole[rows]
        return [one.nonzero().squeeze(1) for one in (is_few, is_whole, ~(is_few | is_whole))]

    def mask(self, rows: Int64[Tensor, " chosen"]) -> Bool[Tensor, "chosen columns"]:
        """The dense mask of some of the rows, without their labels."""
        return self._kept_ids.select(rows).mask(self._columns.start, len(self._columns))

    def entries(self, rows: Int64[Tensor, " chosen"]) -> Entries:
        """The kept columns of some of the rows, each once, the label's among them."""
        kept, num_columns = self._kept_ids.select(rows), max(len(self._columns), 1)
        numbers = torch.arange(rows.shape[0], device=rows.device)
        column, own = kept.ids - self._columns.start, self._label_columns[rows]
        is_here = (column >= 0) & (column < len(self._columns))
        place = numbers.repeat_interleave(kept.offsets.diff()) * num_columns + column
        of_labels = (numbers * num_columns + own)[own >= 0]
        place = torch.cat([place[is_here], of_labels]).unique()
        row, column = place // num_columns, place % num_columns
        counts = row.bincount(minlength=rows.shape[0])
        return Entries(row, column, column == own[row], counts)

    def blocks(
        self, rows: Int64[Tensor, " chosen"], max_entries: int
    ) -> list[Int64[Tensor, " block"]]:
        """Numbers of some of the rows, cut where max_entries are passed: one row too many."""
        number = (self._counts[rows] + 1).cumsum(0) // max(max_entries, 1)
        _, sizes = number.unique_consecutive(return_counts=True)
        numbers = torch.arange(rows.shape[0], device=rows.device)
        return list(numbers.split(sizes.tolist()))


def entries_in_cache(tensor: Tensor) -> int:
    """How many entries should be worked on at a time."""
    return cache_bytes(tensor) // _ENTRY_BYTES
