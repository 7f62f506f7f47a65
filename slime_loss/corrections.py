"""Corrections for data that the current policy did not sample: weights, and tokens left out.

Source: truncated importance sampling: F. Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training", 2025; IcePop: arXiv 2510.18855; sequence and geometric level,
rejection and veto: J. Liu et al., "When Speed Kills Stability", 2025; opsm: DeepSeek-V3.2, 2025.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.custom_loss import custom_correction
from slime_loss.metrics import Metric, Metrics
from slime_loss.policy_config import PolicyLossConfig, RatioLevel
from slime_loss.reductions import SUM
from slime_loss.samples import Samples
from slime_loss.streams import Streams
from slime_loss.surrogate import MAX_LOG_RATIO


@dataclass(frozen=True)
class Correction:
    """What is left of a batch, and what its tokens weigh; without gradient but for the log ratio.

    Attributes:
        accepted: [T], the rows that still train.
        weight: [T], of the policy loss of each accepted row; None without use_tis.
        sample_log_ratio: [T], gspo's log importance ratio of each accepted row's sample, nats,
            held within [-20, 20], with gradient; None for other objectives.
        metrics: Of the corrections themselves, over all rows that the batch trains.
    """

    accepted: Bool[Tensor, " tokens"]
    weight: Float[Tensor, " tokens"] | None
    sample_log_ratio: Float[Tensor, " tokens"] | None
    metrics: Metrics


def needs_samples(config: PolicyLossConfig) -> str | None:
    """What in a config looks at whole samples, as a field and its value; None if nothing does."""
    if config.objective == "gspo":
        return "policy_objective gspo"
    if config.use_opsm:
        return "use_opsm"
    if config.tis_level != "token":
        return f"tis_level {config.tis_level}"
    if config.rs_level != "token":
        return f"rs_level {config.rs_level}"
    return None if config.rs_veto_threshold is None else "rs_veto_threshold"


def apply_corrections(
    streams: Streams, config: PolicyLossConfig, *, cp_group: ProcessGroup | None = None
) -> Correction:
    """Find the weights and the rejected tokens of a config, and gspo's ratio of what is left.

    A rejected token counts as masked from there on: single tokens (rs_level token, a custom
    function) are left out of the sums over samples, except that a veto sees every token, and both
    they and whole samples are left out of the loss and of all metrics that are not here. Their
    share of the step's loss weights is not given to others.

    Communicates over cp_group where `needs_samples`: one all-reduce of [k, S] in the forward,
    and another in the backward of gspo; for a custom function also what that communicates.

    Args:
        streams: The batch, and log-probs with gradient.
        config: The corrections.
        cp_group: The ranks that share the pack out; None is one process.

    Returns:
        The correction; of a config without any, that which changes nothing.

    Raises:
        ValueError: A stream that is needed is missing, or the custom function's result is wrong.
    """
    tokens = _TokenStage.of(streams, config, cp_group)
    needed_by = needs_samples(config)
    if needed_by is None:
        metrics = _ratio_metrics(streams, config, tokens.weights, tokens.accepted)
        weight = None if tokens.weights is None else tokens.weights.weight
        return Correction(tokens.accepted, weight, None, metrics)
    return _correct_samples(streams, config, tokens, Samples.of(streams.batch, cp_group, needed_by))


def _correct_samples(
    streams: Streams, config: PolicyLossConfig, tokens: "_TokenStage", samples: Samples
) -> Correction:
    """The correction of a config that looks at whole samples."""
    whole = _SampleStage(samples, samples.sums(_summands(streams, config, tokens)), config)
    weights = whole.weights() or tokens.weights
    rejected = whole.rejected()
    off_policy = whole.off_policy() & ~rejected
    accepted = tokens.accepted & ~samples.spread(rejected)
    metrics = _ratio_metrics(streams, config, weights, accepted)
    if config.use_opsm:
        metrics["opsm_clipfrac"] = streams.metrics.mean(samples.spread(off_policy))
    dropped = (rejected | off_policy) & (samples.num_tokens > 0)
    if _drops_samples(config):
        metrics["dropped_samples"] = Metric(samples.count_once(dropped).unsqueeze(0), SUM)
    return Correction(
        accepted & ~samples.spread(off_policy),
        None if weights is None else weights.weight.to(streams.dtype),
        whole.log_ratio(dropped).to(streams.dtype) if config.objective == "gspo" else None,
        metrics,
    )


@dataclass(frozen=True)
class _Weights:
    """Importance weights of tokens or samples, and whether a bound changed them."""

    weight: Tensor
    is_bounded: Tensor | None = None


@dataclass(frozen=True)
class _TokenStage:
    """What is known of each token before anything is known of its sample.

    Attributes:
        mismatch: [T], log-probs of trainer minus engine; None where nothing compares them.
        in_bounds: [T], trained and not rejected by its own ratio.
        accepted: [T], nor by the custom function.
        weights: Of tis_level token, or the custom function's.
    """

    mismatch: Tensor | None
    in_bounds: Tensor
    accepted: Tensor
    weights: _Weights | None

    @classmethod
    def of(
        cls, streams: Streams, config: PolicyLossConfig, cp_group: ProcessGroup | None
    ) -> "_TokenStage":
        in_bounds = streams.batch.loss_mask
        if not (config.use_tis or config.use_rs):
            return cls(None, in_bounds, in_bounds, None)
        rollout = streams.get("rollout_log_probs", "use_tis" if config.use_tis else "use_rs")
        train = streams.train_log_probs(config)
        mismatch = train - rollout
        if config.use_rs and config.rs_level == "token":
            in_bounds = in_bounds & ~_is_rejected(_ratio(mismatch), config)
        if not config.use_tis:
            return cls(mismatch, in_bounds, in_bounds, None)
        if config.custom_tis_function_path is None:
            return cls(mismatch, in_bounds, in_bounds, _bounded(_ratio(mismatch), config))
        weight, accepted = custom_correction(train, rollout, streams, config, cp_group=cp_group)
        kept = in_bounds if accepted is None else in_bounds & accepted
        return cls(mismatch, in_bounds, kept, _Weights(streams.clean("weights", weight)))


def _summands(streams: Streams, config: PolicyLossConfig, tokens: _TokenStage) -> dict[str, Tensor]:
    """What is summed over samples; only what the config needs."""
    summands: dict[str, Tensor] = {}
    if config.tis_level != "token" or config.rs_level != "token":
        assert tokens.mismatch is not None, "only use_tis and use_rs have a level"
        summands["mismatch"] = torch.where(tokens.in_bounds, tokens.mismatch, 0.0)
    if config.rs_veto_threshold is not None:
        assert tokens.mismatch is not None, "only use_rs has a veto"
        is_vetoed = _ratio(tokens.mismatch) < config.rs_veto_threshold
        summands["vetoed"] = streams.batch.loss_mask & is_vetoed
    # Whether the config may reject single tokens, not whether this rank did: all sum the same.
    rejects_by_ratio = config.use_rs and config.rs_level == "token"
    if rejects_by_ratio or config.custom_tis_function_path is not None:
        summands["num_accepted"] = tokens.accepted
    if config.objective == "gspo" or config.use_opsm:
        current = streams.predictions
        current = current if config.objective == "gspo" else current.detach()
        log_ratio = current - streams.old_log_probs(config)
        summands["log_ratio"] = torch.where(tokens.accepted, log_ratio, 0.0)
    if config.use_opsm:
        advantages = streams.get("advantages", "use_opsm")
        summands["advantages"] = torch.where(tokens.accepted, advantages, 0.0)
    return summands


@dataclass(frozen=True)
class _SampleStage:
    """The samples of a pack, by the sums over their tokens."""

    samples: Samples
    sums: dict[str, Tensor]
    config: PolicyLossConfig

    def weights(self) -> _Weights | None:
        """The weights of whole samples, one per row; None if the config has none."""
        if self.config.tis_level == "token":
            return None
        weights = _bounded(self._ratio(self.config.tis_level), self.config)
        assert weights.is_bounded is not None
        return _Weights(
            self.samples.spread(weights.weight), self.samples.spread(weights.is_bounded)
        )

    def rejected(self) -> Tensor:
        """[S], the samples that use_rs rejects as a whole."""
        rejected = torch.zeros_like(self.samples.num_tokens, dtype=torch.bool)
        if self.config.rs_level != "token":
            rejected = rejected | _is_rejected(self._ratio(self.config.rs_level), self.config)
        if self.config.rs_veto_threshold is not None:
            rejected = rejected | (self.sums["vetoed"] > 0)
        return rejected

    def off_policy(self) -> Tensor:
        """[S], the samples that use_opsm drops; a mean advantage has the sign of the sum."""
        if not self.config.use_opsm:
            return torch.zeros_like(self.samples.num_tokens, dtype=torch.bool)
        drift = -self.sums["log_ratio"].detach() / self._num_accepted()
        return (self.sums["advantages"] < 0) & (drift > self.config.opsm_delta)

    def log_ratio(self, dropped: Tensor) -> Tensor:
        """[T], gspo's log ratio of each row's sample; what a dropped sample holds is not read."""
        total = torch.where(dropped, 0.0, self.sums["log_ratio"]) / self._num_accepted()
        return self.samples.spread(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))

    def _ratio(self, level: RatioLevel) -> Tensor:
        """[S], of trainer against engine: of single tokens' ratios the product, or their mean."""
        if level == "sequence":
            return _ratio(self.sums["mismatch"])
        # With a level for its bounds, use_rs has not rejected single tokens.
        has_whole_samples = self.config.rs_level != "token"
        count = self.samples.num_tokens.clamp(min=1) if has_whole_samples else self._num_accepted()
        return _ratio(self.sums["mismatch"] / count)

    def _num_accepted(self) -> Tensor:
        """[S], the tokens that are left of each sample, at least 1."""
        return self.sums.get("num_accepted", self.samples.num_tokens).clamp(min=1)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _bounded(ratio: Tensor, config: PolicyLossConfig) -> _Weights:
    low, high = config.tis_clip_low, config.tis_clip
    is_outside = (ratio < low) | (ratio > high)
    if config.tis_mode == "icepop":
        return _Weights(torch.where(is_outside, 0.0, ratio), is_outside)
    return _Weights(ratio.clamp(low, high), is_outside)


