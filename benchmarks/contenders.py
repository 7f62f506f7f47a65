"""The heads that are compared: ours, plain torch, and the matrix products as a floor.

A contender is a name and a function that makes its step of a problem. The step is the forward; the
backward is autograd's. Other packages are in `peers`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from benchmarks.problem import EPS_CLIP, Case, Problem
from benchmarks.reference import (
    TOLERANCE,
    Objective,
    Outcome,
    clipped_policy_loss,
    sequence_policy_loss,
)
from slime_loss import (
    HeadConfig,
    LossOutput,
    PolicyLossConfig,
    RLHead,
    log_probs_from_hidden,
    policy_loss,
)
from slime_loss.policy_config import PolicyObjective

Step = Callable[..., Outcome]
"""The leaves (hidden, weight, or logits) to the outcome."""


class UnavailableError(Exception):
    """A contender cannot run here; the message says why."""


def any_case(case: Case) -> bool:  # noqa: ARG001
    """For contenders that have something to show in every case."""
    return True


def one_rank(case: Case) -> bool:
    """For contenders that have the whole vocabulary on a rank."""
    return case.ranks == 1


@dataclass(frozen=True)
class Contender:
    """One head.

    Attributes:
        name: In the table, and for `--contenders`.
        make: The step of a problem. Raises ImportError where its package is not installed and
            UnavailableError where it cannot run.
        lacks: What of the task it leaves out, or does on the side.
        package: What to install for it.
        objective: What its loss is; None for a floor, which has neither loss nor backward.
        does_entropy: Whether entropy is in its outcome, and in its gradient where it is asked for.
        suits: The cases that it takes part in.
        tolerance: How far its results may be from the right ones.
    """

    name: str
    make: Callable[[Problem], Step]
    lacks: str = ""
    package: str = ""
    objective: Objective | None = clipped_policy_loss
    does_entropy: bool = False
    suits: Callable[[Case], bool] = one_rank
    tolerance: float = TOLERANCE


def tp_group(problem: Problem) -> ProcessGroup | None:
    """The group, as slime_loss takes it: None where it is one rank."""
    return problem.group if problem.case.ranks > 1 else None


def combine(log_probs: Tensor, entropy: Tensor | None, problem: Problem) -> Outcome:
    """Loss and mean entropy, from those [n] of the rows that train, in plain torch."""
    loss = clipped_policy_loss(log_probs, problem)
    mean = None if entropy is None else entropy.mean()
    if mean is not None and problem.entropy_coef != 0:
        loss = loss - problem.entropy_coef * mean
    return Outcome(loss, mean)


def entropy_of(problem: Problem, compute: Callable[[], Tensor]) -> Tensor | None:
    """What `compute` gives, with gradient where entropy is part of the loss; None if not asked."""
    mode = problem.case.entropy
    if mode == "none":
        return None
    with torch.set_grad_enabled(mode == "loss"):
        return compute()


def plain_entropy(log_p: Tensor) -> Tensor:
    """The entropy [n] of log-probabilities [n, V], in plain torch."""
    return -(log_p.exp() * log_p).sum(1)


def _outcome(output: LossOutput) -> Outcome:
    entropy = output.metrics.get("entropy_loss")
    return Outcome(output.loss, None if entropy is None else entropy.value)


def _head(head: HeadConfig, objective: PolicyObjective | None = None) -> Callable[[Problem], Step]:
    """RLHead with these configs."""

    def make(problem: Problem) -> Step:
        config = PolicyLossConfig(
            policy_objective=objective, eps_clip=EPS_CLIP, entropy_coef=problem.entropy_coef
        )
        module = RLHead(head, config, vocab_size=problem.case.vocab, tp_group=tp_group(problem))
        return lambda hidden, weight: _outcome(module(hidden, weight, problem.batch))

    return make


def _two_steps(problem: Problem) -> Step:
    """Log-probs first, any loss of them afterwards."""
    config = PolicyLossConfig(eps_clip=EPS_CLIP, entropy_coef=problem.entropy_coef)

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        result = log_probs_from_hidden(
            hidden,
            weight,
            problem.batch.trained_labels,
            tp_group=tp_group(problem),
            entropy=problem.case.entropy,
        )
        return _outcome(policy_loss(result.log_probs, result.entropy, problem.batch, config))

    return step


def _plain_torch(problem: Problem, *, every_row: bool = False) -> Step:
    """Logits, log_softmax, gather."""
    rows = problem.rows
    labels = problem.labels if every_row else problem.labels[rows]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        log_p = ((hidden if every_row else hidden[rows]) @ weight.T).log_softmax(1)
        log_probs = log_p.gather(1, labels[:, None]).squeeze(1)
        entropy = entropy_of(problem, lambda: plain_entropy(log_p))
        if every_row:
            log_probs, entropy = log_probs[rows], None if entropy is None else entropy[rows]
        return combine(log_probs, entropy, problem)

    return step


class SharedInput(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: ProcessGroup) -> Tensor:
        """Let the tensor through."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient up."""
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG004
        """Sum up."""
        total = tensor.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        """Let the gradient through."""
        return gradient, None


