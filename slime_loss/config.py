"""Configs of advantages, aggregation and head.

The string below a field documents it, and serves as the help text of the flag of that name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime_loss.checked_config import CheckedConfig, Rule

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "gspo",
    "cispo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
]
ALONE_ESTIMATORS = ("reinforce_plus_plus", "ppo")
"""Estimators that judge a sample by itself, so that a prompt needs no second one."""
Aggregation = Literal["sample_mean", "rollout_mean", "token_mean", "prompt_mean", "constant"]


@dataclass(frozen=True)
class AdvantageConfig(CheckedConfig):
    """How rewards become advantages."""

    advantage_estimator: Estimator = "grpo"
    """Baseline and scale of the reward. grpo: minus the mean of its prompt group, over the group's
    standard deviation; gspo and cispo: the same, with their own --policy-objective; dr_grpo: minus
    the group mean; rloo: minus the mean of the group's other samples; reinforce_plus_plus:
    discounted return of each token; reinforce_plus_plus_baseline: minus the group mean, the same at
    each token; ppo: generalised advantage estimation from the critic's values."""

    normalize_advantages: bool = False
    """Shift and scale advantages to mean 0 and standard deviation 1 over all trained tokens of the
    rollout."""

    gamma: float = 1.0
    """Discount of the reward from one trained token to the one before, for reinforce_plus_plus
    and ppo."""

    lambd: float = 1.0
    """Lambda of generalised advantage estimation, for ppo."""

    kl_coef: float = 0.0
    """Coefficient of the KL divergence to the reference model that is subtracted from the reward
    of each token, for reinforce_plus_plus, reinforce_plus_plus_baseline and ppo."""

    custom_advantage_function_path: str | None = None
    """module:function that computes the advantages in place of --advantage-estimator; see
    docs/loss.md for what it gets and returns."""

    @property
    def is_custom(self) -> bool:
        """Whether a custom function computes the advantages."""
        return self.custom_advantage_function_path is not None

    @property
    def compares_groups(self) -> bool:
        """Whether rewards are compared within prompt groups, so that a group of one gives 0."""
        return not self.is_custom and self.advantage_estimator not in ALONE_ESTIMATORS

    def rules(self) -> Iterator[Rule]:
        """Ranges, and fields that the estimator does not read."""
        estimator, custom = self.advantage_estimator, self.is_custom
        for name in ("gamma", "lambd"):
            yield 0 <= getattr(self, name) <= 1, name, "must be in [0, 1]", "use 1.0"
        yield self.kl_coef >= 0, "kl_coef", "must be >= 0", "use 0.001, or leave it out"
        yield self.names_function("custom_advantage_function_path")
        yield from self.needs(
            ["advantage_estimator"], not custom, "excludes custom_advantage_function_path"
        )
        returns = custom or estimator in ("reinforce_plus_plus", "ppo")
        yield from self.needs(
            ["gamma"], returns, "needs advantage_estimator reinforce_plus_plus or ppo"
        )
        yield from self.needs(
            ["lambd"], custom or estimator == "ppo", "needs advantage_estimator ppo"
        )
        yield from self.needs(
            ["kl_coef"],
            returns or estimator == "reinforce_plus_plus_baseline",
            "needs advantage_estimator reinforce_plus_plus, reinforce_plus_plus_baseline or ppo; "
            "the others take the KL divergence into the loss, by use_kl_loss",
        )


@dataclass(frozen=True)
class AggregationConfig(CheckedConfig):
    """How the losses of a step's tokens become one number."""

    loss_aggregation: Aggregation | None = None
    """sample_mean: the mean over samples of each sample's token mean; rollout_mean: the same, where
    the samples of one rollout count as one; prompt_mean: where those of one prompt do; token_mean:
    the mean over all trained tokens of the step; constant: their sum over the number of samples
    times loss_aggregation_constant. Default: sample_mean, or token_mean with
    calculate_per_token_loss."""

    loss_aggregation_constant: float | None = None
    """Tokens that constant divides each sample by, for example the longest response allowed."""

    calculate_per_token_loss: bool = False
    """Another name of loss_aggregation token_mean."""

    count_masked_samples: bool = False
    """Count a sample (or rollout) with no trained token as one that sample_mean, rollout_mean and
    constant average over, with loss 0."""

    @property
    def aggregation(self) -> Aggregation:
        """The aggregation in force."""
        if self.loss_aggregation is not None:
            return self.loss_aggregation
        return "token_mean" if self.calculate_per_token_loss else "sample_mean"

    def rules(self) -> Iterator[Rule]:
        """The two names of one choice must agree; each option needs who reads it."""
        constant = self.loss_aggregation_constant
        yield (
            not self.calculate_per_token_loss or self.aggregation == "token_mean",
            "loss_aggregation",
            "must be token_mean, or left out, with calculate_per_token_loss",
            "leave one of the two out",
        )
        yield (
            (self.aggregation == "constant") == (constant is not None),
            "loss_aggregation_constant",
            "must be given with loss_aggregation constant, and only then",
            "give both, or neither",
        )
        yield (
            constant is None or constant > 0,
            "loss_aggregation_constant",
            "must be > 0",
            "use the longest response allowed, in tokens",
        )
        yield from self.needs(
            ["count_masked_samples"],
            self.aggregation in ("sample_mean", "rollout_mean", "constant"),
            "needs loss_aggregation sample_mean, rollout_mean or constant",
        )


@dataclass(frozen=True)
class HeadConfig(CheckedConfig):
    """How hidden states become log-probabilities."""

    rollout_temperature: float = 1.0
    """Sampling temperature of the rollouts, > 0; divides the logits before the softmax."""

    log_probs_chunk_size: int | None = None
    """Rows of logits computed at a time. Default: as many as log_probs_memory_mb holds."""

    log_probs_memory_mb: int | None = None
    """Memory for logits at any one time, in MiB on each rank. Default: what makes the matrix
    products fast."""

    recompute_loss_function: bool = False
    """Keep nothing of the loss for the backward but the hidden states, and compute the logits
    again there: less memory, one more matrix product, the same numbers."""

    def rules(self) -> Iterator[Rule]:
        """Ranges."""
        chunk, memory = self.log_probs_chunk_size, self.log_probs_memory_mb
        yield self.rollout_temperature > 0, "rollout_temperature", "must be > 0", "use 1.0"
        yield (
            chunk is None or chunk >= 1,
            "log_probs_chunk_size",
            "must be >= 1",
            "use 1024, or leave it out",
        )
        yield (
            memory is None or memory >= 1,
            "log_probs_memory_mb",
            "must be >= 1",
            "use 64, or leave it out",
        )
