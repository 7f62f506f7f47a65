import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from slime_loss import approximate_kl
from tests.slime_loss import reference_policy, references
from tests.slime_loss.references import gradients

ESTIMATORS = ["k1", "k2", "k3", "low_var_kl"]
nats = st.floats(-15, 0)


def test_k3_moves_towards_the_reference() -> None:
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = approximate_kl(log_probs, torch.tensor([-2.0], dtype=torch.float64), "k3")
    assert kl.item() == pytest.approx(0.36787944117144233, abs=1e-12)
    [gradient] = gradients(kl.sum(), log_probs)
    assert gradient.item() == pytest.approx(0.6321205588285577, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(pairs=st.lists(st.tuples(nats, nats, nats), max_size=8))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_values_and_gradients_equal_the_loop(
    estimator: str, pairs: list[tuple[float, float, float]]
) -> None:
    table = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 3)
    log_probs, ref, old = table.unbind(1)
    log_probs = log_probs.clone().requires_grad_()
    for ratio in (None, (log_probs - old).exp()):
        kl = approximate_kl(log_probs, ref, estimator, importance_ratio=ratio)
        expected = [
            reference_policy.kl(log_probs[i], ref[i], estimator)
            * (1.0 if ratio is None else ratio[i])
            for i in range(len(pairs))
        ]
        expected = torch.stack(expected) if expected else log_probs * 1
        assert_close(kl, expected, rtol=1e-12, atol=1e-12)
        assert_close(
            gradients(kl.sum(), log_probs),
            gradients(expected.sum(), log_probs),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("estimator", ["k3", "low_var_kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1000.0, 1000.0, -math.inf])
def test_a_huge_difference_stays_finite(
    estimator: str, dtype: torch.dtype, difference: float
) -> None:
    log_probs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    ratio = (log_probs + 1.0).exp()
    kl = approximate_kl(
        log_probs, log_probs.detach() - difference, estimator, importance_ratio=ratio
    )
    assert kl.isfinite().all()
    assert gradients(kl.sum(), log_probs)[0].isfinite().all()


def test_the_difference_is_only_bounded_where_k3_would_overflow() -> None:
    log_probs = torch.tensor([30.0], dtype=torch.float64, requires_grad=True)
    kl = approximate_kl(log_probs, torch.zeros_like(log_probs), "k3")
    assert kl.item() == pytest.approx(29.0, abs=1e-12)
    assert gradients(kl.sum(), log_probs)[0].item() == pytest.approx(1.0, abs=1e-12)


def test_a_nan_is_not_hidden() -> None:
    nan = torch.tensor([math.nan])
    for estimator in ESTIMATORS:
        assert approximate_kl(nan, torch.zeros(1), estimator).isnan().all()


def test_unknown_names_and_shapes_are_refused() -> None:
    zeros = torch.zeros(3)
    with pytest.raises(ValueError, match="estimator must be one of k1, k2, k3, low_var_kl: "):
        approximate_kl(zeros, zeros, "k4")
    with (
        references.without_type_checker(),
        pytest.raises(ValueError, match=r"ref_log_probs.shape=\(1,\), log_probs.shape=\(3,\)"),
    ):
        approximate_kl(zeros, zeros[:1], "k1")
    with (
        references.without_type_checker(),
        pytest.raises(ValueError, match="importance_ratio must have the shape of log_probs"),
    ):
        approximate_kl(zeros, zeros, "k1", importance_ratio=zeros[:1])
