"""The model head of a critic: hidden states, the value weight and a batch give the loss.

The module has no parameters: it stands in for output layer and loss, as RLHead does.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from slime_loss.batch import LossOutput, TokenBatch
from slime_loss.collectives import gather_rows_for_same_loss, group_rank, group_size
from slime_loss.log_probs import check_rows_and_labels
from slime_loss.policy_config import ValueLossConfig
from slime_loss.value import value_loss


class ValueHead(nn.Module):
    """Hidden states to values, and to the loss of the rows that train.

    The weight is whole on every rank of tp_group. Without sequence_parallel, all of them compute
    the same, and nothing is communicated. With it, each computes the values of its own rows, and
    one all-gather over tp_group, in the forward, gives them all values; the loss is then the same
    on every one of these ranks, so the backward takes each its own slice and communicates nothing.
    The gradients of weight and bias are those of the rank's own rows: the caller must sum them
    over tp_group, in Megatron by marking `weight.sequence_parallel = True` (and the bias).

    Args:
        loss: The loss of a value.
        tp_group: The ranks that share the rows out under sequence_parallel; None is one process.
        sequence_parallel: Whether each rank of tp_group has a slice [T/tp, H] of the hidden
            states, instead of all of them.
    """

    def __init__(
        self,
        loss: ValueLossConfig,
        *,
        tp_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel

    def forward(
        self,
        hidden: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, "1 hidden"],
        batch: TokenBatch,
        *,
        bias: Float[Tensor, "1"] | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch, and its metrics.

        Args:
            hidden: [T, H], or this rank's [T/tp, H] with sequence_parallel.
            weight: [1, H].
            batch: The streams of the T local rows; values and returns are needed.
            bias: [1], added to the values.

        Returns:
            The loss as this rank's part of the step's plain sum, over context-parallel ranks.

        Raises:
            ValueError: Shapes that do not fit, or a stream that the batch lacks.
        """
        return value_loss(self.values(hidden, weight, batch, bias=bias), batch, self.loss)

    def values(
        self,
        hidden: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, "1 hidden"],
        batch: TokenBatch,
        *,
        bias: Float[Tensor, "1"] | None = None,
    ) -> Float[Tensor, " tokens"]:
        """The values of the rows that train: hidden @ weight.T + bias. No temperature divides them.

        Args:
            hidden: [T, H], or this rank's [T/tp, H] with sequence_parallel.
            weight: [1, H].
            batch: The streams of the T local rows.
            bias: [1], added to the values.

        Returns:
            [T], fp32, or fp64 when hidden is; 0 at rows that do not train.

        Raises:
            ValueError: Shapes that do not fit.
        """
        num_slices = group_size(self.tp_group) if self.sequence_parallel else 1
        check_rows_and_labels("hidden", hidden, batch.labels, num_slices)
        _check_weight(hidden, weight, bias)
        mask = batch.loss_mask
        if self.sequence_parallel:
            mask = mask.view(num_slices, -1)[group_rank(self.tp_group)]
        # Rows are chosen before the product: what the others hold reaches no gradient either.
        rows = mask.nonzero().squeeze(1)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        offset = None if bias is None else bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            trained = functional.linear(hidden[rows].to(dtype), weight.to(dtype), offset).squeeze(1)
        own = trained.new_zeros(mask.shape).index_copy(0, rows, trained)
        return gather_rows_for_same_loss(own, self.tp_group) if self.sequence_parallel else own


def _check_weight(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.shape != (1, hidden.shape[1]):
        raise ValueError(
            "weight must be [1, H] with the H of hidden: "
            f"weight.shape={tuple(weight.shape)}, hidden.shape={tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != (1,):
        raise ValueError(f"bias must be one number: bias.shape={tuple(bias.shape)}")
