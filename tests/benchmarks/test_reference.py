"""The closed form against autograd in float64, and what its comparison refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.problem import ENTROPY_COEF, Case, Problem, make_problem
from benchmarks.reference import (
    Objective,
    Outcome,
    Reference,
    clipped_policy_loss,
    cross_entropy,
    sequence_policy_loss,
)

CASE = Case(tokens=64, hidden=8, vocab=40, share=0.5)


def by_autograd(
    problem: Problem, objective: Objective, entropy_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients of hidden and of the whole weight, from logits of every row."""
    hidden = problem.hidden.detach().double().requires_grad_()
    weight = problem.whole_weight.detach().double().requires_grad_()
    log_p = (hidden @ weight.T).log_softmax(1)[problem.rows]
    labels = problem.labels[problem.rows]
    log_probs = torch.stack([row[label] for row, label in zip(log_p, labels, strict=True)])
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    loss = objective(log_probs, problem) - entropy_coef * entropy
    return loss.detach(), *torch.autograd.grad(loss, [hidden, weight])


@pytest.mark.parametrize("objective", [clipped_policy_loss, cross_entropy, sequence_policy_loss])
@pytest.mark.parametrize("entropy_coef", [0.0, ENTROPY_COEF])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_is_what_autograd_gives(objective: Objective, entropy_coef: float, zeros: float) -> None:
    reference = Reference(make_problem(replace(CASE, zeros=zeros)))
    expected = reference.expected(objective, entropy_coef=entropy_coef)
    loss, *gradients = by_autograd(reference.problem, objective, entropy_coef)
    assert expected.loss == pytest.approx(float(loss), abs=1e-6)
    for gradient, right in zip(expected.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-5, atol=1e-6)


def test_of_logits_goes_on_to_hidden_and_weight() -> None:
    reference = Reference(make_problem(CASE))
    (logits,) = reference.expected_of_logits(clipped_policy_loss, entropy_coef=0.5).gradients
    problem = reference.problem
    hidden, weight = reference.expected(clipped_policy_loss, entropy_coef=0.5).gradients
    torch.testing.assert_close(logits @ problem.weight, hidden, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.T @ problem.hidden, weight, rtol=1e-5, atol=1e-6)


def test_a_rank_has_its_rows_of_the_weight() -> None:
    whole = Reference(make_problem(CASE)).expected(clipped_policy_loss, entropy_coef=0.5)
    two = replace(CASE, ranks=2)
    shares = [
        Reference(make_problem(two, rank=rank)).expected(clipped_policy_loss, entropy_coef=0.5)
        for rank in range(2)
    ]
    torch.testing.assert_close(
        torch.cat([share.gradients[1] for share in shares]), whole.gradients[1]
    )
    for share in shares:
        torch.testing.assert_close(share.gradients[0], whole.gradients[0])


@pytest.mark.parametrize("zeros", [0.0, 0.25])
def test_zeros_are_the_share_of_rows_without_gradient(zeros: float) -> None:
    reference = Reference(make_problem(replace(CASE, zeros=zeros)))
    expected = reference.expected_of_logits(clipped_policy_loss, entropy_coef=0.0)
    rows = expected.gradients[0][reference.problem.rows]
    assert float((rows == 0).all(1).double().mean()) == zeros


def test_trains_the_share_of_rows() -> None:
    assert make_problem(CASE).rows.shape[0] == 32
    assert make_problem(replace(CASE, share=1.0)).rows.shape[0] == 64


class TestDifference:
    """What must not be timed."""

    def test_is_none_for_right_results(self) -> None:
        expected, outcome, gradients = self.results(ENTROPY_COEF)
        assert expected.difference(outcome, gradients) == ""

    def test_sees_a_missing_gradient_of_the_entropy(self) -> None:
        expected, outcome, _ = self.results(ENTROPY_COEF)
        _, _, without = self.results(0.0)
        assert "gradient 0 by" in expected.difference(outcome, without)

    def test_sees_a_wrong_loss_and_a_wrong_entropy(self) -> None:
        expected, outcome, gradients = self.results(0.0)
        wrong = Outcome(outcome.loss + 1e-3, outcome.entropy + 1)
        assert expected.difference(wrong, gradients).startswith("loss by 1.0e-03, entropy by")

    def test_sees_one_wrong_entry_and_nan(self) -> None:
        expected, outcome, (hidden, weight) = self.results(0.0)
        assert expected.difference(outcome, (hidden, None)) == "gradient 1 is missing"
        for wrong in (float(weight.abs().max()), float("nan")):
            broken = weight.clone()
            broken[3, 2] += wrong
            assert expected.difference(outcome, (hidden, broken)).startswith("gradient 1 by")

    @staticmethod
    def results(entropy_coef: float) -> tuple:
        expected = Reference(make_problem(CASE)).expected(
            clipped_policy_loss, entropy_coef=entropy_coef
        )
        outcome = Outcome(torch.tensor(expected.loss), torch.tensor(expected.entropy))
        return expected, outcome, tuple(gradient.clone() for gradient in expected.gradients)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tokens": 12, "vocab": 8}, "tokens must be a multiple of 8"),
        ({"tokens": 16, "vocab": 9, "ranks": 2}, "ranks must divide vocab: ranks=2, vocab=9"),
    ],
)
def test_refuses_sizes_that_do_not_divide(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(hidden=8, **sizes)
