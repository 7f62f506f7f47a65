"""The gradients of hidden states, weight and bias, summed over rows of the logits' gradient.

Rows without gradient never reach a product. Those of thinned-out chunks wait in one buffer until
there are enough of them for an efficient product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from slime_loss.kept_columns import entries_in_cache
from slime_loss.projection import BLOCK_BYTES, Projection, RowPlan, add_long_product_, add_product_
from slime_loss.row_facts import RowFacts


class HeadGradients(NamedTuple):
    """Of the hidden states (or their labelled rows), weight and bias; None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class GradientSums:
    """Sums of gradients, and the one buffer that logits become gradients in.

    Args:
        projection: What the gradients are of.
        plan: The rows there is room for.
        needed: Which of features, weight and bias need a gradient.
        weight_sum: [V/tp, H], what the weight's gradient is added to; None is a new tensor.
    """

    def __init__(
        self,
        projection: Projection,
        plan: RowPlan,
        needed: Sequence[bool],
        weight_sum: Tensor | None = None,
    ) -> None:
        self._projection = projection
        self._buffer = projection.empty_logits(min(plan.chunk_rows, len(projection.softmax.rows)))
        self._waiting: list[Int64[Tensor, " active"]] = []
        self._num_waiting = 0

        def zeros(tensor: Tensor | None) -> Tensor | None:
            dtype = projection.softmax.dtype
            return None if tensor is None else torch.zeros_like(tensor, dtype=dtype)

        features, weight, bias = needed
        self._features = zeros(projection.features) if features else None
        self._bias = zeros(projection.bias) if bias else None
        self._weight = weight_sum if weight else None
        self._overwrites_weight = weight and weight_sum is None
        if self._overwrites_weight:
            # The first product saves filling it with zeros, which is noticeable.
            self._weight = torch.empty_like(projection.weight, dtype=projection.softmax.dtype)

    def room(self, num_rows: int) -> Float[Tensor, "rows columns"]:
        """Where logits of a chunk may be put; `add` finds enough room after this alone."""
        if self._num_waiting + num_rows > self._buffer.shape[0]:
            self._multiply_waiting()
        return self._buffer[self._num_waiting : self._num_waiting + num_rows]

    def add(self, logits: Float[Tensor, "rows columns"], facts: RowFacts) -> None:
        """Add what a chunk contributes, to be multiplied now or later.

        Args:
            logits: [c, num_columns], of the chunk, in what `room` gave last or elsewhere. What is
                in there is overwritten.
            facts: What is known of the chunk's rows.
        """
        active = facts.coefficients.active()
        is_sparse = self._projection.softmax.is_sparse(facts.at(active))
        # First, as what the others become may overwrite the logits.
        self._add_sparse(logits, active[is_sparse], facts)
        active = active[~is_sparse]
        start, self._num_waiting = self._num_waiting, self._num_waiting + active.shape[0]
        out, facts = self._buffer[start : self._num_waiting], facts.at(active)
        self._projection.softmax.form_gradient_(out, logits, active, facts)
        self._waiting.append(facts.rows)

    def total(self) -> HeadGradients:
        """The sums over all that was added."""
        self._multiply_waiting()
        self._start_weight()
        return HeadGradients(self._features, self._weight, self._bias)

    def _add_sparse(self, logits: Tensor, chosen: Tensor, facts: RowFacts) -> None:
        projection = self._projection
        row_bytes = max(projection.features.shape[1], 1) * projection.softmax.dtype.itemsize
        max_entries = min(entries_in_cache(logits), BLOCK_BYTES // row_bytes)
        for rows, gradient in projection.softmax.sparse_gradients(
            logits, chosen, facts.at(chosen), max_entries
        ):
            if self._features is not None:
                self._features.index_copy_(0, rows, gradient.times(projection.weight))
            columns, transposed = gradient.transposed()
            if self._weight is not None:
                self._start_weight()
                features = projection.features.index_select(0, rows)
                self._weight.index_add_(0, columns, transposed.times(features))
            if self._bias is not None:
                ones = torch.ones_like(rows, dtype=self._bias.dtype).unsqueeze(1)
                self._bias.index_add_(0, columns, transposed.times(ones).squeeze(1))

    def _start_weight(self) -> None:
        """Fill the sum of the weight's gradient with zeros, if nothing was written there yet."""
        if self._weight is not None and self._overwrites_weight:
            self._weight.zero_()
            self._overwrites_weight = False

    def _multiply_waiting(self) -> None:
        if self._num_waiting > 0:
            self._multiply(self._buffer[: self._num_waiting], torch.cat(self._waiting))
        self._waiting, self._num_waiting = [], 0

    def _multiply(self, gradient: Tensor, rows: Tensor) -> None:
        projection = self._projection
        features = projection.features.index_select(0, rows)
        grad_features = torch.zeros_like(features, dtype=gradient.dtype)
        beta = 0 if self._overwrites_weight else 1
        for block in projection.blocks():
            grad_block = gradient[:, block]
            if self._features is not None:
                add_long_product_(grad_features, grad_block, projection.weight[block])
            if self._weight is not None:
                add_product_(self._weight[block], grad_block.t(), features, beta=beta)
            if self._bias is not None:
                self._bias[block] += grad_block.sum(0)
        if self._features is not None:
            self._features.index_copy_(0, rows, grad_features)
        if self._weight is not None and self._overwrites_weight:
            self._weight[projection.softmax.num_columns :] = 0
            self._overwrites_weight = False