def _torch_over_ranks(problem: Problem) -> Step:
    """Plain torch with a shared vocabulary: three all-reduces of a number a row."""
    rows, group = problem.rows, problem.group
    column = problem.labels[rows] - problem.first_column
    here = (column >= 0) & (column < problem.weight.shape[0])
    column = torch.where(here, column, 0)[:, None]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        logits = SharedInput.apply(hidden[rows], group) @ weight.T
        top = logits.detach().amax(1, keepdim=True)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=group)
        shifted = logits - top
        at_label = torch.where(here, shifted.gather(1, column).squeeze(1), 0.0)
        powers = shifted.exp()
        total, at_label = SumOverRanks.apply(torch.stack([powers.sum(1), at_label]), group)

        def entropy() -> Tensor:
            moment = SumOverRanks.apply((powers * shifted).sum(1), group)
            return total.log() - moment / total

        return combine(at_label - total.log(), entropy_of(problem, entropy), problem)

    return step


def _products(count: int) -> Callable[[Problem], Step]:
    """The products that no head can do without, over the rows that train, into given memory."""

    def make(problem: Problem) -> Step:
        features, weight = problem.hidden.detach()[problem.rows], problem.weight.detach()
        logits = features.new_empty(features.shape[0], weight.shape[0])
        grad_features, grad_weight = torch.empty_like(features), torch.empty_like(weight)

        def step(*_: Tensor) -> Outcome:
            for _again in range(count - 2):
                torch.mm(features, weight.T, out=logits)
            torch.mm(logits, weight, out=grad_features)
            torch.mm(logits.T, features, out=grad_weight)
            return Outcome()

        return step

    return make


FLOOR, RECOMPUTE_FLOOR, OURS = "3 products", "4 products", "slime_loss"

HEADS = (
    Contender(FLOOR, _products(3), objective=None, suits=any_case),
    Contender(RECOMPUTE_FLOOR, _products(4), objective=None, suits=any_case),
    Contender(OURS, _head(HeadConfig()), does_entropy=True, suits=any_case),
    Contender(
        "slime_loss recompute",
        _head(HeadConfig(recompute_loss_function=True)),
        does_entropy=True,
        suits=any_case,
    ),
    Contender(
        "slime_loss gspo",
        _head(HeadConfig(), "gspo"),
        "a ratio per sample: log-probs come first",
        objective=sequence_policy_loss,
        does_entropy=True,
        suits=lambda case: case.zeros == 0,
    ),
    Contender(
        "slime_loss log-probs",
        _two_steps,
        "log_probs_from_hidden, then policy_loss",
        does_entropy=True,
        suits=any_case,
    ),
    Contender("torch", _plain_torch, does_entropy=True),
    Contender(
        "torch every row",
        lambda problem: _plain_torch(problem, every_row=True),
        "projects prompts too",
        does_entropy=True,
        suits=lambda case: one_rank(case) and case.share < 1,
    ),
    Contender(
        "torch over ranks",
        _torch_over_ranks,
        does_entropy=True,
        suits=lambda case: not one_rank(case),
    ),
)
