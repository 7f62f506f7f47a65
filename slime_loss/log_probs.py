"""Log-probabilities and entropy of tokens from their logits, vocabulary-parallel.

No softmax is kept: the backward makes it again from the logits, chunk by chunk.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.autograd import AutogradContext, differentiable_once
from slime_loss.batch import KeptIds, TokenLogProbs
from slime_loss.row_facts import Totals
from slime_loss.vocab_softmax import EntropyMode, SoftmaxOptions, VocabSoftmax

_CHUNK_BYTES = 16 * 2**20


def log_probs_from_logits(  # noqa: PLR0913
    logits: Float[Tensor, "tokens columns"],
    labels: Int64[Tensor, " tokens"],
    *,
    tp_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Float[Tensor, " tokens"] = 1.0,
    keep_mask: Bool[Tensor, "tokens columns"] | KeptIds | None = None,
    entropy: EntropyMode = "none",
    chunk_rows: int | None = None,
    reuse_logits: bool = False,
) -> TokenLogProbs:
    """Log-probability of each row's label, and the entropy of each row.

    Communicates over tp_group: one all-gather of a few numbers a row in the forward, nothing in
    the backward. Every rank returns the same bits. Rows without a label are never read.

    Args:
        logits: [T, V/tp], this rank's columns of the vocabulary, padding included. Computed in
            float64 if they are, otherwise in float32.
        labels: [T], the token each row predicts; -100 gives log-prob, entropy and gradient 0.
        tp_group: The ranks that share the vocabulary out, in rank order.
        vocab_size: The true vocabulary; columns from here on are padding and take no part.
            None: every column is true.
        temperature: Divides the logits, in both results: a number, or one per row.
        keep_mask: The columns that top-p or top-k sampling kept: log-probs are renormalised over
            them and the label's own. The entropy stays that of the full vocabulary.
        entropy: "none", "metric" (a value without gradient) or "loss" (with gradient).
        chunk_rows: Rows worked on at a time; None takes as many as 16 MiB hold.
        reuse_logits: The caller gives the logits up: the backward writes their gradient over
            them instead of into a second [T, V/tp], and can run only once.

    Returns:
        log_probs [T] and entropy [T] (None if not asked for), in nats.

    Raises:
        ValueError: A shape or option that cannot be, or a label outside the vocabulary.
        RuntimeError: A second backward over reused logits.
    """
    check_rows_and_labels("logits", logits, labels)
    softmax = VocabSoftmax(
        labels,
        logits.shape[1],
        logits.dtype,
        SoftmaxOptions(tp_group, vocab_size, temperature, keep_mask, entropy),
    )
    row_bytes = max(softmax.num_columns, 1) * softmax.dtype.itemsize
    chunk_rows = checked_chunk_rows(chunk_rows) or max(_CHUNK_BYTES // row_bytes, 1)
    return TokenLogProbs(*_LogProbs.apply(logits, softmax, chunk_rows, reuse_logits))


def check_rows_and_labels(name: str, rows: Tensor, labels: Tensor, shards: int = 1) -> None:
    """Raise ValueError unless `rows` is a matrix with one row, over all shards, per label."""
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise ValueError(
            "labels must be int64 with one dimension: "
            f"labels.dtype={labels.dtype}, labels.shape={tuple(labels.shape)}"
        )
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(
            f"{name} must be a floating point matrix: "
            f"{name}.dtype={rows.dtype}, {name}.shape={tuple(rows.shape)}"
        )
    if rows.shape[0] * shards != labels.shape[0]:
        raise ValueError(
            f"{name} must have one row per label over all shards: "
            f"{name}.shape={tuple(rows.shape)}, labels.shape={tuple(labels.shape)}, shards={shards}"
        )
    if rows.device != labels.device:
        raise ValueError(
            f"{name} must be on the device of labels: "
            f"{name}.device={rows.device}, labels.device={labels.device}"
        )


def checked_chunk_rows(chunk_rows: int | None) -> int | None:
    """The argument; ValueError unless it is None or positive."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be >= 1: chunk_rows={chunk_rows}")
    return chunk_rows


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        logits: Tensor,
        softmax: VocabSoftmax,
        chunk_rows: int,
        reuse_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        columns = logits[:, : softmax.num_columns]
        statistics = [
            softmax.statistics(softmax.rows.take(columns, chunk), chunk)
            for chunk in softmax.rows.chunks(chunk_rows)
        ]
        log_probs, totals = softmax.merge(torch.cat(statistics))
        ctx.softmax, ctx.chunk_rows = softmax, chunk_rows
        ctx.reuse_logits, ctx.is_spent = reuse_logits, False
        ctx.save_for_backward(logits, *totals)
        result = softmax.results(log_probs, totals.entropy)
        softmax.mark(ctx, result[1])
        return result

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.is_spent:
            raise RuntimeError(
                "backward must run only once with reuse_logits=True, "
                "the gradient has replaced the logits: reuse_logits=True"
            )
        ctx.is_spent = ctx.reuse_logits
        logits, *saved = ctx.saved_tensors
        softmax: VocabSoftmax = ctx.softmax
        facts = softmax.facts(Totals(*saved), softmax.upstream(grad_log_probs, grad_entropy))
        gradient = logits if ctx.reuse_logits else torch.empty_like(logits)
        gradient[:, softmax.num_columns :] = 0
        gradient.index_fill_(0, softmax.rows.others, 0)
        source, target = (tensor[:, : softmax.num_columns] for tensor in (logits, gradient))
        fits = len(softmax.rows) == len(target) and target.dtype == softmax.dtype
        for chunk in softmax.rows.chunks(ctx.chunk_rows):
            values = softmax.rows.take(source, chunk).to(softmax.dtype)
            out = target[chunk] if fits else values
            every = torch.arange(len(values), device=values.device)
            softmax.form_gradient_(out, values, every, facts.at(chunk))
            if not fits:
                softmax.rows.put_(target, out, chunk)
        return gradient, None, None, None
