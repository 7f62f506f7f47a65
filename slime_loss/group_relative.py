"""Advantages from rewards within prompt groups, without gradient.

Source: GRPO, arXiv 2402.03300, sec. 4.1.2; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from slime_loss.batch import check_alike

SCALES = ("std", "none")


def group_relative_advantages(
    rewards: Float[Tensor, " samples"],
    group_index: Int64[Tensor, " samples"],
    *,
    scale: str = "std",
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> Float[Tensor, " samples"]:
    """Compare each reward with those of the same group.

    Groups are found by their index; they may differ in size and lie in any order. In a group of
    one, or one whose rewards are all equal, every advantage is exactly 0.

    Args:
        rewards: [N], finite.
        group_index: [N], equal for the samples of one prompt.
        scale: std divides by the group's sample standard deviation (n - 1) plus eps; none does
            not.
        leave_one_out: Subtract the mean of the group's other rewards, not the mean of all.
        eps: Added to the standard deviation; >= 0.

    Returns:
        [N], fp32, or fp64 when the rewards are.

    Raises:
        ValueError: The scale is unknown, eps is negative, a reward is not finite, or the shapes or
            devices differ.
    """
    check_alike("group_index", group_index, "rewards", rewards)
    _check_options(scale, eps)
    check_rewards(rewards)
    _, group, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    exact = rewards.detach().double()
    lowest = _per_group(exact, group, size, "amin")
    highest = _per_group(exact, group, size, "amax")

    # Measured from the group's lowest reward, an offset common to the group costs no digits.
    height = exact - lowest
    advantages = height - _per_group(height, group, size, "mean")
    others = (size[group] - 1).clamp(min=1)
    std = (_per_group(advantages.square(), group, size, "sum") / others).sqrt()
    if leave_one_out:
        advantages = advantages * size[group] / others
    if scale == "std":
        advantages = advantages / (std + eps)
    advantages = torch.where(lowest == highest, 0.0, advantages)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def _per_group(values: Tensor, group: Tensor, size: Tensor, reduce: str) -> Tensor:
    """Reduce `values` [N] within each group, and give every sample its group's result: [N]."""
    # Every group has a sample, so the value to start from is never seen.
    start = torch.zeros_like(size, dtype=values.dtype)
    return start.scatter_reduce(0, group, values, reduce, include_self=False)[group]


def check_rewards(rewards: Float[Tensor, " samples"]) -> None:
    """Raise ValueError, naming the first sample, unless every reward is finite."""
    nonfinite = ~rewards.isfinite()
    if bool(nonfinite.any()):
        sample = int(nonfinite.nonzero()[0])
        raise ValueError(f"rewards must be finite: rewards[{sample}]={float(rewards[sample])}")


def _check_options(scale: str, eps: float) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}: scale={scale!r}")
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0: eps={eps}")
