"""Log-probabilities and entropy of tokens from hidden states: the head, without [T, V] logits.

Only rows that have a label are projected, a chunk of rows at a time. The backward needs each
chunk's logits again: as many chunks are kept as the memory budget allows, the others recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from slime_loss.batch import KeptIds, TokenLogProbs
from slime_loss.collectives import (
    AutogradContext,
    all_gather_rows,
    all_reduce_sum_,
    group_size,
    reduce_scatter_rows,
)
from slime_loss.log_probs import check_rows_and_labels, checked_chunk_rows, compute_dtype
from slime_loss.vocab_softmax import EntropyMode, SoftmaxOptions, Totals, VocabSoftmax

# Of the weight, or of its gradient, held in another precision at any one time.
_BLOCK_BYTES = 8 * 2**20


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
    memory_bytes: int = 64 * 2**20,
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
        memory_bytes: What logits and temporaries of their size may hold at any one time; it
            decides how many chunks are kept for the backward.

    Returns:
        log_probs [T] and entropy [T] (None if not asked for), in nats.

    Raises:
        ValueError: A shape or option that cannot be, or a label outside the vocabulary.
    """
    check_rows_and_labels(
        "hidden", hidden, labels, group_size(tp_group) if sequence_parallel else 1
    )
    _check_weight(hidden, weight, bias)
    softmax = VocabSoftmax(
        labels,
        weight.shape[0],
        compute_dtype(hidden.dtype),
        SoftmaxOptions(tp_group, vocab_size, temperature, keep_mask, entropy),
    )
    plan = _plan_chunks(softmax, checked_chunk_rows(chunk_rows), memory_bytes)
    if not (torch.is_grad_enabled() and any(_requires_grad(hidden, weight, bias))):
        plan = replace(plan, num_kept=0)
    head = _Head(softmax, plan, tp_group, sequence_parallel)
    return TokenLogProbs(*_LinearLogProbs.apply(hidden, weight, bias, head))


@dataclass(frozen=True)
class _Plan:
    """How the labelled rows are worked through: the first `num_kept` chunks' logits are kept."""

    chunk_rows: int
    num_kept: int


