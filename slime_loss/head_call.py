"""One call of the head: its inputs, which rows are projected in which chunks, over which ranks."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.collectives import (
    all_gather_rows,
    all_reduce_sum_,
    group_size,
    reduce_scatter_rows,
)
from slime_loss.gradient_sums import HeadGradients
from slime_loss.log_probs import check_rows_and_labels, checked_chunk_rows
from slime_loss.main_grad import main_grad_of, main_grad_was_added_to
from slime_loss.projection import Projection, RowPlan, plan_rows
from slime_loss.vocab_softmax import SoftmaxOptions, VocabSoftmax


class HeadInputs(NamedTuple):
    """What gradients flow to: hidden [T, H] or [T/tp, H], weight [V/tp, H], bias [V/tp] or None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def needed(self) -> list[bool]:
        """Which of them need a gradient."""
        return [
            tensor is not None and tensor.requires_grad
            for tensor in (self.hidden, self.weight, self.bias)
        ]


@dataclass(frozen=True)
class HeadOptions:
    """How a call is worked through.

    Attributes:
        sequence_parallel: Whether the ranks share the rows of `hidden` out.
        chunk_rows: Rows projected at a time; None takes what memory_bytes allow.
        memory_bytes: For logits; None takes what makes the products fast.
        keeps_logits: Whether logits may be kept for the backward.
        accumulate_into_main_grad: Whether the weight's gradient goes to its main_grad, if it
            has one.
    """

    sequence_parallel: bool = False
    chunk_rows: int | None = None
    memory_bytes: int | None = None
    keeps_logits: bool = True
    accumulate_into_main_grad: bool = False


@dataclass(frozen=True)
class HeadCall:
    """A call whose arguments are checked.

    Attributes:
        softmax: Of the rows that have a label.
        plan: How those are worked through.
        tp_group: The ranks that share the vocabulary out; None is one process.
        options: As given.
    """

    softmax: VocabSoftmax
    plan: RowPlan
    tp_group: ProcessGroup | None
    options: HeadOptions

    def projection(self, inputs: HeadInputs) -> Projection:
        """Of the rows that have a label, of all ranks' rows."""
        hidden = inputs.hidden
        if self.options.sequence_parallel:
            hidden = all_gather_rows(hidden, self.tp_group)
        features = self.softmax.rows.take(hidden)
        return Projection(self.softmax, features, inputs.weight, inputs.bias)

    def main_grad(self, weight: Tensor) -> Tensor | None:
        """What the weight's gradient is added to, if it is not left to autograd."""
        return main_grad_of(weight) if self.options.accumulate_into_main_grad else None

    def handed_over(
        self, gradients: HeadGradients, weight: Tensor, dtype: torch.dtype
    ) -> HeadGradients:
        """What autograd gets. Reduces the hidden states' gradient over the group.

        Args:
            gradients: This rank's parts; may be overwritten. Of a weight with main_grad, the
                gradient is there already.
            weight: [V/tp, H], whose gradient it is.
            dtype: Of the inputs.
        """
        features, of_weight, bias = gradients
        if of_weight is not None:
            is_elsewhere = self.main_grad(weight) is not None
            of_weight = main_grad_was_added_to(weight) if is_elsewhere else of_weight.to(dtype)
        return HeadGradients(
            None if features is None else self._hidden_gradient(features, dtype),
            of_weight,
            None if bias is None else bias.to(dtype),
        )

    def _hidden_gradient(self, labelled: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `hidden`, from this rank's part [n, H] of it at the labelled rows."""
        rows = self.softmax.rows
        if self.options.sequence_parallel:
            # The ranks' slices hold unequal numbers of labelled rows, so every row travels.
            every_row = rows.spread(labelled, labelled.dtype)
            return reduce_scatter_rows(every_row, self.tp_group).to(dtype)
        all_reduce_sum_(labelled, self.tp_group)
        return rows.spread(labelled, dtype)


def prepare_call(
    inputs: HeadInputs, labels: Tensor, softmax: SoftmaxOptions, options: HeadOptions
) -> HeadCall:
    """Check all arguments of a call.

    Args:
        inputs: What gradients flow to.
        labels: [T], -100 at rows that are not projected.
        softmax: What is asked of the logits.
        options: How the call is worked through.

    Raises:
        ValueError: A shape or option that cannot be, or a label outside the vocabulary.
    """
    hidden, weight, bias = inputs
    shards = group_size(softmax.tp_group) if options.sequence_parallel else 1
    check_rows_and_labels("hidden", hidden, labels, shards)
    _check_weight(hidden, weight, bias)
    chunk_rows = checked_chunk_rows(options.chunk_rows)
    of_labels = VocabSoftmax(labels, weight.shape[0], hidden.dtype, softmax)
    plan = plan_rows(of_labels, weight, chunk_rows, options.memory_bytes)
    if not (options.keeps_logits and torch.is_grad_enabled() and any(inputs.needed)):
        plan = replace(plan, num_kept=0)
    return HeadCall(of_labels, plan, softmax.tp_group, options)


def _check_weight(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            "weight must be [V/tp, H] with the H of hidden: "
            f"weight.shape={tuple(weight.shape)}, hidden.shape={tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            "bias must have one number per row of weight: "
            f"bias.shape={tuple(bias.shape)}, weight.shape={tuple(weight.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (hidden.dtype, hidden.device):
            raise ValueError(
                f"{name} must have the dtype and device of hidden: "
                f"{name} is {tensor.dtype} on {tensor.device}, "
                f"hidden is {hidden.dtype} on {hidden.device}"
            )
