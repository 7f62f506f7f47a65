import re
import time
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.rl.packing import Pack, plan_micro_batches, steps_of


def tokens_of(pack: Pack, lengths: list[int]) -> int:
    return sum(lengths[position] for position in pack)


def test_a_rollout_is_cut_into_steps_and_the_remainder_is_trained() -> None:
    steps = steps_of(5, 2)
    assert steps == [[0, 1], [2, 3], [4]]
    assert [len(step) for step in steps] == [2, 2, 1]
    assert steps_of(4, 2) == [[0, 1], [2, 3]]
    assert steps_of(3, 8) == [[0, 1, 2]]
    with pytest.raises(ValueError, match="global_batch_size must be positive: global_batch_size=0"):
        steps_of(5, 0)


def test_every_rank_has_as_many_micro_batches_as_the_neediest() -> None:
    """Four full packs in rounds of three: both ranks run three, some of them empty."""
    plan = plan_micro_batches([8, 8, 8, 8], dp_size=2, max_tokens=8, multiple_of=3)
    assert plan == [[[0], [2], []], [[1], [3], []]]
    plan = plan_micro_batches([8, 8, 8, 8, 8], dp_size=2, max_tokens=8)
    assert [len(rank) for rank in plan] == [3, 3]
    assert sorted(pack for rank in plan for pack in rank) == [[], [0], [1], [2], [3], [4]]


def test_a_plan_worked_by_hand() -> None:
    """Longest first into the emptiest of two packs a rank: {9, 2}, {7, 4}, {6, 5} and {6, 5}."""
    lengths = [5, 9, 6, 2, 7, 5, 4, 6]
    plan = plan_micro_batches(lengths, dp_size=2, max_tokens=12)
    assert [[tokens_of(pack, lengths) for pack in rank] for rank in plan] == [[11, 11], [11, 11]]
    assert plan == plan_micro_batches(np.array(lengths), dp_size=2, max_tokens=12)


def test_by_count_packs_hold_that_many_and_balance_tokens() -> None:
    lengths = [100, 1, 50, 51, 99, 2, 1]
    plan = plan_micro_batches(lengths, dp_size=2, micro_batch_size=2)
    assert [len(rank) for rank in plan] == [2, 2]
    assert max(len(pack) for rank in plan for pack in rank) == 2
    totals = [sum(tokens_of(pack, lengths) for pack in rank) for rank in plan]
    assert totals == [152, 152]  # {100}, {51, 1} and {99, 1}, {50, 2}
    one_each = plan_micro_batches([3, 2, 1], dp_size=2, micro_batch_size=1)
    assert one_each == [[[0], []], [[1], [2]]]


def test_packs_that_only_just_fit_are_found() -> None:
    """8 + 4 and 7 + 3 + 2 fill 12 each; the emptiest pack first would need 8 + 3 + 2 = 13."""
    plan = plan_micro_batches([8, 7, 4, 3, 2], dp_size=1, max_tokens=12)
    assert plan == [[[0, 2], [1, 3, 4]]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp_size=st.integers(1, 5),
    multiple_of=st.integers(1, 3),
    max_tokens=st.integers(60, 200),
)
def test_a_plan_by_tokens_keeps_its_promises(
    lengths: list[int], dp_size: int, multiple_of: int, max_tokens: int
) -> None:
    plan = plan_micro_batches(
        lengths, dp_size=dp_size, max_tokens=max_tokens, multiple_of=multiple_of
    )
    packs = [pack for rank in plan for pack in rank]
    assert sorted(position for pack in packs for position in pack) == list(range(len(lengths)))
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    assert len(plan[0]) >= 1
    assert max(tokens_of(pack, lengths) for pack in packs) <= max_tokens
    assert all(pack == sorted(pack) for pack in packs)
    # No two packs of a best fit fit together, so all but one are half full on average.
    enough = 2 * sum(lengths) // max_tokens + 1
    assert len(packs) < enough + dp_size * multiple_of


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp_size=st.integers(1, 5),
    micro_batch_size=st.integers(1, 4),
)
def test_a_plan_by_count_keeps_its_promises(
    lengths: list[int], dp_size: int, micro_batch_size: int
) -> None:
    plan = plan_micro_batches(lengths, dp_size=dp_size, micro_batch_size=micro_batch_size)
    packs = [pack for rank in plan for pack in rank]
    assert sorted(position for pack in packs for position in pack) == list(range(len(lengths)))
    assert max(len(pack) for pack in packs) <= micro_batch_size
    num_micro_batches = max(1, -(-len(lengths) // (micro_batch_size * dp_size)))
    assert [len(rank) for rank in plan] == [num_micro_batches] * dp_size


def test_ranks_are_as_even_as_the_best_deal_of_few_samples() -> None:
    """Every choice of six lengths; LPT on two ranks is within 7/6 of the optimum."""
    for lengths in combinations_with_replacement([1, 2, 3, 5, 8], 6):
        plan = plan_micro_batches(lengths, dp_size=2, max_tokens=100)
        ours = max(sum(tokens_of(pack, lengths) for pack in rank) for rank in plan)
        splits = (sum(x for i, x in enumerate(lengths) if m >> i & 1) for m in range(64))
        best = min(max(part, sum(lengths) - part) for part in splits)
        assert 6 * ours <= 7 * best


def test_a_hundred_thousand_samples_are_packed_at_once_and_evenly() -> None:
    draws = np.random.default_rng(0).lognormal(6.5, 1.0, 100_000)
    lengths = np.minimum(draws.astype(int) + 20, 8192).tolist()
    start = time.process_time()
    plan = plan_micro_batches(lengths, dp_size=64, max_tokens=16384)
    assert time.process_time() - start < 2
    totals = [sum(tokens_of(pack, lengths) for pack in rank) for rank in plan]
    assert max(totals) < 1.01 * np.mean(totals)
    assert sum(lengths) > 0.99 * 64 * len(plan[0]) * 16384
    slots = [[tokens_of(rank[i], lengths) for rank in plan] for i in range(len(plan[0]))]
    assert np.mean([max(slot) / np.mean(slot) for slot in slots]) < 1.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dp_size": 1, "max_tokens": 5},
            "max_tokens must hold every sample: max_tokens=5, too long: position 1 (9), "
            "position 3 (6)",
        ),
        ({"dp_size": 0, "max_tokens": 9}, "dp_size must be positive: dp_size=0"),
        ({"dp_size": 1, "max_tokens": 0}, "max_tokens must be positive: max_tokens=0"),
        ({"dp_size": 1, "max_tokens": 9, "multiple_of": 0}, "multiple_of must be positive"),
        ({"dp_size": 1}, "one of max_tokens and micro_batch_size must be given"),
        (
            {"dp_size": 1, "max_tokens": 9, "micro_batch_size": 1},
            "one of max_tokens and micro_batch_size must be given: max_tokens=9, "
            "micro_batch_size=1",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_micro_batches([3, 9, 5, 6], **arguments)


def test_only_the_first_long_samples_are_named() -> None:
    with pytest.raises(ValueError, match=r"position 9 \(7\) and 90 more$"):
        plan_micro_batches([7] * 100, dp_size=1, max_tokens=5)
