"""The logits of a chunk of rows, and how many rows a chunk has.

Products are accumulated in float32 (float64 for such inputs). Operands of a lower precision are
worked on in blocks of the vocabulary, so that no copy of the weight, or of its size, is made.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from slime_loss.row_sums import cache_bytes
from slime_loss.vocab_softmax import VocabSoftmax

# Of the weight, or of its gradient, held in another precision at any one time.
BLOCK_BYTES = 8 * 2**20

# Rows of logits that a matrix product needs to run at full speed, by measurement.
_CPU_ROWS, _GPU_ROWS = 368, 2048

# With fewer rows than this a CPU multiplies over a long dimension faster in pieces of this length,
# by measurement.
_ROWS_OF_LONG_PRODUCT, _PIECE = 192, 512

# What logits may hold where nobody says it, if those rows are content with it.
_CPU_BYTES, _GPU_BYTES = 45 * 2**20, 2**30


@dataclass(frozen=True)
class RowPlan:
    """How the labelled rows are worked through.

    Attributes:
        chunk_rows: The most rows projected at a time, and formed into gradients.
        num_kept: The chunks whose logits are kept for the backward, from the first on.
    """

    chunk_rows: int
    num_kept: int = 0


def plan_rows(
    softmax: VocabSoftmax, weight: Tensor, chunk_rows: int | None, memory_bytes: int | None
) -> RowPlan:
    """The plan whose logits and temporaries, with what is kept, hold memory_bytes or less.

    The same on every rank that has as many columns, padding included.

    Args:
        softmax: What is done with the logits.
        weight: [V/tp, H].
        chunk_rows: Rows projected at a time; None takes what memory allows.
        memory_bytes: None takes what makes the products fast.
    """
    row_bytes = max(weight.shape[0], 1) * softmax.dtype.itemsize
    block_bytes = max(cache_bytes(weight), row_bytes)
    if memory_bytes is None:
        rows, least = (_GPU_ROWS, _GPU_BYTES) if weight.is_cuda else (_CPU_ROWS, _CPU_BYTES)
        memory_bytes = rows * row_bytes + softmax.temporaries * block_bytes
        memory_bytes = max(memory_bytes, least)
    if chunk_rows is None:
        # Temporaries are as large as the chunk, or as a block where that is smaller.
        rows_of_chunks = memory_bytes // ((1 + softmax.temporaries) * row_bytes)
        left = memory_bytes - softmax.temporaries * block_bytes
        chunk_rows = max(left // row_bytes, rows_of_chunks, 1)
    chunk_bytes = chunk_rows * row_bytes
    left = memory_bytes - chunk_bytes
    left -= softmax.temporaries * min(chunk_bytes, block_bytes)
    return RowPlan(chunk_rows, max(left // chunk_bytes, 0))


@dataclass(frozen=True)
class Projection:
    """The logits features @ weight.T + bias of a rank's columns of the true vocabulary.

    Attributes:
        softmax: Which rows and columns, and in which dtype.
        features: [n, H], the hidden states of the labelled rows.
        weight: [V/tp, H].
        bias: [V/tp].
    """

    softmax: VocabSoftmax
    features: Float[Tensor, "rows hidden"]
    weight: Float[Tensor, "columns hidden"]
    bias: Float[Tensor, " columns"] | None

    def empty_logits(self, num_rows: int) -> Float[Tensor, "rows columns"]:
        """Room for the logits of some rows."""
        shape = (num_rows, self.softmax.num_columns)
        return torch.empty(shape, dtype=self.softmax.dtype, device=self.features.device)

    def logits(
        self, chunk: slice, out: Float[Tensor, "rows columns"]
    ) -> Float[Tensor, "rows columns"]:
        """The logits of a chunk of the labelled rows, written into `out`; returns it."""
        for block in self.blocks():
            add_product_(out[:, block], self.features[chunk], self.weight[block].t(), beta=0)
        if self.bias is not None:
            out += self.bias[: self.softmax.num_columns]
        return out

    def blocks(self) -> list[slice]:
        """Slices of the columns whose part of the weight is multiplied at a time."""
        num_columns, size = self.softmax.num_columns, max(self.softmax.num_columns, 1)
        if self.weight.dtype != self.softmax.dtype:
            row_bytes = max(self.weight.shape[1], 1) * self.softmax.dtype.itemsize
            size = max(BLOCK_BYTES // row_bytes, 1)
        starts = range(0, num_columns, size)
        return [slice(start, min(start + size, num_columns)) for start in starts]


def add_long_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, where the dimension that is summed over is long."""
    length = left.shape[1]
    is_slow = not out.is_cuda and left.shape[0] < _ROWS_OF_LONG_PRODUCT
    piece = _PIECE if is_slow else max(length, 1)
    for start in range(0, length, piece):
        stop = start + piece
        add_product_(out, left[:, start:stop], right[start:stop])


def add_product_(out: Tensor, left: Tensor, right: Tensor, *, beta: int = 1) -> None:
    """out = beta * out + left @ right, accumulated in out's dtype."""
    if out.is_cuda and right.dtype != out.dtype:
        # Tensor cores multiply in the lower precision and accumulate in float32.
        product = torch.mm(left.to(right.dtype), right, out_dtype=out.dtype)
        out.mul_(beta).add_(product) if beta else out.copy_(product)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype), beta=beta)
