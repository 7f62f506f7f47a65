"""Samples into micro-batches: within a token budget or by count, balanced, as many on every rank.

Every rank computes the same plan from the same lengths, so none waits for a micro-batch that
another does not have. The dearest sample first to the cheapest rank is Graham's LPT rule
(SIAM J. Appl. Math. 17, 1969), here with packs that may be full.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

NUM_SHOWN = 10
AS_GOOD_AS_EVEN = 1.001
"""A dearest rank within this of the least there can be is not improved on."""

Pack = list[int]
"""Positions of the samples of one micro-batch, ascending; may be empty."""
Rooms = list[tuple[int, int]]
"""(room left, pack) of a rank's packs, ascending."""


@dataclass(frozen=True)
class Balance:
    """How well a plan fills micro-batches and evens out ranks.

    Args:
        micro_batches: of every rank.
        rank_imbalance: cost of the dearest rank / mean cost of a rank; 1 is even.
        fill: tokens / tokens that the micro-batches could hold; None without a token budget.
    """

    micro_batches: int
    rank_imbalance: float
    fill: float | None


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    costs: Sequence[int] | None = None,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    multiple_of: int = 1,
) -> list[list[Pack]]:
    """Deal one optimizer step's samples to data-parallel ranks and micro-batches.

    Args:
        lengths: Tokens of each sample, prompt and response, [N].
        dp_size: Data-parallel ranks.
        costs: What each sample costs, [N] whole numbers that rise with its length; by default
            its length.
        max_tokens: Most tokens of a micro-batch; give this or `micro_batch_size`.
        micro_batch_size: Most samples of a micro-batch.
        multiple_of: The number of micro-batches is a multiple of it (interleaved pipelines).

    Returns:
        plan[rank][micro_batch] = positions in `lengths`, the dearest micro-batches first. Every
        position is there once, every rank has as many micro-batches, some may be empty. There are
        no more micro-batches than best-fit decreasing needs.

    Raises:
        ValueError: A sample alone exceeds `max_tokens`, or an argument makes no sense.
    """
    lengths = [int(length) for length in lengths]
    costs = lengths if costs is None else [int(cost) for cost in costs]
    _check_arguments(lengths, costs, dp_size, max_tokens, micro_batch_size, multiple_of)
    capacity = micro_batch_size if max_tokens is None else max_tokens
    sizes = [1] * len(lengths) if max_tokens is None else lengths
    samples = _Samples(sizes, costs, capacity)
    plan = _evenest(_plans(samples, dp_size, multiple_of), costs)
    return _in_order(plan, costs)


def balance_of(
    plan: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    costs: Sequence[int],
    max_tokens: int | None = None,
) -> Balance:
    """Measure a plan.

    Args:
        plan: plan[rank][micro_batch] = positions in `lengths`.
        lengths: Tokens of each sample, [N].
        costs: What each sample costs, [N].
        max_tokens: Most tokens of a micro-batch.
    """
    ranks = [sum(_total(pack, costs) for pack in rank) for rank in plan]
    room = len(plan) * len(plan[0]) * max_tokens if max_tokens else None
    tokens = sum(_total(pack, lengths) for rank in plan for pack in rank)
    return Balance(
        micro_batches=len(plan[0]),
        rank_imbalance=max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0,
        fill=tokens / room if room else None,
    )


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


@dataclass(frozen=True)
class _Samples:
    """What is packed.

    Args:
        sizes: how much of a pack each sample takes, [N]: its tokens, or 1.
        costs: [N].
        capacity: what a pack holds.
    """

    sizes: Sequence[int]
    costs: Sequence[int]
    capacity: int

    @cached_property
    def order(self) -> list[int]:
        """Positions, the largest first."""
        positions = range(len(self.sizes))
        return sorted(positions, key=lambda i: (-self.sizes[i], -self.costs[i], i))


