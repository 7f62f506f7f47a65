"""What is wrong with the samples of a batch is named before anything is summed."""

from dataclasses import replace

import pytest
import torch

from slime_loss import PolicyLossConfig, policy_loss
from tests.slime_loss.correction_configs import OBJECTIVES, OPSM, TIS
from tests.slime_loss.recording import recorded_collectives
from tests.slime_loss.references import random_batch

WHOLE_SAMPLES = {
    name: (OBJECTIVES | OPSM | TIS)[name] for name in ("gspo", "opsm", "icepop sequence")
}


@pytest.mark.parametrize("sample", [-1, 4, 5])
@pytest.mark.parametrize("config", WHOLE_SAMPLES.values(), ids=WHOLE_SAMPLES)
def test_a_trained_row_of_no_sample_is_named(config: PolicyLossConfig, sample: int) -> None:
    log_probs, entropy, batch = random_batch(7, 12)
    row = torch.arange(12) == 3
    index = torch.where(row, sample, batch.sample_index)
    masked = replace(batch, sample_index=index, loss_mask=batch.loss_mask & ~row)
    assert policy_loss(log_probs, entropy, masked, config).loss.isfinite()
    message = (
        r"^sample_index must be in \[0, samples\) where a row trains: "
        rf"sample_index\[3\]={sample}, samples=4$"
    )
    with recorded_collectives() as calls, pytest.raises(ValueError, match=message):
        policy_loss(log_probs, entropy, replace(masked, loss_mask=batch.loss_mask | row), config)
    assert calls == []


@pytest.mark.parametrize("config", WHOLE_SAMPLES.values(), ids=WHOLE_SAMPLES)
def test_a_negative_number_of_tokens_is_named(config: PolicyLossConfig) -> None:
    log_probs, entropy, batch = random_batch(7, 12)
    wrong = replace(batch, num_trained_tokens=torch.tensor([3, 2, -1, 3]))
    message = r"^num_trained_tokens must be >= 0: num_trained_tokens\[2\]=-1$"
    with pytest.raises(ValueError, match=message):
        policy_loss(log_probs, entropy, wrong, config)
