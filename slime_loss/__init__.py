"""slime_loss: the loss of RL post-training as a model head, in torch alone."""

from slime_loss.batch import KeptIds, LossOutput, TokenBatch, TokenLogProbs
from slime_loss.config import (
    AdvantageConfig,
    AggregationConfig,
    ConfigError,
    HeadConfig,
    PolicyLossConfig,
    Violation,
)
from slime_loss.metrics import Metric, Metrics, Reduction, merge_metrics, reduce_metrics

__all__ = [
    "AdvantageConfig",
    "AggregationConfig",
    "ConfigError",
    "HeadConfig",
    "KeptIds",
    "LossOutput",
    "Metric",
    "Metrics",
    "PolicyLossConfig",
    "Reduction",
    "TokenBatch",
    "TokenLogProbs",
    "Violation",
    "merge_metrics",
    "reduce_metrics",
]