def _evenest(plans: Iterable[list[list[Pack]]], costs: Sequence[int]) -> list[list[Pack]]:
    """The plan whose dearest rank is the cheapest; the first that is as good as even will do."""
    evenest: tuple[int, list[list[Pack]]] | None = None
    for plan in plans:
        ranks = [sum(_total(pack, costs) for pack in rank) for rank in plan]
        if evenest is None or max(ranks) < evenest[0]:
            evenest = (max(ranks), plan)
        least = max(sum(ranks) / len(ranks), max(costs, default=0))
        if evenest[0] <= AS_GOOD_AS_EVEN * least:
            break
    assert evenest is not None, "packs can always be dealt"
    return evenest[1]


def _plans(samples: _Samples, dp_size: int, multiple_of: int) -> Iterator[list[list[Pack]]]:
    """Plans of as few micro-batches as best fit needs, the one whose packs fill evenly first."""
    tight = _best_fit(samples)
    packs_per_rank = -(-max(1, len(tight)) // (dp_size * multiple_of)) * multiple_of
    plan = _level(samples, dp_size, packs_per_rank)
    if plan is not None:
        yield plan
    empty = [[] for _ in range(packs_per_rank * dp_size - len(tight))]
    yield _deal(tight + empty, samples.costs, dp_size)


def _best_fit(samples: _Samples) -> list[Pack]:
    """Best-fit decreasing: each sample into the fullest pack that still holds it."""
    packs: list[Pack] = []
    rooms: Rooms = []
    for position in samples.order:
        size = samples.sizes[position]
        found = bisect_left(rooms, (size, 0))
        if found < len(rooms):
            left, pack = rooms.pop(found)
        else:
            left, pack = samples.capacity, len(packs)
            packs.append([])
        packs[pack].append(position)
        insort(rooms, (left - size, pack))
    return packs


def _level(samples: _Samples, dp_size: int, packs_per_rank: int) -> list[list[Pack]] | None:
    """Each sample to the cheapest rank that has room for it, there into the roomiest pack.

    Returns:
        plan[rank][pack], or None where some sample finds no room.
    """
    plan: list[list[Pack]] = [[[] for _ in range(packs_per_rank)] for _ in range(dp_size)]
    rooms = [[(samples.capacity, pack) for pack in range(packs_per_rank)] for _ in range(dp_size)]
    open_ranks = [(0, rank) for rank in range(dp_size)]
    closed: list[tuple[int, int, int]] = []  # (-largest room, load, rank): too full for now
    for position in samples.order:
        size = samples.sizes[position]
        while closed and -closed[0][0] >= size:
            heapq.heappush(open_ranks, heapq.heappop(closed)[1:])
        while open_ranks and rooms[open_ranks[0][1]][-1][0] < size:
            load, rank = heapq.heappop(open_ranks)
            heapq.heappush(closed, (-rooms[rank][-1][0], load, rank))
        if not open_ranks:
            return None
        load, rank = open_ranks[0]
        left, pack = rooms[rank].pop()
        plan[rank][pack].append(position)
        insort(rooms[rank], (left - size, pack))
        heapq.heapreplace(open_ranks, (load + samples.costs[position], rank))
    return plan


def _deal(packs: Sequence[Pack], costs: Sequence[int], dp_size: int) -> list[list[Pack]]:
    """Packs of similar cost to the same micro-batch; in each, the dearest to the cheapest rank."""
    by_cost = sorted(packs, key=lambda pack: -_total(pack, costs))
    plan: list[list[Pack]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for first in range(0, len(by_cost), dp_size):
        ranks = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for rank, pack in zip(ranks, by_cost[first : first + dp_size], strict=True):
            plan[rank].append(pack)
            loads[rank] += _total(pack, costs)
    return plan


def _in_order(plan: list[list[Pack]], costs: Sequence[int]) -> list[list[Pack]]:
    """Samples ascending, dearest micro-batch first: ranks run similar ones at the same time."""
    return [
        sorted((sorted(pack) for pack in rank), key=lambda pack: (-_total(pack, costs), pack))
        for rank in plan
    ]


def _total(pack: Sequence[int], values: Sequence[int]) -> int:
    return sum(values[position] for position in pack)


def _check_arguments(
    lengths: Sequence[int],
    costs: Sequence[int],
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
    if len(costs) != len(lengths):
        raise ValueError(
            f"costs must be one a sample: len(costs)={len(costs)}, len(lengths)={len(lengths)}"
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
