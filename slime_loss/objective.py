"""The objectives: log-probs and streams in, this rank's part of the step's loss and metrics out.

What a masked row holds is replaced by 0 before anything is computed from it. Masking the results
would not do: the gradient of a masked infinity is 0 * inf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, distributed
from torch.nn import functional

from slime_loss.batch import LossOutput, TokenBatch, check_alike, check_floats
from slime_loss.kl import approximate_kl
from slime_loss.metrics import Metrics, TokenMetrics
from slime_loss.policy_config import PolicyLossConfig
from slime_loss.surrogate import Surrogate, clipped_surrogate, importance_log_ratio
from slime_loss.vocab_softmax import EntropyMode


@dataclass(frozen=True)
class Objective:
    """A loss, and what the head must know of it to choose its way.

    Attributes:
        function: log_probs [T], entropy [T] or None, and the batch of these rows, to the loss.
        entropy: What the function needs of the entropy.
        is_row_separable: Whether the loss of a row depends on that row alone and on what is known
            before the log-probs are, so that its gradient can be taken row by row.
    """

    function: Callable[[Tensor, Tensor | None, TokenBatch], LossOutput]
    entropy: EntropyMode
    is_row_separable: bool


def make_objective(
    config: PolicyLossConfig, *, cp_group: distributed.ProcessGroup | None = None
) -> Objective:
    """The objective that a config names.

    Args:
        config: The objective.
        cp_group: The ranks that share the pack out; losses that look at whole samples communicate
            over it. None is one process.
    """
    if config.loss_type == "sft_loss":
        return Objective(lambda log_probs, _, batch: sft_loss(log_probs, batch), "none", True)
    return Objective(
        partial(policy_loss, config=config, cp_group=cp_group),
        "metric" if config.entropy_coef == 0 else "loss",
        is_row_separable=True,
    )


def policy_loss(
    log_probs: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"] | None,
    batch: TokenBatch,
    config: PolicyLossConfig,
    *,
    cp_group: distributed.ProcessGroup | None = None,  # noqa: ARG001 - the same for any objective
) -> LossOutput:
    """The clipped policy-gradient loss, with the KL loss and entropy bonus of the config.

    The loss is the sum over rows of w (pg_loss + kl_loss_coef kl_loss - entropy_coef entropy_loss),
    w = batch.loss_weight. Its metrics:

    * parts of the loss, sums weighted by w, so that the line above holds for them whatever the
      aggregation: loss, pg_loss, entropy_loss (with entropy), kl_loss (with use_kl_loss);
    * means weighted by w: entropy, ppo_kl (k1 of old against current), pg_clipfrac = its _high +
      _low + _dual, ratio_mean, advantages_mean, and with rollout_log_probs
      train_rollout_logprob_abs_diff and train_rollout_kl (k3 of rollout against train);
    * extremes: ratio_min, ratio_max, advantages_min, advantages_max,
      train_rollout_logprob_abs_diff_max;
    * a number of rows: active_tokens.

    `train` is the policy that is compared with the rollout engine: the old one, or the current one
    where the old log-probs are absent or the engine's own.

    Args:
        log_probs: [T], nats, with gradient.
        entropy: [T], nats; with gradient when entropy_coef is not 0; None for no entropy at all.
        batch: The streams; advantages are needed, rollout_log_probs under use_rollout_logprobs,
            ref_log_probs under use_kl_loss.
        config: The objective; its loss_type is not read.
        cp_group: The context-parallel group; ratios of single tokens communicate nothing over it.

    Returns:
        The loss, connected to log_probs even when no row trains, and its metrics.

    Raises:
        ValueError: A stream is missing or superfluous, a shape or device differs, or the entropy
            is absent or without gradient where the loss needs it.
    """
    _check_entropy(entropy, log_probs, config)
    streams = _Streams(batch, log_probs)
    current, advantages = streams.log_probs, streams.get("advantages", "policy_loss")
    old = _old_log_probs(streams, config)
    surrogate = clipped_surrogate(importance_log_ratio(current, old), advantages, config)

    tokens = streams.metrics
    token_loss = surrogate.token_loss
    metrics = {"pg_loss": tokens.weighted_sum(token_loss)}
    if entropy is not None:
        nats = streams.clean("entropy", entropy)
        token_loss = _add_scaled(token_loss, -config.entropy_coef, nats)
        metrics |= {"entropy_loss": tokens.weighted_sum(nats), "entropy": tokens.mean(nats)}
    if config.use_kl_loss:
        kl = _reference_kl(streams, surrogate, config)
        token_loss = _add_scaled(token_loss, config.kl_loss_coef, kl)
        metrics["kl_loss"] = tokens.weighted_sum(kl)
    metrics["ppo_kl"] = tokens.mean(approximate_kl(old, current.detach(), "k1"))
    metrics |= _surrogate_metrics(tokens, surrogate, advantages)
    if batch.rollout_log_probs is not None:
        on_policy = config.use_rollout_logprobs or batch.old_log_probs is None
        metrics |= _mismatch_metrics(streams, current.detach() if on_policy else old)
    return _sum_up(token_loss, streams, metrics)


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
    streams = _Streams(batch, log_probs)
    return _sum_up(-streams.log_probs, streams, {})


class _Streams:
    """The streams of a batch as an objective may see them: 0 at every row that does not train.

    All of them are in the dtype of the log-probs, and those of the batch are without gradient.
    """

    def __init__(self, batch: TokenBatch, log_probs: Tensor) -> None:
        self.batch = batch
        self.dtype = log_probs.dtype
        self.log_probs = self.clean("log_probs", log_probs)
        self.weight = self.clean("loss_weight", batch.loss_weight.detach())
        self.metrics = TokenMetrics(batch.loss_mask, batch.loss_weight)

    def clean(self, name: str, stream: Tensor) -> Tensor:
        check_floats(name, stream)
        check_alike(name, stream, "labels", self.batch.labels)
        return torch.where(self.batch.loss_mask, stream, 0.0).to(self.dtype)

    def get(self, name: str, needed_by: str) -> Tensor:
        stream: Tensor | None = getattr(self.batch, name)
        if stream is None:
            raise ValueError(f"{name} is needed by {needed_by}: {name}=None")
        return self.clean(name, stream.detach())


def _check_entropy(entropy: Tensor | None, log_probs: Tensor, config: PolicyLossConfig) -> None:
    if config.entropy_coef == 0:
        return
    if entropy is None or (log_probs.requires_grad and not entropy.requires_grad):
        state = "entropy=None" if entropy is None else "entropy.requires_grad=False"
        raise ValueError(
            "entropy must be given, with gradient, when entropy_coef is not 0: "
            f"{state}, entropy_coef={config.entropy_coef}"
        )


def _old_log_probs(streams: _Streams, config: PolicyLossConfig) -> Tensor:
    """The log-probs of the policy that the importance ratio is taken against, without gradient."""
    recomputed = streams.batch.old_log_probs
    if config.use_rollout_logprobs and recomputed is not None:
        raise ValueError(
            "old_log_probs must be None under use_rollout_logprobs, where the engine's log-probs "
            f"are the old ones: old_log_probs.shape={tuple(recomputed.shape)}"
        )
    if config.use_rollout_logprobs:
        return streams.get("rollout_log_probs", "use_rollout_logprobs")
    if recomputed is None:
        return streams.log_probs.detach()
    return streams.clean("old_log_probs", recomputed.detach())


def _reference_kl(streams: _Streams, surrogate: Surrogate, config: PolicyLossConfig) -> Tensor:
    return approximate_kl(
        streams.log_probs,
        streams.get("ref_log_probs", "use_kl_loss"),
        config.kl_loss_type,
        importance_ratio=surrogate.ratio if config.use_unbiased_kl else None,
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
    }


def _mismatch_metrics(streams: _Streams, train: Tensor) -> Metrics:
    """How far the trainer's log-probs are from the engine's, for the same tokens and weights."""
    rollout = streams.get("rollout_log_probs", "the comparison with the engine")
    difference = (train - rollout).abs()
    return {
        "train_rollout_logprob_abs_diff": streams.metrics.mean(difference),
        "train_rollout_logprob_abs_diff_max": streams.metrics.max(difference),
        "train_rollout_kl": streams.metrics.mean(approximate_kl(rollout, train, "k3")),
    }


def _sum_up(token_loss: Tensor, streams: _Streams, metrics: Metrics) -> LossOutput:
    weighted = streams.weight * token_loss
    finite = weighted.isfinite() & streams.log_probs.isfinite()
    head = {"loss": streams.metrics.weighted_sum(token_loss)}
    tail = {"active_tokens": streams.metrics.count()}
    return LossOutput(weighted.sum(), head | metrics | tail, _first_row(~finite))


def _first_row(flags: Tensor) -> Tensor:
    """The first true row, -1 when there is none; without waiting for the device."""
    num_rows = flags.shape[0]
    rows = torch.arange(num_rows, device=flags.device)
    first = functional.pad(torch.where(flags, rows, num_rows), (0, 1), value=num_rows).amin()
    return torch.where(first == num_rows, -1, first)
