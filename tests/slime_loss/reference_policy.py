"""The policy's objectives and corrections as slow loops in float64, one token at a time."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_loss import LossOutput, PolicyLossConfig, ReducedMetrics, TokenBatch, reduce_metrics
from slime_loss.objective import ADVANTAGE_EDGES, RATIO_EDGES
from tests.slime_loss.references import trained_rows

Numbers = dict[str, float]
MAX_LOG_RATIO = 20.0


def importance_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """One token's log ratio, held within [-20, 20]."""
    log_ratio = log_prob - old_log_prob
    if log_ratio > 20:
        return log_prob.new_tensor(20.0)
    if log_ratio < -20:
        return log_prob.new_tensor(-20.0)
    return log_ratio


def clipped_loss(ratio: Tensor, advantage: float, config: PolicyLossConfig) -> Tensor:
    """One token's max(-r A, -clip(r) A), and its dual clip where A < 0."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    clipped = min(max(ratio, ratio.new_tensor(1 - config.eps_clip)), ratio.new_tensor(1 + high))
    loss = max(-ratio * advantage, -clipped * advantage)
    if config.eps_clip_c is not None and advantage < 0:
        loss = min(loss, ratio.new_tensor(-config.eps_clip_c * advantage))
    return loss


def binding_bound(ratio: float, advantage: float, config: PolicyLossConfig) -> str | None:
    """Which bound, if any, takes one token's gradient away: its loss no longer moves with r."""
    moved = [
        clipped_loss(torch.tensor(r, dtype=torch.float64), advantage, config).item()
        for r in (ratio, ratio * (1 + 1e-9))
    ]
    if advantage == 0 or moved[0] != moved[1]:
        return None
    if advantage > 0:
        return "high"
    return "low" if ratio < 1 else "dual"


def kl(log_prob: Tensor, ref_log_prob: Tensor, estimator: str) -> Tensor:
    """One token's KL estimate."""
    d = log_prob - ref_log_prob
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    d = max(d, d.new_tensor(-MAX_LOG_RATIO))
    k3 = torch.expm1(-d) + d
    if estimator == "k3":
        return k3
    return min(max(k3, d.new_tensor(-10.0)), d.new_tensor(10.0))


@dataclass(frozen=True)
class Corrected:
    """What the corrections leave: rows, their weights, and gspo's members of each row's sample."""

    accepted: list[int]
    weights: dict[int, float]
    members: dict[int, list[int]]
    metrics: Numbers


def old_log_probs(log_probs: Tensor, batch: TokenBatch, config: PolicyLossConfig) -> Tensor:
    """What the importance ratio is taken against."""
    if config.use_rollout_logprobs:
        return batch.rollout_log_probs
    return log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs


def train_log_probs(log_probs: Tensor, batch: TokenBatch, config: PolicyLossConfig) -> Tensor:
    """What is compared with the engine's."""
    if config.use_rollout_logprobs or batch.old_log_probs is None:
        return log_probs.detach()
    return batch.old_log_probs


def policy_loss(
    log_probs: Tensor, entropy: Tensor | None, batch: TokenBatch, config: PolicyLossConfig
) -> tuple[Tensor, Numbers]:
    """The loss and every metric, token by token; histograms by their counts."""
    corrected = correct(log_probs, batch, config)
    seen: dict[str, list[float]] = {}
    loss = torch.zeros((), dtype=torch.float64) + 0 * log_probs.sum()
    for row in corrected.accepted:
        token_loss, values = _token(row, log_probs, entropy, batch, config, corrected)
        loss = loss + batch.loss_weight[row] * token_loss
        for name, value in values.items():
            number = value.item() if isinstance(value, Tensor) else value
            seen.setdefault(name, []).append(number)
    weights = [batch.loss_weight[row].item() for row in corrected.accepted]
    metrics = {
        name: _reduction(name)(values, weights)
        for name, values in seen.items()
        if name not in ("ratio", "advantages")
    }
    for name, edges in (("ratio", RATIO_EDGES), ("advantages", ADVANTAGE_EDGES)):
        metrics |= bucket_counts(name, seen.get(name, []), edges)
    return loss, metrics | _mismatch(log_probs, batch, config) | corrected.metrics


def correct(log_probs: Tensor, batch: TokenBatch, config: PolicyLossConfig) -> Corrected:
    """Rejection of tokens, then of samples, then the weights."""
    rows = _Rows.of(log_probs, batch, config)
    singly, whole = _rejected(rows)
    left = [row for row in rows.sample if row not in singly]
    drift = old_log_probs(log_probs, batch, config) - log_probs.detach()
    off_policy = _off_policy(rows, left, batch.advantages.tolist(), drift.tolist()) - whole
    weights, clipped = _weights(rows, left)

    metrics = _ratio_metrics(batch, config, list(rows.sample), singly | whole, weights, clipped)
    if config.use_opsm:
        metrics["opsm_clipfrac"] = _share(batch, list(rows.sample), off_policy)
    if config.use_opsm or config.rs_level != "token" or config.rs_veto_threshold is not None:
        metrics["dropped_samples"] = float(len({rows.sample[row] for row in whole | off_policy}))
    accepted = [row for row in rows.sample if row not in singly | whole | off_policy]
    members = {row: rows.of_sample(row, left) for row in accepted}
    return Corrected(accepted, weights, members, metrics)


