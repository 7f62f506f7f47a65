"""One rank's run of the head, forward and backward, and the checks on all ranks' runs together.

The hidden states come from another layout, as from a trunk that is cut otherwise: a rank whose
loss is not connected to them is missed by the others in the backward of that move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.testing import assert_close

from slime_loss import (
    HeadConfig,
    LossOutput,
    RLHead,
    SequenceLayout,
    TokenBatch,
    ValueHead,
    ValueLossConfig,
    log_probs_from_logits,
    masked_whiten,
    redistribute,
    reduce_metrics,
)
from tests.slime_loss.objective_variants import VARIANTS, Variant
from tests.slime_loss.packs import PADDED_VOCAB, VOCAB, Case, Pack, make_pack
from tests.slime_loss.places import ALONE, Place
from tests.slime_loss.reference_policy import numbers
from tests.slime_loss.simulated_ranks import Call, check_same_collectives, simulate

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Outcome:
    """What one rank gets.

    Attributes:
        loss: [], this rank's part.
        requires_grad: Whether the loss has a gradient.
        grad_hidden: Of its rows in the outer layout; zeros where the hidden states are frozen.
        grad_weight: Of its columns; zeros where the weight is frozen.
        whitened: [T_local], advantages whitened over all ranks, in the layout of the head.
        metrics: Reduced over the context-parallel ranks.
        nonfinite_row: The first row whose loss is not finite, -1 for none.
    """

    loss: Tensor
    requires_grad: bool
    grad_hidden: Tensor
    grad_weight: Tensor
    whitened: Tensor
    metrics: dict[str, float]
    nonfinite_row: int


Loss = tuple[Tensor, dict[str, float], int]
"""The loss of one rank, the reduced metrics, and the first row whose loss is not finite."""


@dataclass(frozen=True)
class Rank:
    """What one rank knows of a case: its place, its rows and its part of the weight."""

    case: Case
    place: Place

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.case.variant]

    @cached_property
    def pack(self) -> Pack:
        case = self.case
        return make_pack(case.samples, case.seed, case.aggregation, case.has_kept_ids)

    @cached_property
    def layout(self) -> SequenceLayout:
        """The layout that the head sees."""
        return self.case.head_layout(self.place.cp_rank)

    @cached_property
    def outer(self) -> SequenceLayout:
        """The layout that the hidden states come in."""
        return self.case.outer_layout(self.place.cp_rank)

    @cached_property
    def batch(self) -> TokenBatch:
        """The streams in the layout of the head."""
        return self.pack.local(self.layout, self.variant.omits)

    @property
    def columns(self) -> slice:
        """The rank's rows of the weight; a value head's one row is whole on every rank."""
        if self.variant.way == "value":
            return slice(0, 1)
        width = PADDED_VOCAB // self.case.topology.tp_size
        return slice(self.place.tp_rank * width, (self.place.tp_rank + 1) * width)

    def run(self) -> Outcome:
        """Move the hidden states, run the head and back, reduce the metrics."""
        case, place = self.case, self.place
        hidden = self.outer.shard(self.pack.hidden).requires_grad_(case.frozen != "hidden")
        weight = self.pack.weight[self.columns].clone().requires_grad_(case.frozen != "weight")
        place.begin("moving the hidden states")
        moved = redistribute(hidden, self.outer, self.layout, place.cp_group)
        place.begin("forward")
        loss, metrics, nonfinite_row = WAYS[self.variant.way](self, moved, weight)
        place.begin("backward")
        grad_hidden, grad_weight = _gradients(loss, hidden, weight)
        place.begin("whitening")
        whitened = masked_whiten(self.batch.advantages, self.batch.loss_mask, group=place.cp_group)
        return Outcome(
            loss.detach(),
            loss.requires_grad,
            grad_hidden,
            grad_weight,
            whitened,
            metrics,
            nonfinite_row,
        )

    def head(self) -> RLHead:
        return RLHead(
            HeadConfig(
                rollout_temperature=TEMPERATURE,
                log_probs_chunk_size=self.case.chunk_rows,
                recompute_loss_function=self.case.recompute,
            ),
            self.variant.config,
            vocab_size=VOCAB,
            tp_group=self.place.tp_group,
            cp_group=self.place.cp_group,
            sequence_parallel=self.case.topology.sequence_parallel,
        )

    def head_rows(self, hidden: Tensor) -> Tensor:
        """The rows that the head takes: a slice of them under sequence parallel."""
        topology = self.case.topology
        if not topology.sequence_parallel:
            return hidden
        return hidden.chunk(topology.tp_size)[self.place.tp_rank]


def _reduced(rank: Rank, output: LossOutput) -> Loss:
    rank.place.begin("metrics")
    metrics = numbers(reduce_metrics(output.metrics, rank.place.cp_group))
    return output.loss, metrics, int(output.first_nonfinite_row)


def _by_objective(rank: Rank, hidden: Tensor, weight: Tensor) -> Loss:
    return _reduced(rank, rank.head()(rank.head_rows(hidden), weight, rank.batch))


def _by_value(rank: Rank, hidden: Tensor, weight: Tensor) -> Loss:
    head = ValueHead(
        ValueLossConfig(),
        tp_group=rank.place.tp_group,
        sequence_parallel=rank.case.topology.sequence_parallel,
    )
    return _reduced(rank, head(rank.head_rows(hidden), weight, rank.batch))


def _by_log_probs(rank: Rank, hidden: Tensor, weight: Tensor) -> Loss:
    """Log-probs alone, which go to the outer layout and are summed up there."""
    found = rank.head().log_probs(rank.head_rows(hidden), weight, rank.batch)
    rank.place.begin("moving the log-probs")
    log_probs = redistribute(found.log_probs, rank.layout, rank.outer, rank.place.cp_group)
    return _weighted(log_probs, rank.pack.local(rank.outer, ())), {}, -1


def _by_logits(rank: Rank, hidden: Tensor, weight: Tensor) -> Loss:
    """Logits of all rows, here; their log-probs, and entropy with gradient."""
    batch = rank.batch
    found = log_probs_from_logits(
        hidden @ weight.t(),
        batch.trained_labels,
        tp_group=rank.place.tp_group,
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
        keep_mask=batch.kept_ids,
        entropy="loss",
        chunk_rows=rank.case.chunk_rows,
    )
    return _weighted(found.log_probs - 0.1 * found.entropy, batch), {}, -1


WAYS: dict[str, Callable[[Rank, Tensor, Tensor], Loss]] = {
    "loss": _by_objective,
    "log_probs": _by_log_probs,
    "logits": _by_logits,
    "value": _by_value,
}


def run_rank(case: Case, place: Place) -> Outcome:
    """What a rank at this place gets."""
    return Rank(case, place).run()


def run_unsharded(case: Case) -> Outcome:
    """What one rank gets for the whole pack."""
    return run_rank(case.unsharded, ALONE)


def check_sharded(case: Case) -> list[list[Call]]:
    """Raise AssertionError unless ranks call the same collectives and equal one rank.

    Returns:
        What each rank called.
    """
    outcomes, calls = simulate(case.topology, lambda place: run_rank(case, place))
    check_same_collectives(case.topology, calls)
    check_equals_unsharded(case, outcomes, run_unsharded(case))
    return calls


def check_equals_unsharded(case: Case, ranks: Sequence[Outcome], expected: Outcome) -> None:
    """Raise AssertionError unless the ranks' parts make up what one rank gets."""
    for rank, outcome in enumerate(ranks):
        same = outcome.requires_grad == expected.requires_grad
        assert same, f"rank {rank} has a loss with requires_grad={outcome.requires_grad}"
        assert outcome.nonfinite_row == expected.nonfinite_row == -1
        assert list(outcome.metrics) == list(expected.metrics)
        for name, value in expected.metrics.items():
            _assert_same(f"{name} of rank {rank}", outcome.metrics[name], value)
    tp_size = case.topology.tp_size
    by_tp = [ranks[tp_rank::tp_size] for tp_rank in range(tp_size)]
    for of_cp in by_tp:
        _assert_same("loss", sum(one.loss for one in of_cp), expected.loss)
        whitened = case.head_layout(0).join(torch.cat([one.whitened for one in of_cp]))
        _assert_same("whitened", whitened, expected.whitened)
    _check_gradients(case, by_tp, expected)


