"""Configs of the loss of a token: the policy's and the critic's.

The string below a field documents it, and serves as the help text of the flag of that name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime_loss.checked_config import CheckedConfig, Rule

LossType = Literal["policy_loss", "sft_loss", "value_loss", "custom_loss"]
PolicyObjective = Literal["ppo", "gspo", "cispo", "reinforce"]
RatioLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class PolicyLossConfig(CheckedConfig):
    """The loss of one trained token."""

    loss_type: LossType = "policy_loss"
    """policy_loss: the policy gradient; sft_loss: the negative log-probability; value_loss: a
    critic's squared error; custom_loss: --custom-loss-function-path."""

    custom_loss_function_path: str | None = None
    """module:function that computes the loss of each token; see docs/loss.md for what it gets and
    returns."""

    policy_objective: PolicyObjective | None = None
    """ppo: the clipped importance ratio of each token; gspo: of each sample (the geometric mean);
    cispo: the clipped ratio as a constant weight of the log-probability; reinforce: no ratio.
    Default: what --advantage-estimator says (gspo, cispo), otherwise ppo."""

    eps_clip: float = 0.2
    """Lower clip of the importance ratio, at 1 - eps_clip, binding where the advantage is
    negative."""

    eps_clip_high: float | None = None
    """Upper clip of the importance ratio, at 1 + eps_clip_high, binding where the advantage is
    positive. Default: the value of eps_clip."""

    eps_clip_c: float | None = None
    """Dual clip: where the advantage is negative, the ratio is bounded by this value, which must
    be > 1. Default: no bound."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, in the loss with a minus sign. At 0 the entropy is a
    metric only."""

    use_kl_loss: bool = False
    """Estimate the KL divergence to the reference model, which must then give ref_log_probs."""

    kl_loss_coef: float = 0.0
    """Coefficient of the KL estimate in the loss. At 0 it is a metric only."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence, in the loss and in the reward; low_var_kl is k3 clamped to
    [-10, 10]."""

    use_unbiased_kl: bool = False
    """Multiply the KL estimate by the importance ratio, as in DeepSeek-V3.2, which makes it
    unbiased for tokens that an older policy sampled."""

    use_rollout_logprobs: bool = False
    """Take the rollout engine's log-probabilities as the old ones, with no recomputation."""

    use_tis: bool = False
    """Weight each token's policy loss by its importance weight of trainer against rollout engine,
    exp(train - rollout), bounded (truncated importance sampling)."""

    tis_mode: Literal["truncate", "icepop"] = "truncate"
    """What happens to a weight outside of [tis_clip_low, tis_clip]. truncate: it becomes the
    nearest bound; icepop: it becomes 0."""

    tis_level: RatioLevel = "token"
    """What the weight is made of. token: the token's own ratio; sequence: the product over the
    sample's trained tokens; geometric: their geometric mean."""

    tis_clip: float = 2.0
    """Upper bound of the importance weight."""

    tis_clip_low: float = 0.0
    """Lower bound of the importance weight."""

    custom_tis_function_path: str | None = None
    """module:function that computes the weights of use_tis and which tokens are rejected; see
    docs/loss.md for what it gets and returns."""

    use_rs: bool = False
    """Reject tokens, or with rs_level whole samples, whose ratio of trainer against rollout engine
    is out of bounds: they do not train (rejection sampling)."""

    rs_level: RatioLevel = "token"
    """The ratio that decides on rejection, as in tis_level."""

    rs_upper_bound: float = 2.0
    """Largest ratio that is not rejected."""

    rs_lower_bound: float | None = None
    """Smallest ratio that is not rejected. Default: 1 / rs_upper_bound."""

    rs_veto_threshold: float | None = None
    """Reject a sample as a whole when any of its trained tokens has a ratio below this. Default:
    no veto."""

    use_opsm: bool = False
    """Off-policy sequence masking: a sample with a negative advantage whose mean of old - current
    log-probabilities is above opsm_delta does not train."""

    opsm_delta: float = 1e-4
    """Threshold of use_opsm, in nats per token."""

    @property
    def objective(self) -> PolicyObjective:
        """The objective in force."""
        return self.policy_objective or "ppo"

    @property
    def clip_low(self) -> float:
        """Lower bound of the importance ratio."""
        return 1.0 - self.eps_clip

    @property
    def clip_high(self) -> float:
        """Upper bound of the importance ratio."""
        return 1.0 + (self.eps_clip if self.eps_clip_high is None else self.eps_clip_high)

    @property
    def rejection_low(self) -> float:
        """Smallest ratio that use_rs does not reject."""
        return 1 / self.rs_upper_bound if self.rs_lower_bound is None else self.rs_lower_bound

    def rules(self) -> Iterator[Rule]:
        """Ranges, and the combinations that contradict each other."""
        high, dual = self.eps_clip_high, self.eps_clip_c
        yield self.eps_clip > 0, "eps_clip", "must be > 0", "use 0.2"
        yield high is None or high > 0, "eps_clip_high", "must be > 0", "use 0.28, or leave it out"
        yield dual is None or dual > 1, "eps_clip_c", "must be > 1", "use 3.0, or leave it out"
        yield self.kl_loss_coef >= 0, "kl_loss_coef", "must be >= 0", "use 0.001, or leave it out"
        yield from self._loss_type_rules()
        yield from self._objective_rules()
        yield from self.needs(
            ["kl_loss_coef", "use_unbiased_kl"], self.use_kl_loss, "needs use_kl_loss"
        )
        yield from self._correction_rules()

    def _loss_type_rules(self) -> Iterator[Rule]:
        path, custom = self.custom_loss_function_path, self.loss_type == "custom_loss"
        has_path = not custom or path is not None
        fix = "add custom_loss_function_path"
        yield has_path, "loss_type", "custom_loss needs custom_loss_function_path", fix
        yield self.names_function("custom_loss_function_path")
        yield from self.needs(["custom_loss_function_path"], custom, "needs loss_type custom_loss")
        policy, unread = self.loss_type == "policy_loss", f"has no meaning in {self.loss_type}"
        yield from self.needs(_POLICY_ONLY, policy, unread)
        yield from self.needs(_POLICY_AND_CUSTOM, policy or custom, unread)

    def _objective_rules(self) -> Iterator[Rule]:
        has_clip = self.objective != "reinforce"
        is_surrogate = self.objective in ("ppo", "gspo")
        yield from self.needs(
            ["eps_clip", "eps_clip_high"],
            has_clip,
            "needs policy_objective ppo, gspo or cispo: reinforce has no ratio",
        )
        yield from self.needs(["eps_clip_c"], is_surrogate, "needs policy_objective ppo or gspo")

    def _correction_rules(self) -> Iterator[Rule]:
        low, high, threshold = self.tis_clip_low, self.tis_clip, self.rs_veto_threshold
        yield high > 0, "tis_clip", "must be > 0", "use 2.0"
        yield (
            high <= 0 or 0 <= low <= high,
            "tis_clip_low",
            f"must be in [0, tis_clip {high}]",
            "use 0.0",
        )
        yield from self._rejection_rules()
        yield threshold is None or threshold > 0, "rs_veto_threshold", "must be > 0", "use 1e-4"
        yield self.opsm_delta >= 0, "opsm_delta", "must be >= 0", "use 1e-4"
        compared = "excludes use_rollout_logprobs: the old log-probs are the engine's own then"
        yield from self.needs(["use_tis", "use_rs"], not self.use_rollout_logprobs, compared)
        path = self.custom_tis_function_path
        yield self.names_function("custom_tis_function_path")
        tis = ["tis_mode", "tis_level", "tis_clip", "tis_clip_low"]
        yield from self.needs([*tis, "custom_tis_function_path"], self.use_tis, "needs use_tis")
        yield from self.needs(tis, path is None, "excludes custom_tis_function_path")
        rs = ["rs_level", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold"]
        yield from self.needs(rs, self.use_rs, "needs use_rs")
        yield from self.needs(["opsm_delta"], self.use_opsm, "needs use_opsm")

    def _rejection_rules(self) -> Iterator[Rule]:
        """The default of the lower bound, 1 / rs_upper_bound, must be below the upper one."""
        low, high = self.rs_lower_bound, self.rs_upper_bound
        yield high > 0, "rs_upper_bound", "must be > 0", "use 2.0"
        yield (
            low is not None or high >= 1,
            "rs_upper_bound",
            "must be >= 1, or give rs_lower_bound",
            "use 2.0, or give an rs_lower_bound below it",
        )
        yield (
            low is None or high <= 0 or 0 <= low <= high,
            "rs_lower_bound",
            f"must be in [0, rs_upper_bound {high}]",
            "use 0.0, or leave it out with an rs_upper_bound >= 1: 1 / rs_upper_bound",
        )


_POLICY_ONLY = (
    "policy_objective",
    "use_tis",
    "tis_mode",
    "tis_level",
    "tis_clip",
    "tis_clip_low",
    "custom_tis_function_path",
    "use_rs",
    "rs_level",
    "rs_upper_bound",
    "rs_lower_bound",
    "rs_veto_threshold",
    "use_opsm",
    "opsm_delta",
)
_POLICY_AND_CUSTOM = (
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "entropy_coef",
    "use_kl_loss",
    "kl_loss_coef",
    "use_unbiased_kl",
    "use_rollout_logprobs",
)


@dataclass(frozen=True)
class ValueLossConfig(CheckedConfig):
    """The loss of a critic."""

    value_clip: float = 0.2
    """How far a value may move from the old one before its loss has no gradient."""

    def rules(self) -> Iterator[Rule]:
        """Ranges."""
        yield self.value_clip > 0, "value_clip", "must be > 0", "use 0.2"
