from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from slime_loss import LossOutput, PolicyLossConfig, TokenBatch, policy_loss
from tests.slime_loss import reference_policy
from tests.slime_loss.correction_configs import ALL
from tests.slime_loss.reference_policy import shown
from tests.slime_loss.references import for_config, gradients, random_batch


def assert_equals_loop(
    log_probs: Tensor, entropy: Tensor, batch: TokenBatch, config: PolicyLossConfig
) -> LossOutput:
    output = policy_loss(log_probs, entropy, batch, config)
    loss, metrics = reference_policy.policy_loss(log_probs, entropy, batch, config)
    leaves = log_probs, entropy
    assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(gradients(output.loss, *leaves), gradients(loss, *leaves), rtol=1e-12, atol=1e-12)
    found = shown(output)
    if "loss" in metrics:
        assert found == pytest.approx(metrics, rel=1e-12, abs=1e-12, nan_ok=True)
    else:
        assert found["active_tokens"] == found["loss"] == 0.0
        of_loop = {name: found[name] for name in metrics}
        assert of_loop == pytest.approx(metrics, rel=1e-12, abs=1e-12, nan_ok=True)
    return output


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(0, 12),
    spread=st.sampled_from([0.1, 0.6, 3.0, 40.0]),
    has_old=st.booleans(),
)
@settings(derandomize=True, max_examples=12, deadline=None)
def test_loss_gradients_and_metrics_equal_the_loop(
    config: PolicyLossConfig, seed: int, num_rows: int, spread: float, has_old: bool
) -> None:
    log_probs, entropy, batch = random_batch(seed, num_rows, spread=spread)
    batch = for_config(batch, config)
    batch = batch if has_old else replace(batch, old_log_probs=None)
    assert assert_equals_loop(log_probs, entropy, batch, config).loss.requires_grad
