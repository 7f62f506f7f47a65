"""Advantages and returns that differ from token to token, once per step, without gradient.

Time runs over the trainable tokens alone: a masked token between two of them is no step.
Source: GAE, arXiv 1506.02438, eq. 16; REINFORCE++, arXiv 2501.03262, eq. 8 and sec. 3.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from slime_loss.batch import check_alike, check_vector
from slime_loss.group_relative import check_rewards, group_relative_advantages

SampleStreams = Sequence[Float[Tensor, " _"]]
"""One vector per sample, [R] of its response length."""

SampleMasks = Sequence[Bool[Tensor, " _"]]
"""One mask per sample, [R] of its response length; true where a token trains."""


def token_rewards(
    rewards: Float[Tensor, " samples"], kl: SampleStreams, loss_mask: SampleMasks, *, kl_coef: float
) -> list[Float[Tensor, " _"]]:
    """The reward of every token: -kl_coef kl, and the sample's own reward at its last token.

    Args:
        rewards: [N], finite.
        kl: N of [R], nats, the KL estimate of each response token.
        loss_mask: N of [R], true where a token trains.
        kl_coef: >= 0; with 0, kl is not read.

    Returns:
        N of [R], fp32, or fp64 when an argument is; 0 at a masked token. The last token is the
        last that trains; a fully masked sample has none, and its reward is in no stream.

    Raises:
        ValueError: The number of samples, a length, dtype or device differs, kl_coef is out of
            range, or a reward is not finite.
    """
    dtype = _common_dtype(rewards, *kl)
    trained = _trained_rewards(rewards, kl, loss_mask, kl_coef)
    return [_spread(row, mask, dtype) for row, mask in zip(trained, loss_mask, strict=True)]


def token_advantages(
    advantages: Float[Tensor, " samples"],
    kl: SampleStreams,
    loss_mask: SampleMasks,
    *,
    kl_coef: float,
) -> list[Float[Tensor, " _"]]:
    """A sample's advantage at each of its trainable tokens, minus kl_coef kl of that token.

    Args:
        advantages: [N].
        kl: N of [R], nats, the KL estimate of each response token.
        loss_mask: N of [R], true where a token trains.
        kl_coef: >= 0; with 0, kl is not read.

    Returns:
        N of [R], fp32, or fp64 when an argument is; 0 at a masked token.

    Raises:
        ValueError: The number of samples, a length, dtype or device differs, or kl_coef is out of
            range.
    """
    _check_samples(loss_mask, kl=kl, advantages=advantages)
    _check_coefficient("kl_coef", kl_coef)
    dtype = _common_dtype(advantages, *kl)
    return [
        _spread(advantage + _penalty(nats[mask], kl_coef), mask, dtype)
        for advantage, nats, mask in zip(advantages.tolist(), kl, loss_mask, strict=True)
    ]


def reinforce_plus_plus_returns(
    rewards: Float[Tensor, " samples"],
    kl: SampleStreams,
    loss_mask: SampleMasks,
    *,
    kl_coef: float,
    gamma: float,
) -> list[Float[Tensor, " _"]]:
    """Discounted sums of the rewards of a token and of the trainable tokens behind it.

    REINFORCE++ whitens them over the whole step (`masked_whiten`) to get its advantages.

    Args:
        rewards: [N], finite.
        kl: N of [R], nats, the KL estimate of each response token.
        loss_mask: N of [R], true where a token trains.
        kl_coef: >= 0; with 0, kl is not read.
        gamma: Discount from one trainable token to the next, in [0, 1].

    Returns:
        N of [R], fp32, or fp64 when an argument is; 0 at a masked token.

    Raises:
        ValueError: As for `token_rewards`, or gamma is out of range.
    """
    _check_share("gamma", gamma)
    dtype = _common_dtype(rewards, *kl)
    trained = _trained_rewards(rewards, kl, loss_mask, kl_coef)
    return [
        _spread(_discounted_sums(row, gamma), mask, dtype)
        for row, mask in zip(trained, loss_mask, strict=True)
    ]


def reinforce_plus_plus_baseline(
    rewards: Float[Tensor, " samples"],
    group_index: Int64[Tensor, " samples"],
    kl: SampleStreams,
    loss_mask: SampleMasks,
    *,
    kl_coef: float,
) -> list[Float[Tensor, " _"]]:
    """The reward minus its group's mean at every trainable token, minus kl_coef kl of that token.

    REINFORCE++-baseline whitens them over the whole step (`masked_whiten`) to get its advantages.

    Args:
        rewards: [N], finite.
        group_index: [N], equal for the samples of one prompt.
        kl: N of [R], nats, the KL estimate of each response token.
        loss_mask: N of [R], true where a token trains.
        kl_coef: >= 0; with 0, kl is not read.

    Returns:
        N of [R], fp32, or fp64 when an argument is; 0 at a masked token.

    Raises:
        ValueError: As for `token_advantages`, a reward is not finite, or the shape of group_index
            differs.
    """
    above = group_relative_advantages(rewards, group_index, scale="none")
    return token_advantages(above, kl, loss_mask, kl_coef=kl_coef)


def gae(
    rewards: SampleStreams,
    values: SampleStreams,
    loss_mask: SampleMasks,
    *,
    gamma: float,
    lambd: float,
) -> tuple[list[Float[Tensor, " _"]], list[Float[Tensor, " _"]]]:
    """Generalized advantage estimates, and the returns that the critic learns.

    With d_t = r_t + gamma V_(t+1) - V_t, where t + 1 is the next trainable token and V is 0 behind
    the last: A_t = sum_k (gamma lambd)^k d_(t+k), and the return is A_t + V_t.

    Args:
        rewards: N of [R]; what stands at a masked token is not read. `token_rewards` puts a
            sample's reward where it belongs.
        values: N of [R], the critic's value before each response token.
        loss_mask: N of [R], true where a token trains.
        gamma: Discount from one trainable token to the next, in [0, 1].
        lambd: Weight of the longer estimates, in [0, 1].

    Returns:
        Advantages and returns, N of [R] each, fp32, or fp64 when an argument is; 0 at a masked
        token.

    Raises:
        ValueError: The number of samples, a length, dtype or device differs, or gamma or lambd is
            out of range.
    """
    _check_share("gamma", gamma)
    _check_share("lambd", lambd)
    _check_samples(loss_mask, rewards=rewards, values=values)
    dtype = _common_dtype(*rewards, *values)
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    for reward, value, mask in zip(rewards, values, loss_mask, strict=True):
        before = value.detach()[mask].double()
        after = functional.pad(before[1:], (0, min(1, before.shape[0])))
        surprise = reward.detach()[mask].double() + gamma * after - before
        advantage = _discounted_sums(surprise, gamma * lambd)
        advantages.append(_spread(advantage, mask, dtype))
        returns.append(_spread(advantage + before, mask, dtype))
    return advantages, returns


def _trained_rewards(
    rewards: Tensor, kl: SampleStreams, loss_mask: SampleMasks, kl_coef: float
) -> list[Tensor]:
    """The rewards of the trainable tokens alone, in float64."""
    _check_samples(loss_mask, kl=kl, rewards=rewards)
    _check_coefficient("kl_coef", kl_coef)
    check_rewards(rewards)
    trained: list[Tensor] = []
    for reward, nats, mask in zip(rewards.tolist(), kl, loss_mask, strict=True):
        penalty = _penalty(nats[mask], kl_coef)
        penalty[-1:] += reward
        trained.append(penalty)
    return trained


def _penalty(kl: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef kl, as a new tensor; a coefficient of 0 gives 0 whatever kl holds."""
    nats = kl.detach().double()
    return torch.zeros_like(nats) if kl_coef == 0 else -kl_coef * nats


