"""Advantages that take as long as a test needs, so that a signal finds the run training."""

import os
import time

import torch

from slime_loss import AdvantageConfig, AdvantageInputs


def advantages(inputs: AdvantageInputs, _config: AdvantageConfig) -> torch.Tensor:
    """Rewards of the own samples against the mean of all, after SECONDS_A_ROLLOUT.

    Returns:
        float64 [own samples].
    """
    time.sleep(float(os.environ.get("SECONDS_A_ROLLOUT", "0")))
    rewards = inputs.rewards.double()
    return (rewards - rewards.mean())[inputs.own]
