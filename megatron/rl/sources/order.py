"""The order in which an epoch goes through its data."""

import numpy as np


def epoch_order(num_items: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the items, int64 [num_items], of its own for every seed and epoch.

    Sorts raw 64-bit draws: numpy keeps a bit generator's stream for good, `permutation`'s it may
    change, and a resumed run must go on in the same order.
    """
    draws = np.random.PCG64([seed, epoch]).random_raw(num_items)
    return np.argsort(draws, kind="stable")