@dataclass(frozen=True)
class _Rows:
    """The rows that train: the sample of each, and its log ratio of trainer against engine."""

    config: PolicyLossConfig
    sample: dict[int, int]
    nats: dict[int, float]

    @classmethod
    def of(cls, log_probs: Tensor, batch: TokenBatch, config: PolicyLossConfig) -> "_Rows":
        rows = trained_rows(batch)
        nats: dict[int, float] = {}
        if config.use_tis or config.use_rs:
            mismatch = train_log_probs(log_probs, batch, config) - batch.rollout_log_probs
            nats = {row: mismatch[row].item() for row in rows}
        return cls(config, {row: int(batch.sample_index[row]) for row in rows}, nats)

    def of_sample(self, row: int, among: Iterable[int]) -> list[int]:
        return [other for other in among if self.sample[other] == self.sample[row]]

    def ratio(self, level: str, row: int, among: Iterable[int]) -> float:
        members = [row] if level == "token" else self.of_sample(row, among)
        total = math.fsum(self.nats[member] for member in members)
        total = total / max(len(members), 1) if level == "geometric" else total
        return math.exp(min(max(total, -MAX_LOG_RATIO), MAX_LOG_RATIO))


def _rejected(rows: _Rows) -> tuple[set[int], set[int]]:
    """The rows that are rejected one by one, and those of samples rejected as a whole."""
    config, out, vetoed = rows.config, set(), set()
    for row in rows.sample if config.use_rs else ():
        ratio = rows.ratio(config.rs_level, row, rows.sample)
        if not config.rejection_low <= ratio <= config.rs_upper_bound:
            out.add(row)
        threshold = config.rs_veto_threshold
        if threshold is not None and rows.ratio("token", row, ()) < threshold:
            vetoed |= {*rows.of_sample(row, rows.sample)}
    return (out, vetoed) if config.rs_level == "token" else (set(), out | vetoed)


def _off_policy(
    rows: _Rows, left: list[int], advantages: list[float], drift: list[float]
) -> set[int]:
    dropped = set()
    for row in left if rows.config.use_opsm else ():
        members = rows.of_sample(row, left)
        mean_drift = sum(drift[member] for member in members) / len(members)
        is_bad = sum(advantages[member] for member in members) / len(members) < 0
        if is_bad and mean_drift > rows.config.opsm_delta:
            dropped |= {*rows.of_sample(row, rows.sample)}
    return dropped


def _weights(rows: _Rows, left: list[int]) -> tuple[dict[int, float], dict[int, bool]]:
    config, weights, clipped = rows.config, {}, {}
    for row in rows.sample if config.use_tis else ():
        raw = rows.ratio(config.tis_level, row, left)
        bounded = min(max(raw, config.tis_clip_low), config.tis_clip)
        clipped[row] = bounded != raw
        weights[row] = 0.0 if clipped[row] and config.tis_mode == "icepop" else bounded
    return weights, clipped


def _ratio_metrics(
    batch: TokenBatch,
    config: PolicyLossConfig,
    rows: list[int],
    rejected: set[int],
    weights: dict[int, float],
    clipped: dict[int, bool],
) -> Numbers:
    metrics: Numbers = {}
    if config.use_tis:
        total = math.fsum(batch.loss_weight[row].item() for row in rows)
        weighted = math.fsum(batch.loss_weight[row].item() * weights[row] for row in rows)
        metrics["tis_mean"] = weighted / total if rows else math.nan
        metrics["tis_min"] = min(weights.values(), default=math.nan)
        metrics["tis_max"] = max(weights.values(), default=math.nan)
        metrics["tis_clipfrac"] = _share(batch, rows, {row for row in rows if clipped[row]})
    if config.use_rs:
        metrics["rs_rejected_frac"] = _share(batch, rows, rejected)
    if config.use_tis or config.use_rs:
        kept = [0.0 if row in rejected else weights.get(row, 1.0) for row in rows]
        squares = math.fsum(weight**2 for weight in kept)
        ess = math.fsum(kept) ** 2 / (len(rows) * squares) if squares else 0.0
        metrics["ess"] = ess if rows else math.nan
    return metrics


def _share(batch: TokenBatch, rows: list[int], chosen: set[int]) -> float:
    total = math.fsum(batch.loss_weight[row].item() for row in rows)
    part = math.fsum(batch.loss_weight[row].item() for row in rows if row in chosen)
    return part / total if rows else math.nan


