import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from slime_loss import TokenBatch, sft_loss
from tests.slime_loss import references
from tests.slime_loss.reference_policy import shown
from tests.slime_loss.references import gradients, random_batch


def test_sft_trains_the_response_from_the_rows_before_it() -> None:
    # Tokens p a b; the rows of p and a predict a and b, the row of b predicts nothing.
    table = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4], [0.3, 0.3, 0.4]], dtype=torch.float64)
    logits = table.log().requires_grad_()
    batch = TokenBatch(
        labels=torch.tensor([1, 2, -100]),
        loss_mask=torch.tensor([True, True, False]),
        loss_weight=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64),
        sample_index=torch.zeros(3, dtype=torch.int64),
    )
    assert batch.trained_labels.tolist() == [1, 2, -100]
    columns = batch.trained_labels.clamp(min=0)
    log_probs = logits.log_softmax(-1).gather(1, columns.unsqueeze(1)).squeeze(1)
    output = sft_loss(log_probs, batch)
    assert output.loss.item() == pytest.approx(-(math.log(0.2) + math.log(0.4)) / 2, abs=1e-12)
    [gradient] = gradients(output.loss, logits)
    expected = 0.5 * table
    expected[0, 1] -= 0.5
    expected[1, 2] -= 0.5
    expected[2] = 0
    assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert shown(output) == {
        "loss": output.loss.item(),
        "active_tokens": 2.0,
    }


@given(seed=st.integers(0, 10**6), num_rows=st.integers(0, 10))
@settings(derandomize=True, max_examples=25, deadline=None)
def test_sft_equals_the_loop(seed: int, num_rows: int) -> None:
    log_probs, _, batch = random_batch(seed, num_rows)
    output = sft_loss(log_probs, batch)
    loss = log_probs.sum() * 0
    for row in references.trained_rows(batch):
        loss = loss - batch.loss_weight[row] * log_probs[row]
    assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(gradients(output.loss, log_probs), gradients(loss, log_probs), rtol=0, atol=1e-12)
