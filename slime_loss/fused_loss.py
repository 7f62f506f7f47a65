"""The loss and its gradients in one pass over the logits, where each row's loss is its own.

The gradient of a chunk's logits is formed while they are there, for a loss that is not scaled; the
backward only scales what came of it. Three matrix products, and nothing of a row's size is kept.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slime_loss.autograd import AutogradContext, differentiable_once
from slime_loss.batch import LossOutput, TokenBatch
from slime_loss.gradient_sums import GradientSums, HeadGradients
from slime_loss.head_call import HeadCall, HeadInputs
from slime_loss.objective import Objective
from slime_loss.row_facts import Coefficients, RowFacts


def fused_loss(
    inputs: HeadInputs, call: HeadCall, objective: Objective, batch: TokenBatch
) -> LossOutput:
    """The objective of the log-probs and entropy of a call, with the gradients formed at once.

    Communicates over the tensor-parallel group: one all-gather of a few numbers a row for each
    chunk, as many as T rows would have, whatever rows have a label; in the backward what
    `log_probs_from_hidden` does there.

    Args:
        inputs: What gradients flow to.
        call: The call; its labels are those of the rows that train.
        objective: A row-separable one.
        batch: The streams.

    Returns:
        The loss, with gradient to the inputs, and the metrics.
    """
    softmax = call.softmax
    with torch.no_grad():
        projection = call.projection(inputs)
        sums = GradientSums(projection, call.plan, inputs.needed)
        every_row = torch.arange(len(softmax.rows), device=inputs.hidden.device)
        log_probs: list[Tensor] = []
        entropies: list[Tensor] = []
        for chunk in softmax.rows.chunks(call.plan.chunk_rows):
            logits = projection.logits(chunk, sums.room(chunk.stop - chunk.start))
            chunk_log_probs, totals = softmax.merge(softmax.statistics(logits, chunk))
            rows = batch.select(softmax.rows.index[chunk])
            coefficients = _coefficients(objective, rows, chunk_log_probs, totals.entropy)
            sums.add(logits, RowFacts(every_row[chunk], totals, coefficients))
            log_probs.append(chunk_log_probs)
            entropies += [] if totals.entropy is None else [totals.entropy]
        for _ in range(softmax.rows.num_chunks_missing(call.plan.chunk_rows)):
            softmax.merge(softmax.statistics(sums.room(0), slice(0, 0)))
        gradients = sums.total()
        entropy = torch.cat(entropies) if entropies else None
        result = softmax.results(torch.cat(log_probs), entropy)
        output = objective.function(*result, batch)
    formed = _Formed(call, inputs.weight, gradients)
    return replace(output, loss=_FormedLoss.apply(*inputs, output.loss, formed))


@dataclass(frozen=True)
class _Formed:
    """The gradients of a loss that is not scaled."""

    call: HeadCall
    weight: Tensor
    gradients: HeadGradients


def _coefficients(
    objective: Objective, batch: TokenBatch, log_probs: Tensor, entropy: Tensor | None
) -> Coefficients:
    """The gradients of the objective with respect to the log-probs and entropy of rows."""
    leaves = [log_probs.detach().requires_grad_()]
    if entropy is not None and objective.entropy == "loss":
        entropy = entropy.detach().requires_grad_()
        leaves.append(entropy)
    with torch.enable_grad():
        loss = objective.function(leaves[0], entropy, batch).loss
    of_log_probs, *of_entropy = torch.autograd.grad(
        loss, leaves, allow_unused=True, materialize_grads=True
    )
    return Coefficients(of_log_probs, of_entropy[0] if of_entropy else None)


class _FormedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,  # noqa: ARG004 - a gradient flows to it
        bias: Tensor | None,  # noqa: ARG004 - and to it
        loss: Tensor,
        formed: _Formed,
    ) -> Tensor:
        ctx.call, ctx.weight, ctx.dtype = formed.call, formed.weight, hidden.dtype
        ctx.save_for_backward(*formed.gradients)
        return loss.clone()

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call
        features, weight, bias = ctx.saved_tensors
        main_grad = call.main_grad(ctx.weight)
        if weight is not None and main_grad is not None:
            main_grad.addcmul_(weight, scale)
        else:
            weight = _scaled(weight, scale)
        gradients = HeadGradients(_scaled(features, scale), weight, _scaled(bias, scale))
        return *call.handed_over(gradients, ctx.weight, ctx.dtype), None, None


def _scaled(gradient: Tensor | None, scale: Tensor) -> Tensor | None:
    """The gradient times a number; in its place where nobody can ask for it again."""
    if gradient is None:
        return None
    if _graph_is_kept():
        return gradient * scale
    is_one = not scale.is_cuda and bool(scale == 1)
    return gradient if is_one else gradient.mul_(scale)


def _graph_is_kept() -> bool:
    """Whether the backward that runs may run again; true where this torch does not say."""
    engine: Any = vars(torch._C)["_autograd"]  # pyright: ignore[reportPrivateUsage]
    is_kept = getattr(engine, "_get_current_graph_task_keep_graph", None)
    return is_kept is None or is_kept()