def surrogate(
    log_prob: Tensor, ratio: Tensor, advantage: float, config: PolicyLossConfig
) -> tuple[Tensor, str | None]:
    """One token's loss under the config's objective, and which clip binds."""
    if config.objective == "reinforce":
        return -advantage * log_prob, None
    if config.objective == "cispo":
        weight = min(max(ratio.item(), config.clip_low), config.clip_high)
        bound = "high" if weight < ratio else "low" if weight > ratio else None
        return -weight * advantage * log_prob, bound if advantage else None
    bound = binding_bound(ratio.item(), advantage, config)
    return clipped_loss(ratio, advantage, config), bound


def _token(
    row: int,
    log_probs: Tensor,
    entropy: Tensor | None,
    batch: TokenBatch,
    config: PolicyLossConfig,
    corrected: Corrected,
) -> tuple[Tensor, dict[str, Tensor | float]]:
    log_prob, advantage = log_probs[row], batch.advantages[row].item()
    old = old_log_probs(log_probs, batch, config)
    own_ratio = ratio = torch.exp(importance_log_ratio(log_prob, old[row]))
    if config.objective == "gspo":
        members = corrected.members[row]
        total = sum(log_probs[member] - old[member] for member in members)
        ratio = torch.exp(importance_log_ratio(total / len(members), torch.zeros_like(total)))
    pg_loss, bound = surrogate(log_prob, ratio, advantage, config)
    pg_loss = loss = pg_loss * corrected.weights.get(row, 1.0)
    values: dict[str, Tensor | float] = {"pg_loss": pg_loss}
    if entropy is not None:
        loss = loss - config.entropy_coef * entropy[row]
        values |= {"entropy_loss": entropy[row], "entropy": entropy[row]}
    if config.use_kl_loss:
        kl_loss = kl(log_prob, batch.ref_log_probs[row], config.kl_loss_type)
        kl_loss = kl_loss * own_ratio if config.use_unbiased_kl else kl_loss
        loss = loss + config.kl_loss_coef * kl_loss
        values["kl_loss"] = kl_loss
    values |= {f"pg_clipfrac_{name}": float(bound == name) for name in ("high", "low", "dual")}
    values |= {"pg_clipfrac": float(bound is not None), "ppo_kl": old[row] - log_prob}
    values |= dict.fromkeys(("ratio", "ratio_mean", "ratio_min", "ratio_max"), ratio)
    values |= {f"advantages_{kind}": advantage for kind in ("mean", "std", "min", "max")}
    return loss, values | {"advantages": advantage, "loss": loss, "active_tokens": 1.0}


def _mismatch(log_probs: Tensor, batch: TokenBatch, config: PolicyLossConfig) -> Numbers:
    rows = trained_rows(batch)
    if batch.rollout_log_probs is None or not rows:
        return {}
    train = train_log_probs(log_probs, batch, config)
    nats = [(train[row] - batch.rollout_log_probs[row]).item() for row in rows]
    weights = [batch.loss_weight[row].item() for row in rows]
    held = [min(d, MAX_LOG_RATIO) for d in nats]
    k3 = [math.exp(d) - 1 - d for d in held]
    return {
        "train_rollout_logprob_abs_diff": _mean([abs(d) for d in nats], weights),
        "train_rollout_logprob_abs_diff_max": max(abs(d) for d in nats),
        "train_rollout_kl": _mean(k3, weights),
    }


def _reduction(name: str) -> Callable[[list[float], list[float]], float]:
    if name == "active_tokens":
        return lambda values, _: sum(values)
    if name.endswith("_std"):
        return lambda values, _: statistics.stdev(values) if len(values) > 1 else 0.0
    if name.endswith(("_min", "_max")):
        extreme = min if name.endswith("_min") else max
        return lambda values, _: extreme(values)
    return _weighted_sum if name in PARTS else _mean


PARTS = ("loss", "pg_loss", "entropy_loss", "kl_loss")
"""Metrics that are parts of the loss: sums."""


def bucket_counts(name: str, values: Iterable[float], edges: tuple[float, ...]) -> Numbers:
    """How many values lie in each bucket (lower edge, upper edge]: "name 0" and so on."""
    counts = {f"{name} {bucket}": 0.0 for bucket in range(len(edges) + 1)}
    for value in values:
        counts[f"{name} {bisect_left(edges, value)}"] += 1
    return counts


def shown(output: LossOutput) -> Numbers:
    """All metrics of an output, as `numbers`."""
    return numbers(reduce_metrics(output.metrics))


def numbers(reduced: ReducedMetrics) -> Numbers:
    """All metrics, histograms by their counts as in `bucket_counts`."""
    counts = {
        f"{name} {bucket}": count
        for name, histogram in reduced.histograms.items()
        for bucket, count in enumerate(histogram.counts)
    }
    return reduced.scalars | counts


def _mean(values: list[float], weights: list[float]) -> float:
    return _weighted_sum(values, weights) / sum(weights)


def _weighted_sum(values: list[float], weights: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))
