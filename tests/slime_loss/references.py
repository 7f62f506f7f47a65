"""Slow, obvious loops in float64: what the loss library must compute, one token at a time.

Gradients come from autograd through these loops. They follow the formulas as the papers print
them, not the way the library computes them.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jaxtyping
import torch
from torch import Tensor

from slime_loss import PolicyLossConfig, TokenBatch


def trained_rows(batch: TokenBatch) -> list[int]:
    """The rows whose mask is true."""
    return [row for row in range(batch.num_rows) if bool(batch.loss_mask[row])]


def group_relative_advantages(
    rewards: list[float],
    groups: list[int],
    *,
    scale: str = "std",
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> list[float]:
    """One sample at a time, from the rewards of its group."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        n = len(members)
        if n == 1 or all(member == members[0] for member in members):
            advantages.append(0.0)
            continue
        mean = math.fsum(members) / n
        baseline = (math.fsum(members) - reward) / (n - 1) if leave_one_out else mean
        std = math.sqrt(math.fsum((member - mean) ** 2 for member in members) / (n - 1))
        advantages.append((reward - baseline) / (std + eps if scale == "std" else 1))
    return advantages


def reinforce_plus_plus_returns(
    reward: float, kl: list[float], mask: list[bool], kl_coef: float, gamma: float
) -> list[float]:
    """One sample, from its end: a masked token is passed over, and the reward is paid once."""
    returns, running, unpaid = [0.0] * len(mask), 0.0, reward
    for t in reversed(range(len(mask))):
        if mask[t]:
            running = unpaid - kl_coef * kl[t] + gamma * running
            returns[t], unpaid = running, 0.0
    return returns


def reinforce_plus_plus_baseline(
    rewards: list[float],
    groups: list[int],
    kl: list[list[float]],
    masks: list[list[bool]],
    kl_coef: float,
) -> list[list[float]]:
    """Token by token: the reward, minus the mean of its group, minus the KL penalty."""
    advantages = []
    for reward, group, nats, mask in zip(rewards, groups, kl, masks, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        above = 0.0 if len(set(members)) == 1 else reward - math.fsum(members) / len(members)
        advantages.append(
            [above - kl_coef * k if m else 0.0 for k, m in zip(nats, mask, strict=True)]
        )
    return advantages


def gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """One sample: every advantage as its sum over all later surprises; then the returns."""
    trained = [t for t in range(len(mask)) if mask[t]]
    following = dict(itertools.pairwise(trained))
    surprise = {
        t: rewards[t] + gamma * (values[following[t]] if t in following else 0.0) - values[t]
        for t in trained
    }
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(trained):
        steps = enumerate(trained[i:])
        advantages[t] = math.fsum((gamma * lambd) ** k * surprise[u] for k, u in steps)
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def masked_whiten(
    stream: list[float], mask: list[bool], shift_mean: bool, eps: float
) -> list[float]:
    """Every entry minus the mean, over the root of the sample variance plus eps."""
    values = [value for value, is_in in zip(stream, mask, strict=True) if is_in]
    n = len(values)
    if n < 2:
        return [value if is_in else 0.0 for value, is_in in zip(stream, mask, strict=True)]
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    shift = 0.0 if shift_mean else mean
    return [
        (value - mean) / math.sqrt(variance + eps) + shift if is_in else 0.0
        for value, is_in in zip(stream, mask, strict=True)
    ]


def aggregate(
    samples: list[list[float]],
    aggregation: str,
    count_masked: bool,
    *,
    units: list[int] | None = None,
    constant: float = 1.0,
) -> float:
    """The step's loss from the trained tokens' losses of each sample.

    `units` has the rollout or the prompt of each sample, for a mean over these.
    """
    if units is not None:
        pooled: dict[int, list[float]] = {unit: [] for unit in units}
        for unit, tokens in zip(units, samples, strict=True):
            pooled[unit] = pooled[unit] + tokens
        return aggregate(list(pooled.values()), "sample_mean", count_masked)
    trained = [tokens for tokens in samples if tokens]
    if not trained:
        return 0.0
    num_samples = len(samples) if count_masked else len(trained)
    if aggregation == "token_mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    if aggregation == "constant":
        return sum(map(sum, trained)) / (num_samples * constant)
    return sum(sum(tokens) / len(tokens) for tokens in trained) / num_samples


def random_batch(
    seed: int, num_rows: int, *, spread: float = 0.5
) -> tuple[Tensor, Tensor, TokenBatch]:
    """Log-probs and entropy (both leaves) and a batch with every stream, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_rows, generator=generator, dtype=torch.float64)

    log_probs = -normal().abs()
    batch = TokenBatch(
        labels=torch.randint(0, 7, (num_rows,), generator=generator),
        loss_mask=torch.rand(num_rows, generator=generator) < 0.7,
        loss_weight=torch.rand(num_rows, generator=generator, dtype=torch.float64),
        sample_index=torch.arange(num_rows) // 3,
        advantages=normal() * (torch.rand(num_rows, generator=generator) < 0.8),
        old_log_probs=log_probs + spread * normal(),
        rollout_log_probs=log_probs + spread * normal(),
        ref_log_probs=log_probs + spread * normal(),
        values=normal(),
        returns=normal(),
    )
    counts = torch.zeros((num_rows + 2) // 3, dtype=torch.int64)
    counts.index_add_(0, batch.sample_index, batch.loss_mask.long())
    batch = replace(batch, num_trained_tokens=counts)
    return log_probs.requires_grad_(), normal().abs().requires_grad_(), batch


def for_config(batch: TokenBatch, config: PolicyLossConfig) -> TokenBatch:
    """The batch with the streams that this config takes."""
    return replace(batch, old_log_probs=None) if config.use_rollout_logprobs else batch


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The gradient of a loss at each leaf; zeros at one that it does not depend on."""
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]


@contextmanager
def without_type_checker() -> Iterator[None]:
    """Let a wrong argument reach the function's own checks, as it does for a user."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
