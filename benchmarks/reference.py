"""The right results of a problem, in closed form, from softmaxes in float64.

A contender is timed only when its loss, entropy and gradients are these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.problem import EPS_CLIP, NUM_SAMPLES, Problem, old_log_probs

TOLERANCE = 1e-4
"""Largest difference of a gradient, as a share of the gradient's largest entry; of a loss or
entropy, as a share of its size or of 1."""
_CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Outcome:
    """What a contender's forward gives.

    Attributes:
        loss: [], to run backward from; None where the contender is a floor, with no result.
        entropy: [], mean over the rows that train; None where the contender has none.
    """

    loss: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Expected:
    """The right results of one objective.

    Attributes:
        loss: The loss.
        entropy: Mean entropy of the rows that train.
        gradients: Of the leaves.
    """

    loss: float
    entropy: float
    gradients: tuple[Tensor, ...]

    def difference(
        self,
        outcome: Outcome,
        gradients: tuple[Tensor | None, ...],
        tolerance: float = TOLERANCE,
    ) -> str:
        """What of a contender's results is not right, in words; empty when all is."""
        assert outcome.loss is not None
        found = [("loss", _relative(outcome.loss, self.loss))]
        if outcome.entropy is not None:
            found.append(("entropy", _relative(outcome.entropy, self.entropy)))
        for number, (gradient, right) in enumerate(zip(gradients, self.gradients, strict=True)):
            name = f"gradient {number}"
            if gradient is None:
                return f"{name} is missing"
            error = (gradient - right).abs_().max() / right.abs().max().clamp(min=1e-30)
            found.append((name, float(error)))
        wrong = [f"{name} by {error:.1e}" for name, error in found if not error <= tolerance]
        return ", ".join(wrong)


def _relative(value: Tensor, right: float) -> float:
    return abs(float(value.detach()) - right) / max(1.0, abs(right))


Objective = Callable[[Tensor, Problem], Tensor]
"""The loss, from the log-probs [n] of the rows that train."""


def cross_entropy(log_probs: Tensor, problem: Problem) -> Tensor:
    """The mean negative log-probability."""
    return -problem.loss_weight * log_probs.sum()


def clipped_policy_loss(log_probs: Tensor, problem: Problem) -> Tensor:
    """The mean clipped policy-gradient loss of each token's ratio."""
    ratio = (log_probs - _old(log_probs, problem)).exp()
    return problem.loss_weight * _clipped(ratio, problem).sum()


def sequence_policy_loss(log_probs: Tensor, problem: Problem) -> Tensor:
    """The same, of the geometric mean of each sample's ratios."""
    samples = problem.sample_index[problem.rows]
    counts = torch.bincount(samples, minlength=NUM_SAMPLES)
    sums = log_probs.new_zeros(NUM_SAMPLES).index_add(
        0, samples, log_probs - _old(log_probs, problem)
    )
    ratio = (sums / counts.clamp(min=1)).exp()[samples]
    return problem.loss_weight * _clipped(ratio, problem).sum()


def _old(log_probs: Tensor, problem: Problem) -> Tensor:
    if problem.old_log_probs is None:
        return log_probs.detach()
    return problem.old_log_probs[problem.rows]


def _clipped(ratio: Tensor, problem: Problem) -> Tensor:
    advantages = problem.advantages[problem.rows]
    bounded = ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP)
    return torch.maximum(-ratio * advantages, -bounded * advantages)


class Reference:
    """The right results of a problem, one objective after the other.

    Args:
        problem: The problem, on policy.

    Attributes:
        problem: The same with the old log-probs that its case asks for.
    """

    def __init__(self, problem: Problem) -> None:
        self._features = problem.hidden.detach()[problem.rows]
        self._labels = problem.labels[problem.rows]
        rows = problem.rows.shape[0]
        self._log_probs = torch.empty(rows, dtype=torch.float64, device=problem.mask.device)
        self._entropy = torch.empty_like(self._log_probs)
        self._weight = problem.whole_weight
        for chunk, log_p in self._log_softmax():
            self._log_probs[chunk] = log_p.gather(1, self._labels[chunk, None]).squeeze(1)
            self._entropy[chunk] = -(log_p.exp() * log_p).sum(1)
        self.problem = replace(problem, old_log_probs=old_log_probs(problem, self._log_probs))

    def expected(self, objective: Objective, *, entropy_coef: float) -> Expected:
        """Loss, entropy, and the gradients of hidden [T, H] and of this rank's weight."""
        problem = self.problem
        loss, entropy, coefficient = self._loss(objective, entropy_coef)
        grad_hidden = torch.zeros_like(problem.hidden)
        grad_weight = torch.zeros_like(problem.weight)
        own = slice(problem.first_column, problem.first_column + problem.weight.shape[0])
        for chunk, log_p in self._log_softmax():
            gradient = self._logit_gradient(chunk, log_p, coefficient, entropy_coef).float()
            grad_hidden[problem.rows[chunk]] = gradient @ self._weight
            grad_weight.addmm_(gradient[:, own].T, self._features[chunk])
        return Expected(loss, entropy, (grad_hidden, grad_weight))

    def expected_of_logits(self, objective: Objective, *, entropy_coef: float) -> Expected:
        """Loss, entropy, and the gradient of the logits [T, V]."""
        loss, entropy, coefficient = self._loss(objective, entropy_coef)
        gradient = torch.zeros(self.problem.case.tokens, self.problem.case.vocab)
        for chunk, log_p in self._log_softmax():
            part = self._logit_gradient(chunk, log_p, coefficient, entropy_coef)
            gradient[self.problem.rows[chunk]] = part.float()
        return Expected(loss, entropy, (gradient,))

    def _loss(self, objective: Objective, entropy_coef: float) -> tuple[float, float, Tensor]:
        """The loss, the mean entropy, and the derivative of the loss by each log-prob."""
        log_probs = self._log_probs.clone().requires_grad_()
        loss = objective(log_probs, self.problem)
        (coefficient,) = torch.autograd.grad(loss, log_probs)
        entropy = float(self._entropy.mean())
        return float(loss.detach()) - entropy_coef * entropy, entropy, coefficient

    def _logit_gradient(
        self, chunk: slice, log_p: Tensor, coefficient: Tensor, entropy_coef: float
    ) -> Tensor:
        p = log_p.exp()
        gradient = -coefficient[chunk, None] * p
        if entropy_coef != 0:
            slope = entropy_coef * self.problem.loss_weight
            gradient += slope * p * (log_p + self._entropy[chunk, None])
        here = self._labels[chunk, None]
        return gradient.scatter_add_(1, here, coefficient[chunk, None])

    def _log_softmax(self) -> Iterator[tuple[slice, Tensor]]:
        rows = self._features.shape[0]
        step = max(_CHUNK_BYTES // (8 * self._weight.shape[0]), 1)
        for start in range(0, rows, step):
            chunk = slice(start, min(start + step, rows))
            logits = self._features[chunk] @ self._weight.T
            yield chunk, logits.double().log_softmax(1)
