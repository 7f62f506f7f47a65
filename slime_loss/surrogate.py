"""Policy-gradient surrogates: importance ratio and advantage in, loss of each token out.

Source: PPO, arXiv 1707.06347, eq. 7; asymmetric clip: DAPO, arXiv 2503.14476, eq. 10; dual clip:
arXiv 1912.09729, eq. 5; GSPO: arXiv 2507.18071, eq. 5 and 7; CISPO: arXiv 2506.13585, eq. 4 and 5.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from slime_loss.batch import check_alike
from slime_loss.policy_config import PolicyLossConfig

MAX_LOG_RATIO = 20.0
"""Importance ratios are held within e^-20 and e^20, which are finite in fp32 and bf16."""


@dataclass(frozen=True)
class Surrogate:
    """The surrogate loss of each token, and where which bound of the ratio binds.

    A bound binds where it changes the gradient. At most one binds at a token.

    Attributes:
        token_loss: [T], with gradient.
        ratio: [T], the importance ratio, with gradient; of the token's sample for gspo.
        clipped_high: [T], the upper clip binds.
        clipped_low: [T], the lower clip binds.
        clipped_dual: [T], the dual clip binds.
    """

    token_loss: Float[Tensor, " tokens"]
    ratio: Float[Tensor, " tokens"]
    clipped_high: Bool[Tensor, " tokens"]
    clipped_low: Bool[Tensor, " tokens"]
    clipped_dual: Bool[Tensor, " tokens"]


def importance_log_ratio(
    log_probs: Float[Tensor, " tokens"], old_log_probs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """Compute log_probs - old_log_probs, clamped to [-20, 20]; no gradient beyond.

    Args:
        log_probs: [T], nats, with gradient.
        old_log_probs: [T], nats, of the policy that sampled.

    Returns:
        [T], nats.

    Raises:
        ValueError: The shapes or devices differ.
    """
    check_alike("old_log_probs", old_log_probs, "log_probs", log_probs)
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    config: PolicyLossConfig,
) -> Surrogate:
    """PPO's clipped surrogate, which GRPO and its kin share, and GSPO with the ratio of samples.

    With r = exp(log_ratio): max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) and, with
    eps_clip_c, min(that, -eps_clip_c A) where A < 0. Said with the sign of A: r is bounded from
    above by 1 + eps_clip_high where A > 0, and by 1 - eps_clip from below and eps_clip_c from
    above where A < 0.

    Args:
        log_ratio: [T], nats, as `importance_log_ratio` gives it; for GSPO the mean of log_probs -
            old_log_probs over the token's sample, clamped likewise.
        advantages: [T], without gradient.
        config: eps_clip, eps_clip_high, eps_clip_c.

    Returns:
        The surrogate of each token. A bound binds where it takes the gradient away: the upper clip
        where A > 0, the others where A < 0.

    Raises:
        ValueError: The shapes or devices differ.
    """
    check_alike("advantages", advantages, "log_ratio", log_ratio)
    dual_bound = math.inf if config.eps_clip_c is None else config.eps_clip_c
    ratio = log_ratio.exp()
    clipped_high = (advantages > 0) & (ratio > config.clip_high)
    clipped_low = (advantages < 0) & (ratio < config.clip_low)
    clipped_dual = (advantages < 0) & (ratio > dual_bound)

    bounded = torch.where(clipped_high, config.clip_high, ratio)
    bounded = torch.where(clipped_low, config.clip_low, bounded)
    bounded = torch.where(clipped_dual, dual_bound, bounded)
    return Surrogate(-advantages * bounded, ratio, clipped_high, clipped_low, clipped_dual)


def cispo_surrogate(
    log_probs: Float[Tensor, " tokens"],
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    config: PolicyLossConfig,
) -> Surrogate:
    """CISPO: the clipped ratio is a constant weight, so every token keeps a gradient.

    -stop_gradient(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log_probs, with r = exp(log_ratio).

    Args:
        log_probs: [T], nats, with gradient.
        log_ratio: [T], nats, as `importance_log_ratio` gives it.
        advantages: [T], without gradient.
        config: eps_clip, eps_clip_high; with eps_clip >= 1 there is no lower clip, as in the paper.

    Returns:
        The surrogate of each token. A clip binds where it changes the weight, unless A = 0.

    Raises:
        ValueError: The shapes or devices differ.
    """
    _check_all_alike(log_probs, log_ratio, advantages)
    ratio, has_gradient = log_ratio.exp(), advantages != 0
    weight = ratio.detach().clamp(config.clip_low, config.clip_high)
    clipped_high = has_gradient & (ratio > config.clip_high)
    clipped_low = has_gradient & (ratio < config.clip_low)
    unclipped = torch.zeros_like(clipped_high)
    return Surrogate(
        -weight * advantages * log_probs, ratio, clipped_high, clipped_low, clipped_dual=unclipped
    )


def reinforce_surrogate(
    log_probs: Float[Tensor, " tokens"],
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
) -> Surrogate:
    """REINFORCE: -A log_probs; the ratio is for the metrics alone.

    Args:
        log_probs: [T], nats, with gradient.
        log_ratio: [T], nats, as `importance_log_ratio` gives it.
        advantages: [T], without gradient.

    Returns:
        The surrogate of each token, in which nothing binds.

    Raises:
        ValueError: The shapes or devices differ.
    """
    _check_all_alike(log_probs, log_ratio, advantages)
    unclipped = torch.zeros_like(advantages, dtype=torch.bool)
    ratio = log_ratio.exp()
    return Surrogate(-advantages * log_probs, ratio, unclipped, unclipped, unclipped)


def _check_all_alike(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor) -> None:
    check_alike("log_ratio", log_ratio, "log_probs", log_probs)
    check_alike("advantages", advantages, "log_probs", log_probs)
