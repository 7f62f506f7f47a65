"""Sums over the tokens of each sample, on whichever ranks of the context-parallel group they are.

A rank takes part whatever it owns: the number of samples is known to all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.batch import TokenBatch
from slime_loss.collectives import all_reduce_sum, group_rank


@dataclass(frozen=True)
class Samples:
    """The samples of a pack that is shared out over a context-parallel group.

    Attributes:
        batch: This rank's rows.
        num_tokens: [S], trained tokens of each sample, over all ranks.
        cp_group: The ranks that share the pack out; None is one process.
    """

    batch: TokenBatch
    num_tokens: Shaped[Tensor, " samples"]
    cp_group: ProcessGroup | None

    @classmethod
    def of(cls, batch: TokenBatch, cp_group: ProcessGroup | None, needed_by: str) -> "Samples":
        """The samples of a batch.

        Raises:
            ValueError: The batch lacks num_trained_tokens, one of them is negative, or a row that
                trains is of no sample. The rank that sees it raises before it communicates.
        """
        if batch.num_trained_tokens is None:
            raise ValueError(
                f"num_trained_tokens is needed by {needed_by}: num_trained_tokens=None"
            )
        _check_samples(batch, batch.num_trained_tokens)
        return cls(batch, batch.num_trained_tokens, cp_group)

    def sums(
        self, streams: Mapping[str, Shaped[Tensor, " tokens"]]
    ) -> dict[str, Float[Tensor, " samples"]]:
        """Sum streams over each sample's tokens; all in one all-reduce over cp_group.

        The gradient takes one more all-reduce, of the same shape, in which every rank of the group
        must take part: every rank's loss may use the sum.

        Args:
            streams: name -> [T], floating point or bool, 0 at rows that do not train.

        Returns:
            name -> [S], float64, with gradient where the stream has one.
        """
        num_samples = self.num_tokens.shape[0]
        table = torch.stack([stream.double() for stream in streams.values()])
        # Rows that do not train may name any sample; they go to one too many.
        index = torch.where(self.batch.loss_mask, self.batch.sample_index, num_samples)
        own = table.new_zeros(table.shape[0], num_samples + 1).index_add(1, index, table)
        everywhere = all_reduce_sum(own[:, :num_samples], self.cp_group)
        return {
            name: total if stream.requires_grad else total.detach()
            for (name, stream), total in zip(streams.items(), everywhere.unbind(), strict=True)
        }

    def spread(self, values: Shaped[Tensor, " samples"]) -> Shaped[Tensor, " tokens"]:
        """Give each row the value of its sample; 0 or false at rows that do not train.

        Args:
            values: [S].

        Returns:
            [T], with gradient.
        """
        batch, num_samples = self.batch, self.num_tokens.shape[0]
        padded = torch.cat([values, values.new_zeros(1)])
        return padded[torch.where(batch.loss_mask, batch.sample_index, num_samples)]

    def count_once(self, flags: Bool[Tensor, " samples"]) -> Float[Tensor, ""]:
        """The number of true flags, on the group's first rank; 0 on the others.

        Every rank of the group knows all of the pack's samples, and a sum over ranks must count
        each sample once.
        """
        return flags.sum(dtype=torch.float64) * float(group_rank(self.cp_group) == 0)


def _check_samples(batch: TokenBatch, num_tokens: Tensor) -> None:
    """Raise ValueError for a negative number of tokens, and a trained row outside [0, samples)."""
    num_samples, index = num_tokens.shape[0], batch.sample_index
    negative = num_tokens < 0
    outside = batch.loss_mask & ((index < 0) | (index >= num_samples))
    # Asked once, since each question waits for the device.
    if not bool(torch.cat([negative, outside]).any()):
        return
    if bool(negative.any()):
        sample = int(negative.nonzero()[0])
        raise ValueError(
            f"num_trained_tokens must be >= 0: num_trained_tokens[{sample}]={num_tokens[sample]}"
        )
    row = int(outside.nonzero()[0])
    raise ValueError(
        "sample_index must be in [0, samples) where a row trains: "
        f"sample_index[{row}]={index[row]}, samples={num_samples}"
    )
