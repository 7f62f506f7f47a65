"""Softmax of labelled rows over a vocabulary that a tensor-parallel group shares out.

The arithmetic of log-probs, entropy and their gradient, one chunk of rows at a time, for logits
wherever they come from; u = logits / temperature. Each rank reduces its columns to a few numbers
a row, which are merged in rank order, so that every rank gets the same bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.batch import KeptIds
from slime_loss.collectives import AutogradContext, all_gather_rows, group_rank, group_size
from slime_loss.kept_columns import KeptColumns, SparseRows, entries_in_cache
from slime_loss.labelled_rows import LabelledRows
from slime_loss.row_facts import Coefficients, RowFacts, Totals
from slime_loss.row_sums import (
    GradientTerms,
    Temperature,
    compute_dtype,
    form_gradient_,
    merge_ranks,
    row_blocks,
    row_statistics,
)

EntropyMode = Literal["none", "metric", "loss"]
"""none: not computed; metric: a value without gradient; loss: a value with gradient."""


@dataclass(frozen=True)
class SoftmaxOptions:
    """What is asked of the logits: the arguments of the same names of the log-prob functions."""

    tp_group: ProcessGroup | None = None
    vocab_size: int | None = None
    temperature: float | Tensor = 1.0
    keep_mask: Tensor | KeptIds | None = None
    entropy: EntropyMode = "none"


class VocabSoftmax:
    """The softmax of the rows of one call that have a label.

    All ranks of the group pass the same labels and options, and so agree on rows and numbers.

    Args:
        labels: [T], vocabulary ids; -100 at rows that are not asked for.
        num_columns: This rank's columns, padding included.
        dtype: The dtype of the logits or of what they are made from.
        options: What is asked for.

    Attributes:
        rows: The rows that have a label.
        num_columns: This rank's columns of the true vocabulary; those behind are padding.
        dtype: What is computed in.

    Raises:
        ValueError: An option cannot mean anything, or a label is outside the vocabulary.
    """

    def __init__(
        self,
        labels: Int64[Tensor, " tokens"],
        num_columns: int,
        dtype: torch.dtype,
        options: SoftmaxOptions,
    ) -> None:
        self._group = options.tp_group
        self._first_column = group_rank(self._group) * num_columns
        vocab_size = _checked_vocab_size(options.vocab_size, num_columns * group_size(self._group))
        self.num_columns = min(max(vocab_size - self._first_column, 0), num_columns)
        self.dtype = compute_dtype(dtype)
        self.rows = LabelledRows(labels, vocab_size)
        self._temperature = self._checked_temperature(options.temperature)
        self._entropy = _checked_entropy(options.entropy)
        columns = self.rows.labels - self._first_column
        is_here = (columns >= 0) & (columns < self.num_columns)
        self._label_columns = torch.where(is_here, columns, -1)
        keep_mask = _checked_keep_mask(options.keep_mask, labels.shape[0], num_columns)
        if isinstance(keep_mask, KeptIds):
            keep_mask.check(self.rows.index, vocab_size)
            ids = range(self._first_column, self._first_column + self.num_columns)
            kept_ids = keep_mask.select(self.rows.index)
            keep_mask = KeptColumns(kept_ids, self._label_columns, ids, vocab_size)
        self._keep_mask = keep_mask

    @property
    def temporaries(self) -> int:
        """How many tensors of the size of a block of rows there are at most beside the logits."""
        scaled_shifted_weights, masked_and_masks = 3, 2
        return scaled_shifted_weights + (0 if self._keep_mask is None else masked_and_masks)

    def statistics(
        self, logits: Float[Tensor, "rows columns"], chunk: slice
    ) -> Float[Tensor, "rows numbers"]:
        """This rank's numbers of each row of a chunk, as `merge` takes them.

        Args:
            logits: [c, num_columns], of these rows; not changed.
            chunk: Which of the labelled rows they are.

        Returns:
            [c, k], where k depends on the options alone.
        """
        has_entropy = self._entropy != "none"
        index = torch.arange(len(self.rows), device=logits.device)[chunk]
        if self._keep_mask is None:
            return self._row_statistics(logits, index, with_moment=has_entropy)
        full = self._row_statistics(logits, index, with_moment=True) if has_entropy else None
        kept = self._kept_statistics(logits, index, full)
        return kept if full is None else torch.cat([kept, full[:, 1:]], dim=1)

    def _row_statistics(self, logits: Tensor, index: Tensor, *, with_moment: bool) -> Tensor:
        columns, temperature = self._label_columns[index], self._temperature_at(index)
        return row_statistics(logits, columns, temperature, with_moment=with_moment)

    def _kept_statistics(self, logits: Tensor, index: Tensor, full: Tensor | None) -> Tensor:
        """[c, 3] as `row_statistics` has them, of the kept columns; `full` is of all of them."""
        result = torch.empty((logits.shape[0], 3), dtype=self.dtype, device=logits.device)
        masked = torch.arange(logits.shape[0], device=logits.device)
        if isinstance(self._keep_mask, KeptColumns):
            few, whole, masked = self._keep_mask.split(index)
            for block in self._keep_mask.blocks(index[few], entries_in_cache(logits)):
                rows = few[block]
                temperature = self._temperature_at(index[rows])
                entries = self._keep_mask.entries(index[rows])
                result[rows] = entries.statistics(logits, rows, temperature)
            if full is not None:
                result[whole], whole = full[whole, :3], whole[:0]
            for rows in _blocks(logits, whole):
                values = logits.index_select(0, rows)
                result[rows] = self._row_statistics(values, index[rows], with_moment=False)
        for rows in _blocks(logits, masked):
            values = logits.index_select(0, rows)
            values.masked_fill_(self._dropped(index[rows]), -torch.inf)
            result[rows] = self._row_statistics(values, index[rows], with_moment=False)
        return result

    def merge(self, statistics: Float[Tensor, "rows numbers"]) -> tuple[Tensor, Totals]:
        """Log-probs and totals of rows. One all-gather over the group.

        Args:
            statistics: [n, k], this rank's.

        Returns:
            log_probs [n], nats, and the totals.
        """
        ranks = all_gather_rows(statistics, self._group)
        ranks = ranks.view(group_size(self._group), *statistics.shape)
        label_logit, *numbers = ranks.unbind(-1)
        policy = full = merge_ranks(*numbers[-2 if self._entropy == "none" else -3 :])
        if self._keep_mask is not None:
            policy = merge_ranks(*numbers[:2])
        # Everything is relative to the largest logit: a large common offset leaves no trace.
        log_probs = (label_logit.sum(0) - policy.maximum) - policy.total.log()
        entropy = None
        if full.moment is not None:
            entropy = full.total.log() - full.moment / full.total
        return log_probs, Totals(policy.maximum, policy.total, full.maximum, full.total, entropy)

    def results(self, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """log_probs and entropy [T], 0 at the other rows, from those of the labelled rows."""
        spread = None if entropy is None else self.rows.spread(entropy, self.dtype)
        return self.rows.spread(log_probs, self.dtype), spread

    def mark(self, ctx: AutogradContext, entropy: Tensor | None) -> None:
        """Tell autograd that an entropy which is a metric has no gradient."""
        if self._entropy == "metric":
            ctx.mark_non_differentiable(entropy)

    def upstream(self, grad_log_probs: Tensor, grad_entropy: Tensor | None) -> Coefficients:
        """The labelled rows' upstream gradients."""
        if self._entropy != "loss" or grad_entropy is None:
            return Coefficients(self.rows.take(grad_log_probs), None)
        return Coefficients(self.rows.take(grad_log_probs), self.rows.take(grad_entropy))

    def facts(self, totals: Totals, coefficients: Coefficients) -> RowFacts:
        """Those of all labelled rows, from the totals and coefficients of all of them."""
        rows = torch.arange(len(self.rows), device=self.rows.index.device)
        return RowFacts(rows, totals, coefficients)

    def is_sparse(self, facts: RowFacts) -> Bool[Tensor, " rows"]:
        """The rows whose gradient is 0 at all but few columns: those for `sparse_gradients`."""
        has_entropy = facts.coefficients.entropy is not None
        # On a GPU, dense products should beat gathers in many small blocks (not measured).
        if isinstance(self._keep_mask, KeptColumns) and not (has_entropy or facts.rows.is_cuda):
            return self._keep_mask.is_few[facts.rows]
        return torch.zeros_like(facts.rows, dtype=torch.bool)

    def sparse_gradients(
        self,
        logits: Float[Tensor, "all_rows columns"],
        chosen: Int64[Tensor, " rows"],
        facts: RowFacts,
        max_entries: int,
    ) -> Iterator[tuple[Tensor, SparseRows]]:
        """What `form_gradient_` would write, of rows that `is_sparse`.

        Args:
            logits: [C, num_columns], in this softmax's dtype; not changed.
            chosen: [c], rows of `logits`, rising.
            facts: What is known of these rows.
            max_entries: About as many are given at a time.

        Yields:
            Which of the labelled rows, and their gradient.
        """
        if chosen.shape[0] == 0:
            return
        assert isinstance(self._keep_mask, KeptColumns)
        for block in self._keep_mask.blocks(facts.rows, max_entries):
            part = facts.at(block)
            entries = self._keep_mask.entries(part.rows)
            values = entries.gradient(logits, chosen[block], self._policy_terms(part))
            yield part.rows, SparseRows(values, entries.column, entries.counts)

    def form_gradient_(
        self,
        out: Float[Tensor, "rows columns"],
        logits: Float[Tensor, "all_rows columns"],
        chosen: Int64[Tensor, " rows"],
        facts: RowFacts,
    ) -> None:
        """Write the gradient (g (onehot - p) - h p (ln p + H)) / temperature of rows of logits.

        Args:
            out: [c, num_columns], in this softmax's dtype; may begin where `logits` does.
            logits: [C, num_columns], in this softmax's dtype.
            chosen: [c], rows of `logits`, rising.
            facts: What is known of these rows.
        """
        policy, entropy = self._policy_terms(facts), self._entropy_terms(facts)
        if self._keep_mask is not None:
            self._form_masked_(out, logits, chosen, facts)
        elif entropy is None:
            form_gradient_(out, logits, chosen, policy)
        else:
            # One softmax for both.
            constant = policy.constant + entropy.constant
            both = entropy._replace(constant=constant, at_label=policy.at_label)
            form_gradient_(out, logits, chosen, both)

    def _form_masked_(self, out: Tensor, logits: Tensor, chosen: Tensor, facts: RowFacts) -> None:
        for block in row_blocks(out):
            full, part = logits.index_select(0, chosen[block]), facts.at(block)
            kept = full.masked_fill(self._dropped(part.rows), -torch.inf)
            form_gradient_(kept, kept, chosen[block], self._policy_terms(part))
            entropy = self._entropy_terms(part)
            if entropy is not None:
                form_gradient_(full, full, chosen[block], entropy)
                kept += full
            out[block] = kept

    def _policy_terms(self, facts: RowFacts) -> GradientTerms:
        temperature, totals = self._temperature_at(facts.rows), facts.totals
        g = facts.coefficients.log_probs / temperature
        columns, constant = self._label_columns[facts.rows], -g / totals.policy_sum
        return GradientTerms(columns, temperature, totals.policy_max, constant, None, g)

    def _entropy_terms(self, facts: RowFacts) -> GradientTerms | None:
        temperature, totals = self._temperature_at(facts.rows), facts.totals
        if facts.coefficients.entropy is None or totals.entropy is None:
            return None
        slope = -(facts.coefficients.entropy / temperature) / totals.full_sum
        constant = slope * (totals.entropy - totals.full_sum.log())
        columns, nothing = self._label_columns[facts.rows], torch.zeros_like(slope)
        return GradientTerms(columns, temperature, totals.full_max, constant, slope, nothing)

    def _temperature_at(self, rows: slice | Tensor) -> Temperature:
        if isinstance(self._temperature, Tensor):
            return self._temperature[rows]
        return self._temperature

    def _dropped(self, rows: Int64[Tensor, " rows"]) -> Bool[Tensor, "rows columns"]:
        """The columns that the keep mask drops; the label's own is never one."""
        assert self._keep_mask is not None
        if isinstance(self._keep_mask, KeptColumns):
            keep = self._keep_mask.mask(rows)
        else:
            tokens = self.rows.index[rows]
            keep = self._keep_mask.index_select(0, tokens)[:, : self.num_columns]
        drop = ~keep
        if self.num_columns > 0:
            columns = self._label_columns[rows, None]
            at = columns.clamp_min(0)
            drop.scatter_(1, at, drop.gather(1, at) & (columns < 0))
        return drop

    def _checked_temperature(self, temperature: float | Tensor) -> Temperature:
        """The temperature; the labelled rows' where there is one per row."""
        rule = "temperature must be finite and > 0"
        if not isinstance(temperature, Tensor):
            if not (temperature > 0 and math.isfinite(temperature)):
                raise ValueError(f"{rule}: temperature={temperature}")
            return temperature
        num_tokens = self.rows.num_tokens
        if temperature.shape != (num_tokens,):
            raise ValueError(
                "temperature must be a number or have the shape of labels: "
                f"temperature.shape={tuple(temperature.shape)}, labels.shape={(num_tokens,)}"
            )
        chosen = self.rows.take(temperature.detach()).to(self.dtype)
        wrong = ~((chosen > 0) & chosen.isfinite())
        if wrong.any():
            row = int(self.rows.index[wrong][0])
            raise ValueError(f"{rule}: temperature[{row}]={float(temperature[row])}")
        return chosen


