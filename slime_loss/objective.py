"""The objectives: log-probs and streams in, this rank's part of the step's loss and metrics out.

What a masked row holds is replaced by 0 before anything is computed from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor, distributed

from slime_loss.batch import LossOutput, TokenBatch
from slime_loss.corrections import Correction, apply_corrections, needs_samples
from slime_loss.custom import load_function
from slime_loss.custom_loss import custom_loss, is_row_separable
from slime_loss.kl import approximate_kl
from slime_loss.metrics import Metrics, TokenMetrics
from slime_loss.policy_config import PolicyLossConfig
from slime_loss.streams import Streams, check_entropy
from slime_loss.surrogate import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    importance_log_ratio,
    reinforce_surrogate,
)
from slime_loss.vocab_softmax import EntropyMode

_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
RATIO_EDGES = tuple(
    1 + x for x in (*(-step for step in reversed(_STEPS)), 0.0, *_STEPS, 1.0, 2.0, 4.0, 9.0, 99.0)
)
"""Buckets of the importance ratio: fine around 1."""

_SIZES = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0)
ADVANTAGE_EDGES = (*(-size for size in reversed(_SIZES)), 0.0, *_SIZES)
"""Buckets of the advantages: symmetric around 0."""


@dataclass(frozen=True)
class Objective:
    """A loss, and what the head must know of it to choose its way.

    Attributes:
        function: log_probs [T], entropy [T] or None, and the batch of these rows, to the loss.
        entropy: What the function needs of the entropy.
        is_row_separable: Whether the loss of a row depends on that row alone and on what is known
            before the log-probs are, so that its gradient can be taken row by row. Such a function
            communicates nothing, and may be called on any selection of rows.
    """

    function: Callable[[Tensor, Tensor | None, TokenBatch], LossOutput]
    entropy: EntropyMode
    is_row_separable: bool


def make_objective(
    config: PolicyLossConfig, *, cp_group: distributed.ProcessGroup | None = None
) -> Objective:
    """The objective that a config names, of log-probs.

    Args:
        config: The objective. Custom functions are imported here, and at each call.
        cp_group: The ranks that share the pack out; losses that look at whole samples communicate
            over it. None is one process.

    Returns:
        The function of log-probs, entropy and batch, and what it needs.

    Raises:
        ValueError: The config's loss is one of values, which are no log-probs, or a custom
            function cannot be imported.
    """
    if config.loss_type == "value_loss":
        raise ValueError(
            "loss_type must be a loss of log-probs (ValueHead has value_loss): "
            "loss_type='value_loss'"
        )
    if config.loss_type == "sft_loss":
        return Objective(lambda log_probs, _, batch: sft_loss(log_probs, batch), "none", True)
    is_custom = config.loss_type == "custom_loss"
    return Objective(
        partial(custom_loss if is_custom else policy_loss, config=config, cp_group=cp_group),
        "metric" if config.entropy_coef == 0 else "loss",
        needs_samples(config) is None and _has_separable_functions(config),
    )


def policy_loss(
    log_probs: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"] | None,
    batch: TokenBatch,
    config: PolicyLossConfig,
    *,
    cp_group: distributed.ProcessGroup | None = None,
) -> LossOutput:
    """The policy-gradient loss of the config's objective, with its corrections, KL and entropy.

    The loss is the sum over rows of w (pg_loss + kl_loss_coef kl_loss - entropy_coef entropy_loss),
    w = batch.loss_weight. With use_tis, pg_loss has the importance weight as a factor. A row that
    a correction rejects counts as masked: it is in no sum and no metric but those of the
    corrections, and w of the other rows stays what it is. Metrics:

    * parts of the loss, sums weighted by w, so that the line above holds for them whatever the
      aggregation: loss, pg_loss, entropy_loss (with entropy), kl_loss (with use_kl_loss);
    * means weighted by w: entropy, ppo_kl (k1 of old against current), pg_clipfrac = its _high +
      _low + _dual, ratio_mean, advantages_mean, and with rollout_log_probs
      train_rollout_logprob_abs_diff and train_rollout_kl (k3 of rollout against train);
    * extremes: ratio_min, ratio_max, advantages_min, advantages_max,
      train_rollout_logprob_abs_diff_max; the spread advantages_std;
    * histograms: ratio, advantages;
    * a number of rows: active_tokens, those that train and are not rejected;
    * over all rows that train, rejected or not: train_rollout_*; with use_tis tis_mean, tis_min,
      tis_max of the weights in force and, but for a custom function, tis_clipfrac, the share of
      tokens whose weight a bound changed; with use_rs or a custom function rs_rejected_frac; with
      either, ess, the effective sample size of the weights, 0 for rejected tokens, as a share of
      the tokens; with use_opsm opsm_clipfrac, the share of tokens in samples that it drops;
    * dropped_samples, the number of samples dropped as a whole, where the config has such a rule.

    `train` is the policy that is compared with the rollout engine: the old one, or the current one
    where the old log-probs are absent or the engine's own.

    Args:
        log_probs: [T], nats, with gradient.
        entropy: [T], nats; with gradient when entropy_coef is not 0; None for no entropy at all.
        batch: The streams; advantages are needed, rollout_log_probs under use_rollout_logprobs,
            use_tis and use_rs, ref_log_probs under use_kl_loss, num_trained_tokens where whole
            samples are looked at (gspo, use_opsm, levels other than token, rs_veto_threshold).
        config: The objective; its loss_type is not read.
        cp_group: The context-parallel group; where whole samples are looked at, one all-reduce of
            [k, samples] over it, and one in the backward of gspo. Every rank must take part.

    Returns:
        The loss, connected to log_probs even when no row trains, and its metrics.

    Raises:
        ValueError: A stream is missing or superfluous, a shape or device differs, the entropy
            is absent or without gradient where the loss needs it, or a custom function cannot be
            imported or returned something else.
    """
    check_entropy(entropy, log_probs, config)
    every_row = Streams(batch, log_probs)
    correction = apply_corrections(every_row, config, cp_group=cp_group)
    streams = Streams(replace(batch, loss_mask=correction.accepted), log_probs)
    current, advantages = streams.predictions, streams.get("advantages", "policy_loss")
    old = streams.old_log_probs(config)
    log_ratio = importance_log_ratio(current, old)
    surrogate = _surrogate(streams, log_ratio, advantages, correction, config)

    tokens = streams.metrics
    token_loss = _weighted(surrogate.token_loss, streams, correction)
    metrics = {"pg_loss": tokens.weighted_sum(token_loss)}
    if entropy is not None:
        nats = streams.clean("entropy", entropy)
        token_loss = _add_scaled(token_loss, -config.entropy_coef, nats)
        metrics |= {"entropy_loss": tokens.weighted_sum(nats), "entropy": tokens.mean(nats)}
    if config.use_kl_loss:
        kl = _reference_kl(streams, log_ratio, config)
        token_loss = _add_scaled(token_loss, config.kl_loss_coef, kl)
        metrics["kl_loss"] = tokens.weighted_sum(kl)
    metrics["ppo_kl"] = tokens.mean(approximate_kl(old, current.detach(), "k1"))
    metrics |= _surrogate_metrics(tokens, surrogate, advantages)
    if batch.rollout_log_probs is not None:
        metrics |= _mismatch_metrics(every_row, every_row.train_log_probs(config))
    return streams.sum_up(token_loss, metrics | correction.metrics)


def sft_loss(log_probs: Float[Tensor, " tokens"], batch: TokenBatch) -> LossOutput:
    """The negative log-likelihood of the trained tokens.

    Args:
        log_probs: [T], nats, with gradient.
        batch: The streams; labels, loss_mask and loss_weight are all it needs.

    Returns:
        The loss, connected to log_probs even when no row trains, and the metrics loss and
        active_tokens, both sums.

    Raises:
        ValueError: A shape or device differs.
    """
    streams = Streams(batch, log_probs)
    return streams.sum_up(-streams.predictions, {})


def _has_separable_functions(config: PolicyLossConfig) -> bool:
    return all(
        is_row_separable(load_function(path, field))
        for field in ("custom_loss_function_path", "custom_tis_function_path")
        if (path := getattr(config, field)) is not None
    )


def _surrogate(
    streams: Streams,
    log_ratio: Tensor,
    advantages: Tensor,
    correction: Correction,
    config: PolicyLossConfig,
) -> Surrogate:
    if config.objective == "cispo":
        return cispo_surrogate(streams.predictions, log_ratio, advantages, config)
    if config.objective == "reinforce":
        return reinforce_surrogate(streams.predictions, log_ratio, advantages)
    if correction.sample_log_ratio is not None:
        log_ratio = streams.clean("sample_log_ratio", correction.sample_log_ratio)
    return clipped_surrogate(log_ratio, advantages, config)


def _weighted(token_loss: Tensor, streams: Streams, correction: Correction) -> Tensor:
    if correction.weight is None:
        return token_loss
    return streams.clean("weight", correction.weight) * token_loss


def _reference_kl(streams: Streams, log_ratio: Tensor, config: PolicyLossConfig) -> Tensor:
    """The KL estimate; each token was sampled by itself, so its own ratio removes the bias."""
    return approximate_kl(
        streams.predictions,
        streams.get("ref_log_probs", "use_kl_loss"),
        config.kl_loss_type,
        importance_ratio=log_ratio.exp() if config.use_unbiased_kl else None,
    )


def _add_scaled(token_loss: Tensor, coefficient: float, term: Tensor) -> Tensor:
    """Add coefficient * term; a term with coefficient 0 cannot touch the loss, whatever it is."""
    return token_loss if coefficient == 0 else token_loss + coefficient * term


def _surrogate_metrics(tokens: TokenMetrics, surrogate: Surrogate, advantages: Tensor) -> Metrics:
    high, low, dual = surrogate.clipped_high, surrogate.clipped_low, surrogate.clipped_dual
    return {
        "pg_clipfrac": tokens.mean(high | low | dual),
        "pg_clipfrac_high": tokens.mean(high),
        "pg_clipfrac_low": tokens.mean(low),
        "pg_clipfrac_dual": tokens.mean(dual),
        "ratio_mean": tokens.mean(surrogate.ratio),
        "ratio_min": tokens.min(surrogate.ratio),
        "ratio_max": tokens.max(surrogate.ratio),
        "advantages_mean": tokens.mean(advantages),
        "advantages_min": tokens.min(advantages),
        "advantages_max": tokens.max(advantages),
        "advantages_std": tokens.std(advantages),
        "ratio": tokens.histogram(surrogate.ratio, RATIO_EDGES),
        "advantages": tokens.histogram(advantages, ADVANTAGE_EDGES),
    }


def _mismatch_metrics(streams: Streams, train: Tensor) -> Metrics:
    """How far the trainer's log-probs are from the engine's, for the same tokens and weights."""
    rollout = streams.get("rollout_log_probs", "the comparison with the engine")
    difference = (train - rollout).abs()
    return {
        "train_rollout_logprob_abs_diff": streams.metrics.mean(difference),
        "train_rollout_logprob_abs_diff_max": streams.metrics.max(difference),
        "train_rollout_kl": streams.metrics.mean(approximate_kl(rollout, train, "k3")),
    }
