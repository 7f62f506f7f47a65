"""Samples into micro-batches: within a token budget or by count, balanced, as many on every rank.

Every rank computes the same plan from the same lengths, so none waits for a micro-batch that
another does not have. The longest first into the emptiest pack is Graham's LPT rule
(SIAM J. Appl. Math. 17, 1969).
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

NUM_SHOWN = 10

Pack = list[int]
"""Positions of the samples of one micro-batch, ascending; may be empty."""


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    multiple_of: int = 1,
) -> list[list[Pack]]:
    """Deal one optimizer step's samples to data-parallel ranks and micro-batches.

    Args:
        lengths: Tokens of each sample, prompt and response, [N].
        dp_size: Data-parallel ranks.
        max_tokens: Most tokens of a micro-batch; give this or `micro_batch_size`.
        micro_batch_size: Most samples of a micro-batch.
        multiple_of: The number of micro-batches is a multiple of it (interleaved pipelines).

    Returns:
        plan[rank][micro_batch] = positions in `lengths`, the largest micro-batches first. Every
        position is there once, every rank has as many micro-batches, some may be empty.

    Raises:
        ValueError: A sample alone exceeds `max_tokens`, or an argument makes no sense.
    """
    lengths = [int(length) for length in lengths]
    _check_arguments(lengths, dp_size, max_tokens, micro_batch_size, multiple_of)
    round_size = dp_size * multiple_of
    if max_tokens is not None:
        packs = _packs_by_tokens(lengths, max_tokens, round_size)
    else:
        num_packs = _round_up(-(-len(lengths) // micro_batch_size), round_size)
        packs = _spread(lengths, num_packs, max_samples=micro_batch_size)
    return _deal(packs, lengths, dp_size)


def steps_of(num_samples: int, global_batch_size: int) -> list[list[int]]:
    """Cut a rollout into optimizer steps: consecutive positions, the remainder a step of its own.

    Args:
        num_samples: Samples of the rollout.
        global_batch_size: Samples of a step.

    Returns:
        The positions of each step.
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size must be positive: {global_batch_size=}")
    starts = range(0, num_samples, global_batch_size)
    return [list(range(i, min(i + global_batch_size, num_samples))) for i in starts]


def _packs_by_tokens(lengths: Sequence[int], max_tokens: int, round_size: int) -> list[Pack]:
    """As few packs as best-fit needs, evenly filled where that fits the budget too."""
    tight = _best_fit(lengths, max_tokens)
    num_packs = _round_up(len(tight), round_size)
    even = _spread(lengths, num_packs)
    if max((_tokens(pack, lengths) for pack in even), default=0) <= max_tokens:
        return even
    return tight + [[] for _ in range(num_packs - len(tight))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[Pack]:
    """Best-fit decreasing: each sample into the fullest pack that still holds it."""
    packs: list[Pack] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for position in _longest_first(lengths):
        length = lengths[position]
        found = bisect_left(room, (length, 0))
        if found < len(room):
            left, pack = room.pop(found)
        else:
            left, pack = max_tokens, len(packs)
            packs.append([])
        packs[pack].append(position)
        insort(room, (left - length, pack))
    return packs


def _spread(lengths: Sequence[int], num_packs: int, max_samples: int | None = None) -> list[Pack]:
    """Each sample, longest first, into the pack with the fewest tokens that is not full."""
    packs: list[Pack] = [[] for _ in range(num_packs)]
    loads = [(0, pack) for pack in range(num_packs)]
    for position in _longest_first(lengths):
        load, pack = loads[0]
        packs[pack].append(position)
        if len(packs[pack]) == max_samples:
            heapq.heappop(loads)
        else:
            heapq.heapreplace(loads, (load + lengths[position], pack))
    return packs


def _deal(packs: list[Pack], lengths: Sequence[int], dp_size: int) -> list[list[Pack]]:
    """Packs of similar size to the same micro-batch; in each, the largest to the lightest rank."""
    cost = [_tokens(pack, lengths) for pack in packs]
    by_cost = sorted(range(len(packs)), key=lambda pack: (-cost[pack], pack))
    plan: list[list[Pack]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for first in range(0, len(packs), dp_size):
        ranks = sorted(range(dp_size), key=lambda rank: (totals[rank], rank))
        for rank, pack in zip(ranks, by_cost[first : first + dp_size], strict=True):
            plan[rank].append(sorted(packs[pack]))
            totals[rank] += cost[pack]
    return plan


def _tokens(pack: Pack, lengths: Sequence[int]) -> int:
    return sum(lengths[position] for position in pack)


def _round_up(number: int, multiple: int) -> int:
    return max(1, -(-number // multiple)) * multiple


def _check_arguments(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int | None,
    micro_batch_size: int | None,
    multiple_of: int,
) -> None:
    if (max_tokens is None) == (micro_batch_size is None):
        raise ValueError(
            f"one of max_tokens and micro_batch_size must be given: {max_tokens=}, "
            f"{micro_batch_size=}"
        )
    sizes = {"dp_size": dp_size, "max_tokens": max_tokens, "micro_batch_size": micro_batch_size}
    for name, value in {**sizes, "multiple_of": multiple_of}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be positive: {name}={value}")
    if max_tokens is not None:
        _check_budget(lengths, max_tokens)


def _check_budget(lengths: Sequence[int], max_tokens: int) -> None:
    too_long = [position for position, length in enumerate(lengths) if length > max_tokens]
    if too_long:
        shown = ", ".join(f"position {i} ({lengths[i]})" for i in too_long[:NUM_SHOWN])
        more = f" and {len(too_long) - NUM_SHOWN} more" if len(too_long) > NUM_SHOWN else ""
        raise ValueError(
            f"max_tokens must hold every sample: max_tokens={max_tokens}, too long: {shown}{more}"
        )
