"""Functions of a user's own, as a run names them."""

import time

import torch
from torch import Tensor

from slime_loss import AdvantageConfig, AdvantageInputs, PolicyLossConfig, TokenBatch

HERE = __name__


def reward_above_half(inputs: AdvantageInputs, _: AdvantageConfig) -> Tensor:
    """One advantage per sample: how far its reward is from one half."""
    return inputs.rewards[inputs.own] - 0.5


def growing(inputs: AdvantageInputs, config: AdvantageConfig) -> list[Tensor]:
    """One advantage per token, larger towards the end of a response."""
    return [
        config.gamma * torch.linspace(-1.0, 1.0, len(mask), device=mask.device)
        for mask in inputs.loss_mask
    ]


def plain_gradient(
    log_probs: Tensor, _: Tensor | None, batch: TokenBatch, config: PolicyLossConfig, **__: object
) -> Tensor:
    """REINFORCE, scaled by a field of the config."""
    return -config.eps_clip * batch.advantages * log_probs


def likelihood(
    log_probs: Tensor, _: Tensor | None, batch: TokenBatch, __: PolicyLossConfig, **___: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood, and a metric of its own."""
    return -log_probs, {"advantage_size": batch.advantages.abs()}


def halved(
    train: Tensor, rollout: Tensor, _: TokenBatch, __: PolicyLossConfig, **___: object
) -> tuple[Tensor, Tensor]:
    """Weights of one half, for the tokens that the trainer finds likelier than the engine."""
    return torch.full_like(train, 0.5), train > rollout


def mean_of_own_tokens(
    log_probs: Tensor, _: Tensor | None, batch: TokenBatch, *__: object, **___: object
) -> Tensor:
    """What must not be done: a loss that depends on what else a micro-batch holds."""
    return -batch.advantages * log_probs / batch.loss_mask.sum()


def failing(*_: object, **__: object) -> Tensor:
    """A mistake of the user's."""
    raise ZeroDivisionError("the mistake of this loss")


def endless(*_: object, **__: object) -> Tensor:
    """A loss that is never there."""
    while True:
        time.sleep(1)
