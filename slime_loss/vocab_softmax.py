"""Softmax of chosen rows over a vocabulary that a tensor-parallel group shares out.

The arithmetic of log-probs, entropy and their gradient, one chunk of rows at a time, for logits
wherever they come from; u = logits / temperature. Each rank reduces its columns to a few numbers
a row, which are merged in rank order, so that every rank gets the same bits.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.batch import IGNORED_LABEL, KeptIds
from slime_loss.collectives import AutogradContext, all_gather_rows, group_rank, group_size
from slime_loss.row_sums import merge_ranks, reduce_columns, weighted_exp

EntropyMode = Literal["none", "metric", "loss"]
"""none: not computed; metric: a value without gradient; loss: a value with gradient."""

_ALL = slice(None)


@dataclass(frozen=True)
class SoftmaxOptions:
    """What is asked of the logits: the arguments of the same names of the log-prob functions."""

    tp_group: ProcessGroup | None = None
    vocab_size: int | None = None
    temperature: float | Tensor = 1.0
    keep_mask: Tensor | KeptIds | None = None
    entropy: EntropyMode = "none"


class Totals(NamedTuple):
    """What the gradient must know of whole rows, [n] each, the same on every rank.

    `policy_*` normalise the log-probs (over the kept columns), `full_*` the entropy: the largest
    u and the sum of e^(u - max). Without a keep mask the two are the same.
    """

    policy_max: Tensor
    policy_sum: Tensor
    full_max: Tensor
    full_sum: Tensor
    entropy: Tensor | None


class VocabSoftmax:
    """The softmax of the rows of one call that have a label.

    All ranks of the group pass the same labels and options. So they choose the same rows and cut
    the same chunks, and whatever is sized by them agrees over the group without asking.

    Args:
        labels: [T], vocabulary ids; -100 at rows that are not asked for.
        num_columns: This rank's columns, padding included.
        dtype: What to compute in.
        options: What is asked for.

    Attributes:
        rows: [n], the rows that have a label.
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
        self.dtype = dtype
        self._num_tokens = labels.shape[0]
        self.rows, self._labels = _labelled_rows(labels, vocab_size)
        self._temperature = self._checked_temperature(options.temperature)
        self._keep_mask = _checked_keep_mask(options.keep_mask, self._num_tokens, num_columns)
        self._entropy = _checked_entropy(options.entropy)

    @property
    def num_rows(self) -> int:
        """Number of rows that have a label."""
        return self.rows.shape[0]

    @property
    def working_buffers(self) -> int:
        """How many [c, num_columns] there are at most while a chunk is worked on."""
        logits_and_temporaries, masked_and_masks = 3, 2
        return logits_and_temporaries + (0 if self._keep_mask is None else masked_and_masks)

    @property
    def other_rows(self) -> Int64[Tensor, " others"]:
        """The rows that have no label."""
        is_other = torch.ones(self._num_tokens, dtype=torch.bool, device=self.rows.device)
        return is_other.index_fill_(0, self.rows, False).nonzero().squeeze(1)

    def chunks(self, chunk_rows: int) -> list[slice]:
        """Slices of the chosen rows, at most `chunk_rows` each; an empty one where none is."""
        starts = range(0, max(self.num_rows, 1), chunk_rows)
        return [slice(start, min(start + chunk_rows, self.num_rows)) for start in starts]

    def take(self, tensor: Tensor, chunk: slice = _ALL) -> Tensor:
        """The chosen rows of a [T, ...] tensor; a view of it where every row is chosen."""
        if self.num_rows == self._num_tokens:
            return tensor[chunk]
        return tensor.index_select(0, self.rows[chunk])

    def put_(self, tensor: Tensor, values: Tensor, chunk: slice = _ALL) -> None:
        """Write the values of the chosen rows into a [T, ...] tensor that the caller owns."""
        if self.num_rows == self._num_tokens:
            tensor[chunk].copy_(values)
        else:
            tensor.index_copy_(0, self.rows[chunk], values.to(tensor.dtype))

    def spread(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, ...] of `dtype`, with the [n, ...] values at the chosen rows and 0 elsewhere."""
        spread = values.new_zeros((self._num_tokens, *values.shape[1:]), dtype=dtype)
        self.put_(spread, values)
        return spread

    def scale(self, logits: Tensor, chunk: slice) -> Float[Tensor, "rows columns"]:
        """A chunk's u = logits / temperature; may be the argument itself."""
        return self._over_temperature(logits.to(self.dtype), chunk)

    def statistics(
        self, scaled: Float[Tensor, "rows columns"], chunk: slice
    ) -> Float[Tensor, "rows numbers"]:
        """This rank's numbers of each row of a chunk, as `merge` takes them.

        Args:
            scaled: [c, num_columns], u of these rows; not changed.
            chunk: Which of the chosen rows they are.

        Returns:
            [c, k], where k depends on the options alone.
        """
        has_entropy = self._entropy != "none"
        numbers = [self._at_label(scaled, chunk)]
        if self._keep_mask is not None:
            numbers += reduce_columns(self._kept(scaled, chunk), with_moment=False)
        if self._keep_mask is None or has_entropy:
            numbers += reduce_columns(scaled, with_moment=has_entropy)
        return torch.stack(numbers, dim=1)

    def merge(self, statistics: Float[Tensor, "rows numbers"]) -> tuple[Tensor, Totals]:
        """Log-probs and totals of all chosen rows. One all-gather over the group.

        Args:
            statistics: [n, k], this rank's, of all chunks.

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

    def results(
        self, ctx: AutogradContext, log_probs: Tensor, totals: Totals
    ) -> tuple[Tensor, Tensor | None]:
        """What an autograd function returns: log_probs and entropy [T], 0 at the other rows."""
        entropy = None if totals.entropy is None else self.spread(totals.entropy, self.dtype)
        if self._entropy == "metric":
            ctx.mark_non_differentiable(entropy)
        return self.spread(log_probs, self.dtype), entropy

    def upstream(
        self, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The chosen rows' upstream gradients; None where the entropy has none."""
        if self._entropy != "loss" or grad_entropy is None:
            return self.take(grad_log_probs), None
        return self.take(grad_log_probs), self.take(grad_entropy)

    def gradient(
        self,
        scaled: Float[Tensor, "rows columns"],
        chunk: slice,
        totals: Totals,
        upstream: tuple[Tensor, Tensor | None],
    ) -> Float[Tensor, "rows columns"]:
        """The gradient of a chunk's logits (not of u), as a new tensor.

        Args:
            scaled: [c, num_columns], u of these rows; not changed.
            chunk: Which of the chosen rows they are.
            totals: Of all chosen rows.
            upstream: [n] each, the gradients g of the log-probs and h (or None) of the entropy.

        Returns:
            [c, num_columns], (g (onehot - p) - h p (ln p + H)) / temperature.
        """
        policy_max, policy_sum, full_max, full_sum = (total[chunk, None] for total in totals[:4])
        g, h = (
            grad if grad is None else self._over_temperature(grad[chunk, None], chunk)
            for grad in upstream
        )
        assert g is not None
        policy = -g / policy_sum
        if h is None:
            gradient = weighted_exp(self._kept(scaled, chunk), policy_max, policy)
            return self._add_at_label(gradient, chunk, g)
        assert totals.entropy is not None
        slope = -h / full_sum
        constant = slope * (totals.entropy[chunk, None] - full_sum.log())
        if self._keep_mask is None:
            gradient = weighted_exp(scaled, full_max, policy + constant, slope)
        else:
            gradient = weighted_exp(self._kept(scaled, chunk), policy_max, policy)
            gradient += weighted_exp(scaled, full_max, constant, slope)
        return self._add_at_label(gradient, chunk, g)

    def _over_temperature(self, values: Tensor, chunk: slice) -> Tensor:
        """[c, ...] values divided by the temperature of their rows."""
        if isinstance(self._temperature, Tensor):
            return values / self._temperature[chunk, None]
        return values if self._temperature == 1 else values / self._temperature

    def _label_columns(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """[c, 1] each: the label's column (0 where it is on another rank), and if it is here."""
        columns = self._labels[chunk, None] - self._first_column
        here = (columns >= 0) & (columns < self.num_columns)
        return torch.where(here, columns, 0), here

    def _at_label(self, scaled: Tensor, chunk: slice) -> Tensor:
        """[c], u of the label; 0 on ranks that do not have it."""
        if self.num_columns == 0:
            return scaled.new_zeros(scaled.shape[0])
        columns, here = self._label_columns(chunk)
        return torch.where(here, scaled.gather(1, columns), 0.0).squeeze(1)

    def _add_at_label(self, gradient: Tensor, chunk: slice, value: Tensor) -> Tensor:
        if self.num_columns == 0:
            return gradient
        columns, here = self._label_columns(chunk)
        return gradient.scatter_add_(1, columns, torch.where(here, value, 0.0))

    def _kept(self, scaled: Tensor, chunk: slice) -> Tensor:
        """u with -inf at the columns that the keep mask drops; the label's own is never one."""
        if self._keep_mask is None:
            return scaled
        keep = self._chunk_keep_mask(self._keep_mask, chunk)
        if self.num_columns > 0:
            columns, here = self._label_columns(chunk)
            keep = keep.scatter(1, columns, keep.gather(1, columns) | here)
        return scaled.masked_fill(~keep, -torch.inf)

    def _chunk_keep_mask(
        self, keep_mask: Tensor | KeptIds, chunk: slice
    ) -> Bool[Tensor, "rows columns"]:
        if isinstance(keep_mask, KeptIds):
            kept_ids = keep_mask.select(self.rows[chunk])
            return kept_ids.mask(self._first_column, self.num_columns)
        return self.take(keep_mask, chunk)[:, : self.num_columns]

    def _checked_temperature(self, temperature: float | Tensor) -> float | Tensor:
        """The temperature; the chosen rows' where there is one per row."""
        rule = "temperature must be finite and > 0"
        if not isinstance(temperature, Tensor):
            if not (temperature > 0 and math.isfinite(temperature)):
                raise ValueError(f"{rule}: temperature={temperature}")
            return temperature
        if temperature.shape != (self._num_tokens,):
            raise ValueError(
                "temperature must be a number or have the shape of labels: "
                f"temperature.shape={tuple(temperature.shape)}, labels.shape={(self._num_tokens,)}"
            )
        chosen = self.take(temperature.detach()).to(self.dtype)
        wrong = ~((chosen > 0) & chosen.isfinite())
        if wrong.any():
            row = int(self.rows[wrong][0])
            raise ValueError(f"{rule}: temperature[{row}]={float(temperature[row])}")
        return chosen


def _labelled_rows(
    labels: Int64[Tensor, " tokens"], vocab_size: int
) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """The rows that have a label, and their labels."""
    rows = (labels != IGNORED_LABEL).nonzero().squeeze(1)
    chosen = labels.index_select(0, rows)
    outside = (chosen < 0) | (chosen >= vocab_size)
    if outside.any():
        row = int(rows[outside][0])
        raise ValueError(
            f"labels must be {IGNORED_LABEL} or in [0, vocab_size): "
            f"labels[{row}]={int(labels[row])}, vocab_size={vocab_size}"
        )
    return rows, chosen


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