def _check_gradients(case: Case, by_tp: Sequence[Sequence[Outcome]], expected: Outcome) -> None:
    way, sequence_parallel = VARIANTS[case.variant].way, case.topology.sequence_parallel
    of_weight = [sum(one.grad_weight for one in of_cp) for of_cp in by_tp]
    if way != "value":
        of_weight = [torch.cat(of_weight)]
    elif sequence_parallel:
        of_weight = [sum(of_weight)]
    of_hidden = [_hidden_gradient(case, of_cp) for of_cp in by_tp]
    if sequence_parallel or way == "logits":
        of_hidden = [sum(of_hidden)]
    for gradient in of_weight:
        _assert_same("gradient of weight", gradient, expected.grad_weight)
    for gradient in of_hidden:
        _assert_same("gradient of hidden", gradient, _hidden_gradient(case.unsharded, [expected]))


def _hidden_gradient(case: Case, of_cp: Sequence[Outcome]) -> Tensor:
    return case.outer_layout(0).join(torch.cat([one.grad_hidden for one in of_cp]))


def _assert_same(name: str, found: Tensor | float, expected: Tensor | float) -> None:
    pair = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    # A k3 estimate far from the reference is so large that one unit in the last place is 3e-11.
    assert_close(*pair, rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda text: f"{name}: {text}")


def _weighted(stream: Tensor, batch: TokenBatch) -> Tensor:
    return torch.where(batch.loss_mask, batch.loss_weight * stream, 0.0).sum()


def _gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The gradient at each leaf; zeros where it is frozen, or the loss is not connected to it."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad and loss.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ())
    return [
        gradient
        if leaf.requires_grad and loss.requires_grad and (gradient := next(found)) is not None
        else torch.zeros_like(leaf)
        for leaf in leaves
    ]