def _is_rejected(ratio: Tensor, config: PolicyLossConfig) -> Tensor:
    """Whether a ratio is out of bounds. A NaN is not: it must show in the loss."""
    return (ratio < config.rejection_low) | (ratio > config.rs_upper_bound)


def _drops_samples(config: PolicyLossConfig) -> bool:
    has_veto = config.rs_veto_threshold is not None
    return config.use_opsm or config.rs_level != "token" or has_veto


def _ratio_metrics(
    streams: Streams, config: PolicyLossConfig, weights: _Weights | None, accepted: Tensor
) -> Metrics:
    """The metrics of use_tis and use_rs, over every row that the batch trains."""
    tokens, metrics = streams.metrics, Metrics()
    if weights is not None:
        metrics |= {
            "tis_mean": tokens.mean(weights.weight),
            "tis_min": tokens.min(weights.weight),
            "tis_max": tokens.max(weights.weight),
        }
        if weights.is_bounded is not None:
            metrics["tis_clipfrac"] = tokens.mean(weights.is_bounded)
    if config.use_rs or config.custom_tis_function_path is not None:
        metrics["rs_rejected_frac"] = tokens.mean(~accepted)
    if config.use_tis or config.use_rs:
        weight = 1.0 if weights is None else weights.weight
        metrics["ess"] = tokens.effective_sample_size(torch.where(accepted, weight, 0.0))
    return metrics
