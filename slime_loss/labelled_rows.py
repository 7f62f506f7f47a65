"""The rows of a call that have a label: the only ones that anything is computed for."""

import torch
from jaxtyping import Int64
from torch import Tensor

from slime_loss.batch import IGNORED_LABEL

_ALL = slice(None)


class LabelledRows:
    """The rows that have a label, among all T rows of a call.

    All ranks of a tensor-parallel group pass the same labels. So they choose the same rows and cut
    the same chunks, and whatever is sized by them agrees over the group without asking.

    Args:
        labels: [T], vocabulary ids; -100 at rows that are not asked for.
        vocab_size: Labels are below it.

    Attributes:
        num_tokens: T, all rows.
        index: [n], the rows that have a label.
        labels: [n], their labels.

    Raises:
        ValueError: A label is outside the vocabulary.
    """

    def __init__(self, labels: Int64[Tensor, " tokens"], vocab_size: int) -> None:
        self.num_tokens = labels.shape[0]
        self.index = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        self.labels = labels.index_select(0, self.index)
        outside = (self.labels < 0) | (self.labels >= vocab_size)
        if outside.any():
            row = int(self.index[outside][0])
            raise ValueError(
                f"labels must be {IGNORED_LABEL} or in [0, vocab_size): "
                f"labels[{row}]={int(labels[row])}, vocab_size={vocab_size}"
            )

    def __len__(self) -> int:
        return self.index.shape[0]

    @property
    def others(self) -> Int64[Tensor, " others"]:
        """The rows that have no label."""
        is_other = torch.ones(self.num_tokens, dtype=torch.bool, device=self.index.device)
        return is_other.index_fill_(0, self.index, False).nonzero().squeeze(1)

    def chunks(self, chunk_rows: int) -> list[slice]:
        """Slices of the labelled rows, alike and at most `chunk_rows`; an empty one for none."""
        num_chunks = max(-(-len(self) // chunk_rows), 1)
        size = max(-(-len(self) // num_chunks), 1)
        starts = range(0, max(len(self), 1), size)
        return [slice(start, min(start + size, len(self))) for start in starts]

    def num_chunks_missing(self, chunk_rows: int) -> int:
        """How many chunks more there would be if every row had a label."""
        return max(-(-self.num_tokens // chunk_rows), 1) - len(self.chunks(chunk_rows))

    def take(self, tensor: Tensor, chunk: slice = _ALL) -> Tensor:
        """The labelled rows of a [T, ...] tensor; a view of it where every row has a label."""
        if len(self) == self.num_tokens:
            return tensor[chunk]
        return tensor.index_select(0, self.index[chunk])

    def put_(self, tensor: Tensor, values: Tensor, chunk: slice = _ALL) -> None:
        """Write the values of labelled rows into a [T, ...] tensor that the caller owns."""
        if len(self) == self.num_tokens:
            tensor[chunk].copy_(values)
        else:
            tensor.index_copy_(0, self.index[chunk], values.to(tensor.dtype))

    def spread(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, ...] of `dtype`, with the [n, ...] values at the labelled rows and 0 elsewhere.

        The values themselves where every row has a label and the dtype is theirs.
        """
        if len(self) == self.num_tokens:
            return values.to(dtype)
        spread = values.new_zeros((self.num_tokens, *values.shape[1:]), dtype=dtype)
        self.put_(spread, values)
        return spread