def _plan_chunks(softmax: VocabSoftmax, chunk_rows: int | None, memory_bytes: int) -> _Plan:
    """Chunks whose working buffers, with what is kept beside them, hold memory_bytes or less."""
    row_bytes = max(softmax.num_columns, 1) * softmax.dtype.itemsize
    if chunk_rows is None:
        chunk_rows = max(memory_bytes // ((softmax.working_buffers + 1) * row_bytes), 1)
    chunk_bytes = min(chunk_rows, max(softmax.num_rows, 1)) * row_bytes
    return _Plan(chunk_rows, max(memory_bytes // chunk_bytes - softmax.working_buffers, 0))


@dataclass(frozen=True)
class _Head:
    """One call: which rows are projected, in which chunks, and over which ranks."""

    softmax: VocabSoftmax
    plan: _Plan
    tp_group: ProcessGroup | None
    sequence_parallel: bool

    def labelled_rows(self, hidden: Tensor) -> Tensor:
        """[n, H], the rows that have a label, of all ranks' rows."""
        if self.sequence_parallel:
            hidden = all_gather_rows(hidden, self.tp_group)
        return self.softmax.take(hidden)

    def hidden_gradient(self, labelled: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of `hidden`, from this rank's part [n, H] of it at the labelled rows."""
        if self.sequence_parallel:
            # The ranks' slices hold unequal numbers of labelled rows, so every row travels.
            every_row = self.softmax.spread(labelled, labelled.dtype)
            return reduce_scatter_rows(every_row, self.tp_group).to(dtype)
        all_reduce_sum_(labelled, self.tp_group)
        return self.softmax.spread(labelled, dtype)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor | None]:
        softmax = head.softmax
        features = head.labelled_rows(hidden)
        projection = _Projection(softmax, features, weight, bias)
        statistics: list[Tensor] = []
        kept: list[Tensor] = []
        for chunk in softmax.chunks(head.plan.chunk_rows):
            scaled = projection.scaled_logits(chunk)
            statistics.append(softmax.statistics(scaled, chunk))
            if len(kept) < head.plan.num_kept:
                kept.append(scaled)
        log_probs, totals = softmax.merge(torch.cat(statistics))
        ctx.head, ctx.hidden_dtype = head, hidden.dtype
        ctx.save_for_backward(features, weight, bias, *totals, *kept)
        return softmax.results(ctx, log_probs, totals)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        head: _Head = ctx.head
        softmax = head.softmax
        features, weight, bias, *saved = ctx.saved_tensors
        totals, kept = Totals(*saved[: len(Totals._fields)]), saved[len(Totals._fields) :]
        projection = _Projection(softmax, features, weight, bias)
        gradients = projection.zero_gradients(ctx.needs_input_grad[:3])
        upstream = softmax.upstream(grad_log_probs, grad_entropy)
        for number, chunk in enumerate(softmax.chunks(head.plan.chunk_rows)):
            is_kept = number < len(kept)
            scaled = kept[number] if is_kept else projection.scaled_logits(chunk)
            # No name for the gradient: it must not outlive its turn, the next chunk needs the room.
            projection.accumulate_(
                gradients, softmax.gradient(scaled, chunk, totals, upstream), chunk
            )
        grad_hidden, grad_weight, grad_bias = gradients
        return (
            None if grad_hidden is None else head.hidden_gradient(grad_hidden, ctx.hidden_dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


@dataclass(frozen=True)
class _Projection:
    """The logits features @ weight.T + bias of a rank, and the gradients of the three.

    Products are accumulated in the softmax's dtype. Operands of a lower precision are worked on
    in blocks of the vocabulary, so that no copy of the weight, or of its size, is made.
    """

    softmax: VocabSoftmax
    features: Tensor
    weight: Tensor
    bias: Tensor | None

    def scaled_logits(self, chunk: slice) -> Float[Tensor, "rows columns"]:
        """Logits / temperature of a chunk of the labelled rows, without padding columns."""
        features, num_columns = self.features[chunk], self.softmax.num_columns
        shape = (features.shape[0], num_columns)
        logits = torch.empty(shape, dtype=self.softmax.dtype, device=features.device)
        for block in self._blocks():
            _add_product_(logits[:, block], features, self.weight[block].t(), beta=0)
        if self.bias is not None:
            logits += self.bias[:num_columns]
        return self.softmax.scale(logits, chunk)

    def zero_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Zeros for the gradients of features, weight and bias, as far as they are needed."""
        tensors = (self.features, self.weight, self.bias)
        return [
            torch.zeros_like(tensor, dtype=self.softmax.dtype)
            if is_needed and tensor is not None
            else None
            for tensor, is_needed in zip(tensors, needed, strict=True)
        ]

    def accumulate_(
        self, gradients: Sequence[Tensor | None], grad_logits: Tensor, chunk: slice
    ) -> None:
        """Add what a chunk's logits contribute to the gradients."""
        grad_features, grad_weight, grad_bias = gradients
        for block in self._blocks():
            grad_block = grad_logits[:, block]
            if grad_features is not None:
                _add_product_(grad_features[chunk], grad_block, self.weight[block])
            if grad_weight is not None:
                _add_product_(grad_weight[block], grad_block.t(), self.features[chunk])
            if grad_bias is not None:
                grad_bias[block] += grad_block.sum(0)

    def _blocks(self) -> list[slice]:
        num_columns, size = self.softmax.num_columns, max(self.softmax.num_columns, 1)
        if self.weight.dtype != self.softmax.dtype:
            row_bytes = max(self.weight.shape[1], 1) * self.softmax.dtype.itemsize
            size = max(_BLOCK_BYTES // row_bytes, 1)
        starts = range(0, num_columns, size)
        return [slice(start, min(start + size, num_columns)) for start in starts]


def _add_product_(out: Tensor, left: Tensor, right: Tensor, *, beta: int = 1) -> None:
    """out = beta * out + left @ right, accumulated in out's dtype."""
    if out.is_cuda and right.dtype != out.dtype:
        # Tensor cores multiply in the lower precision and accumulate in float32.
        product = torch.mm(left.to(right.dtype), right, out_dtype=out.dtype)
        out.mul_(beta).add_(product) if beta else out.copy_(product)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype), beta=beta)


def _requires_grad(*tensors: Tensor | None) -> list[bool]:
    return [tensor is not None and tensor.requires_grad for tensor in tensors]


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
