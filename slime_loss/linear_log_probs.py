"""Log-probabilities and entropy of tokens from hidden states: the head, without [T, V] logits.

Only rows that have a label are projected, a chunk of rows at a time. The backward needs each
chunk's logits again: as many chunks are kept as the memory budget allows, the others recomputed.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.autograd import AutogradContext, differentiable_once
from slime_loss.batch import KeptIds, TokenLogProbs
from slime_loss.gradient_sums import GradientSums
from slime_loss.head_call import HeadCall, HeadInputs, HeadOptions, prepare_call
from slime_loss.projection import Projection
from slime_loss.row_facts import Totals
from slime_loss.vocab_softmax import EntropyMode, SoftmaxOptions


def log_probs_from_hidden(  # noqa: PLR0913
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "columns hidden"],
    labels: Int64[Tensor, " tokens"],
    *,
    bias: Float[Tensor, " columns"] | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    temperature: float | Float[Tensor, " tokens"] = 1.0,
    keep_mask: Bool[Tensor, "tokens columns"] | KeptIds | None = None,
    entropy: EntropyMode = "none",
    chunk_rows: int | None = None,
    memory_bytes: int | None = None,
) -> TokenLogProbs:
    """Log-probability of each row's label, and the entropy of each row, of hidden @ weight.T.

    Communicates over tp_group: in the forward one all-gather of a few numbers a row, in the
    backward one all-reduce of the labelled rows' hidden gradient. With sequence_parallel the
    forward also gathers the hidden states, and the backward reduce-scatters their gradient
    instead. All ranks have the same labels, so they agree on rows and chunks without asking, and
    run these collectives even when no row has a label.

    Args:
        hidden: [T, H], the same on all ranks of tp_group; [T/tp, H], this rank's slice, with
            sequence_parallel. Logits and gradients are accumulated in float64 if it is that,
            otherwise in float32.
        weight: [V/tp, H], this rank's rows of the vocabulary, padding included.
        labels: [T], the token each row predicts; -100 gives log-prob, entropy and gradient 0.
        bias: [V/tp], added to the logits.
        tp_group: The ranks that share the vocabulary out, in rank order.
        sequence_parallel: Whether the ranks share the rows of `hidden` out, too.
        vocab_size: The true vocabulary; columns from here on are padding and take no part.
            None: every column is true.
        temperature: Divides the logits, in both results: a number, or one per row.
        keep_mask: The columns that top-p or top-k sampling kept: log-probs are renormalised over
            them and the label's own. The entropy stays that of the full vocabulary.
        entropy: "none", "metric" (a value without gradient) or "loss" (with gradient).
        chunk_rows: Rows projected at a time; None takes as many as memory_bytes allow.
        memory_bytes: What logits and their gradients may hold at any one time; it decides how many
            chunks are kept for the backward. None takes what makes the products fast.

    Returns:
        log_probs [T] and entropy [T] (None if not asked for), in nats.

    Raises:
        ValueError: A shape or option that cannot be, or a label outside the vocabulary.
    """
    options = HeadOptions(sequence_parallel, chunk_rows, memory_bytes)
    inputs = HeadInputs(hidden, weight, bias)
    softmax = SoftmaxOptions(tp_group, vocab_size, temperature, keep_mask, entropy)
    return project(inputs, prepare_call(inputs, labels, softmax, options))


def project(inputs: HeadInputs, call: HeadCall) -> TokenLogProbs:
    """`log_probs_from_hidden` of a call that is prepared."""
    return TokenLogProbs(*_LinearLogProbs.apply(*inputs, call))


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall
    ) -> tuple[Tensor, Tensor | None]:
        softmax, plan = call.softmax, call.plan
        projection = call.projection(HeadInputs(hidden, weight, bias))
        chunks = softmax.rows.chunks(plan.chunk_rows)
        num_kept = plan.num_kept
        kept = [projection.empty_logits(chunk.stop - chunk.start) for chunk in chunks[:num_kept]]
        reused = projection.empty_logits(chunks[0].stop if num_kept < len(chunks) else 0)
        statistics: list[Tensor] = []
        for number, chunk in enumerate(chunks):
            out = kept[number] if number < num_kept else reused[: chunk.stop - chunk.start]
            statistics.append(softmax.statistics(projection.logits(chunk, out), chunk))
        log_probs, totals = softmax.merge(torch.cat(statistics))
        ctx.call, ctx.dtype = call, hidden.dtype
        ctx.save_for_backward(projection.features, weight, bias, *totals, *kept)
        result = softmax.results(log_probs, totals.entropy)
        softmax.mark(ctx, result[1])
        return result

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call
        softmax = call.softmax
        features, weight, bias, *saved = ctx.saved_tensors
        totals, kept = Totals(*saved[: len(Totals._fields)]), saved[len(Totals._fields) :]
        projection = Projection(softmax, features, weight, bias)
        main_grad = call.main_grad(weight)
        is_summed_there = main_grad is not None and main_grad.dtype == softmax.dtype
        weight_sum = main_grad if is_summed_there else None
        sums = GradientSums(projection, call.plan, ctx.needs_input_grad[:3], weight_sum)
        facts = softmax.facts(totals, softmax.upstream(grad_log_probs, grad_entropy))
        for number, chunk in enumerate(softmax.rows.chunks(call.plan.chunk_rows)):
            if not facts.at(chunk).coefficients.has_any():
                continue
            room = sums.room(chunk.stop - chunk.start)
            logits = kept[number] if number < len(kept) else projection.logits(chunk, room)
            sums.add(logits, facts.at(chunk))
        gradients = sums.total()
        if main_grad is not None and gradients.weight is not None and not is_summed_there:
            main_grad.add_(gradients.weight)
        return *call.handed_over(gradients, weight, ctx.dtype), None
