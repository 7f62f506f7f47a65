"""Functions as a user writes them, for configs that name them."""

from typing import Any

import torch
from torch import Tensor

from slime_loss import PolicyLossConfig, TokenBatch

NOT_A_FUNCTION = 3


def ratio_loss(
    log_probs: Tensor,
    entropy: Tensor | None,
    batch: TokenBatch,
    config: PolicyLossConfig,
    *,
    cp_group: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped policy gradient, with two metrics; no care is taken of masked rows."""
    ratio = (log_probs - batch.old_log_probs).exp()
    loss = -batch.advantages * ratio
    if config.entropy_coef != 0:
        loss = loss - config.entropy_coef * entropy
    # At rows that do not train this divides by 0.
    return loss, {"odds": ratio / batch.loss_weight, "is_up": (ratio > 1).to(ratio.dtype)}


def log_loss(log_probs: Tensor, *_: Any, cp_group: Any) -> Tensor:
    return -log_probs


log_loss.row_separable = True


def bounded_correction(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    batch: TokenBatch,
    config: PolicyLossConfig,
    *,
    cp_group: Any,
) -> tuple[Tensor, Tensor]:
    """Weights of at most 1.1; tokens with a ratio above 1.5 are rejected, with a weight of NaN."""
    assert not train_log_probs.requires_grad
    ratio = (train_log_probs - rollout_log_probs).exp()
    accepted = ratio <= 1.5
    return torch.where(accepted, ratio.clamp(max=1.1), torch.nan), accepted


def unit_correction(train_log_probs: Tensor, *_: Any, cp_group: Any) -> tuple[Tensor, None]:
    return torch.ones_like(train_log_probs), None


unit_correction.row_separable = True


def returns(what: str, log_probs: Tensor) -> Any:
    """What a function may return by mistake."""
    vector = torch.zeros_like(log_probs)
    connected = log_probs * 1
    return {
        "loss a number": 3.0,
        "loss too short": connected[:1],
        "loss of integers": vector.long(),
        "loss detached": vector,
        "metrics a list": (connected, [vector]),
        "metrics taken": (connected, {"loss": vector}),
        "metrics too short": (connected, {"mine": vector[:1]}),
        "weights alone": vector,
        "weights too short": (vector[:1], None),
        "weights infinite": (vector + torch.inf, None),
        "accepted of floats": (vector, vector),
    }[what]


def anything(*_: Any, **__: Any) -> None:
    """Takes the arguments of every field."""
