"""slime_loss: the loss of RL post-training as a model head, in torch alone."""

from slime_loss.advantages import compute_advantages, group_relative_advantages
from slime_loss.aggregation import loss_weights, sample_weights
from slime_loss.batch import KeptIds, LossOutput, TokenBatch, TokenLogProbs
from slime_loss.config import (
    AdvantageConfig,
    AggregationConfig,
    CheckedConfig,
    ConfigError,
    HeadConfig,
    PolicyLossConfig,
    Violation,
)
from slime_loss.kl import approximate_kl
from slime_loss.metrics import (
    Metric,
    Metrics,
    Reduction,
    TokenMetrics,
    merge_metrics,
    reduce_metrics,
)
from slime_loss.objective import policy_loss, sft_loss
from slime_loss.surrogate import Surrogate, clipped_surrogate, importance_log_ratio

__all__ = [
    "AdvantageConfig",
    "AggregationConfig",
    "CheckedConfig",
    "ConfigError",
    "HeadConfig",
    "KeptIds",
    "LossOutput",
    "Metric",
    "Metrics",
    "PolicyLossConfig",
    "Reduction",
    "Surrogate",
    "TokenBatch",
    "TokenLogProbs",
    "TokenMetrics",
    "Violation",
    "approximate_kl",
    "clipped_surrogate",
    "compute_advantages",
    "group_relative_advantages",
    "importance_log_ratio",
    "loss_weights",
    "merge_metrics",
    "policy_loss",
    "reduce_metrics",
    "sample_weights",
    "sft_loss",
]
