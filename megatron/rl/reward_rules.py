"""What is done with rewards and masks before a step: long responses, groups that teach nothing.

Source: DAPO, arXiv:2503.14476: dynamic sampling (section 3.2), overlong filtering and soft overlong
punishment (section 3.4, equation 13).
"""

from collections.abc import Sequence

import numpy as np


def soft_overlong_penalty(lengths: np.ndarray, max_length: int, cache_length: int) -> np.ndarray:
    """What is added to the rewards of long responses (equation 13).

    Nothing up to `max_length - cache_length` tokens; from there down to -1 at `max_length`, in a
    straight line; -1 beyond.

    Args:
        lengths: Tokens of the responses, int [n].
        max_length: L_max, tokens.
        cache_length: L_cache, tokens: how many of the last ones are punished.

    Returns:
        float64 [n], in [-1, 0].

    Raises:
        ValueError: The cache is empty, or longer than a response may be.
    """
    if not 0 < cache_length <= max_length:
        rule = f"must be in [1, max_length={max_length}]"
        raise ValueError(f"cache_length {rule}: cache_length={cache_length}")
    into_cache = lengths.astype(np.float64) - (max_length - cache_length)
    return -np.clip(into_cache / cache_length, 0.0, 1.0)


def without_truncated(
    loss_masks: Sequence[np.ndarray], statuses: Sequence[str]
) -> list[np.ndarray]:
    """Overlong filtering: responses that were cut off train nothing.

    Args:
        loss_masks: Of each sample, bool [R].
        statuses: completed, truncated or another status, one a sample.

    Returns:
        The masks, all False where the status is truncated.
    """
    pairs = zip(loss_masks, statuses, strict=True)
    return [mask & (status != "truncated") for mask, status in pairs]


def in_differing_groups(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Dynamic sampling: a group whose rewards are all equal has no advantage to learn from.

    Args:
        rewards: float64 [n]; NaN where a sample has none.
        groups: Numbers of the samples' groups, int [n].

    Returns:
        bool [n]: the samples that have a reward, in groups whose rewards differ.
    """
    scored = ~np.isnan(rewards)
    _, group = np.unique(groups, return_inverse=True)
    lowest = np.full(len(rewards), np.inf)
    highest = np.full(len(rewards), -np.inf)
    np.minimum.at(lowest, group[scored], rewards[scored])
    np.maximum.at(highest, group[scored], rewards[scored])
    return scored & (lowest < highest)[group]