def _blocks(logits: Tensor, rows: Tensor) -> list[Tensor]:
    """Some of the logits' rows, as many at a time as `row_blocks` has."""
    return [rows[block] for block in row_blocks(logits[: rows.shape[0]])]


def _checked_vocab_size(vocab_size: int | None, num_columns: int) -> int:
    if vocab_size is None:
        return num_columns
    if not 1 <= vocab_size <= num_columns:
        raise ValueError(
            "vocab_size must be in [1, columns of all ranks]: "
            f"vocab_size={vocab_size}, columns={num_columns}"
        )
    return vocab_size


def _checked_keep_mask(
    keep_mask: Tensor | KeptIds | None, num_rows: int, num_columns: int
) -> Tensor | KeptIds | None:
    if isinstance(keep_mask, Tensor) and (
        keep_mask.dtype != torch.bool or keep_mask.shape != (num_rows, num_columns)
    ):
        raise ValueError(
            "keep_mask must be bool with the shape of the logits: "
            f"keep_mask.dtype={keep_mask.dtype}, keep_mask.shape={tuple(keep_mask.shape)}, "
            f"logits.shape={(num_rows, num_columns)}"
        )
    if isinstance(keep_mask, KeptIds) and keep_mask.num_rows != num_rows:
        raise ValueError(
            "keep_mask must have one row per label: "
            f"keep_mask.num_rows={keep_mask.num_rows}, labels={num_rows}"
        )
    return keep_mask


def _checked_entropy(entropy: EntropyMode) -> EntropyMode:
    if entropy not in get_args(EntropyMode):
        choices = ", ".join(get_args(EntropyMode))
        raise ValueError(f"entropy must be one of {choices}: entropy={entropy!r}")
    return entropy
