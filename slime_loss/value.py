"""The loss of a critic: squared error, clipped around the old values.

Source: J. Schulman et al., "High-dimensional continuous control using generalized advantage
estimation", arXiv 1506.02438 (what is learned); OpenAI baselines' PPO2 (the clip).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from slime_loss.batch import LossOutput, TokenBatch
from slime_loss.policy_config import ValueLossConfig
from slime_loss.streams import Streams


def value_loss(
    values: Float[Tensor, " tokens"], batch: TokenBatch, config: ValueLossConfig
) -> LossOutput:
    """The clipped squared error of the values, without a factor 1/2.

    max((clip(v, v_old - value_clip, v_old + value_clip) - R)^2, (v - R)^2), with R = returns. The
    clipped square has no gradient, and counts only where it is strictly larger: at a tie the
    gradient is that of (v - R)^2. Metrics:

    * sums weighted by loss_weight: loss, value_loss (the same);
    * means weighted by it: value_clipfrac (the clipped square counts), values_mean, returns_mean;
    * of the tokens, each counting once: returns_std, returns_min, returns_max,
      explained_variance = 1 - variance(R - v) / variance(R); and active_tokens, their number.

    Args:
        values: [T], with gradient; no temperature divides them.
        batch: The streams; values (the old ones) and returns are needed.
        config: value_clip.

    Returns:
        The loss, connected to values even when no row trains, and its metrics.

    Raises:
        ValueError: A stream is missing, or a shape or device differs.
    """
    streams = Streams(batch, values, "values")
    current, returns = streams.predictions, streams.get("returns", "value_loss")
    old = streams.get("values", "value_loss")
    clipped = current.detach().clamp(old - config.value_clip, old + config.value_clip)
    unclipped_error = (current - returns).square()
    clipped_error = (clipped - returns).square()
    is_clipped = clipped_error > unclipped_error
    token_loss = torch.where(is_clipped, clipped_error, unclipped_error)
    tokens = streams.metrics
    return streams.sum_up(
        token_loss,
        {
            "value_loss": tokens.weighted_sum(token_loss),
            "value_clipfrac": tokens.mean(is_clipped),
            "values_mean": tokens.mean(current),
            "returns_mean": tokens.mean(returns),
            "returns_std": tokens.std(returns),
            "returns_min": tokens.min(returns),
            "returns_max": tokens.max(returns),
            "explained_variance": tokens.explained_variance(current, returns),
        },
    )
