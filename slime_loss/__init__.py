"""slime_loss: the loss of RL post-training as a model head, in torch."""

from slime_loss.advantages import AdvantageInputs, TokenAdvantages, compute_advantages
from slime_loss.aggregation import loss_weights, sample_weights
from slime_loss.batch import IGNORED_LABEL, KeptIds, LossOutput, TokenBatch, TokenLogProbs
from slime_loss.checked_config import CheckedConfig, ConfigError, Violation
from slime_loss.config import AdvantageConfig, AggregationConfig, HeadConfig
from slime_loss.custom import load_function
from slime_loss.custom_loss import custom_loss
from slime_loss.group_relative import group_relative_advantages
from slime_loss.head import RLHead
from slime_loss.kl import approximate_kl
from slime_loss.layout import (
    ContiguousLayout,
    PaddedLayout,
    SequenceLayout,
    ZigzagLayout,
    redistribute,
)
from slime_loss.linear_log_probs import log_probs_from_hidden
from slime_loss.log_probs import log_probs_from_logits
from slime_loss.metrics import (
    Metric,
    Metrics,
    ReducedMetrics,
    TokenMetrics,
    merge_metrics,
    reduce_metrics,
)
from slime_loss.objective import Objective, make_objective, policy_loss, sft_loss
from slime_loss.policy_config import PolicyLossConfig, ValueLossConfig
from slime_loss.reductions import Histogram, Reduction
from slime_loss.returns import (
    gae,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_returns,
    token_advantages,
    token_rewards,
)
from slime_loss.surrogate import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    importance_log_ratio,
    reinforce_surrogate,
)
from slime_loss.value import value_loss
from slime_loss.value_head import ValueHead
from slime_loss.whiten import masked_whiten

__all__ = [
    "IGNORED_LABEL",
    "AdvantageConfig",
    "AdvantageInputs",
    "AggregationConfig",
    "CheckedConfig",
    "ConfigError",
    "ContiguousLayout",
    "HeadConfig",
    "Histogram",
    "KeptIds",
    "LossOutput",
    "Metric",
    "Metrics",
    "Objective",
    "PaddedLayout",
    "PolicyLossConfig",
    "RLHead",
    "ReducedMetrics",
    "Reduction",
    "SequenceLayout",
    "Surrogate",
    "TokenAdvantages",
    "TokenBatch",
    "TokenLogProbs",
    "TokenMetrics",
    "ValueHead",
    "ValueLossConfig",
    "Violation",
    "ZigzagLayout",
    "approximate_kl",
    "cispo_surrogate",
    "clipped_surrogate",
    "compute_advantages",
    "custom_loss",
    "gae",
    "group_relative_advantages",
    "importance_log_ratio",
    "load_function",
    "log_probs_from_hidden",
    "log_probs_from_logits",
    "loss_weights",
    "make_objective",
    "masked_whiten",
    "merge_metrics",
    "policy_loss",
    "redistribute",
    "reduce_metrics",
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus_returns",
    "reinforce_surrogate",
    "sample_weights",
    "sft_loss",
    "token_advantages",
    "token_rewards",
    "value_loss",
]