def _discounted_sums(values: Tensor, discount: float) -> Tensor:
    """S_t = x_t + discount S_(t+1) of [n], by doubling: after each pass S_t spans twice as far."""
    span, weight = 1, discount
    while span < values.shape[0] and weight != 0:
        values = values + weight * functional.pad(values[span:], (0, span))
        span, weight = 2 * span, weight * weight
    return values


def _spread(trained: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The stream [R] that holds `trained` where the mask is true, and 0 elsewhere."""
    stream = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    stream[mask] = trained.to(dtype)
    return stream


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _check_samples(loss_mask: SampleMasks, **streams: SampleStreams | Tensor) -> None:
    """Raise ValueError unless every stream, or vector of numbers, fits the masks."""
    for name, stream in streams.items():
        if len(stream) != len(loss_mask):
            raise ValueError(
                f"{name} must have one entry per sample of loss_mask: "
                f"len({name})={len(stream)}, len(loss_mask)={len(loss_mask)}"
            )
    for sample, mask in enumerate(loss_mask):
        check_vector(f"loss_mask[{sample}]", mask, torch.bool)
        for name, stream in streams.items():
            if not isinstance(stream, Tensor):
                check_vector(f"{name}[{sample}]", stream[sample], None)
                check_alike(f"{name}[{sample}]", stream[sample], f"loss_mask[{sample}]", mask)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1]: {name}={value}")


def _check_coefficient(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be >= 0 and finite: {name}={value}")
