import re
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import packing as benchmark
from megatron.rl.packing import Balance, Pack, balance_of, plan_micro_batches, steps_of


def costs_of(lengths: list[int], even_length: int = 20) -> list[int]:
    return [length * (even_length + length) for length in lengths]


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


def test_ranks_that_only_just_hold_their_samples_are_found() -> None:
    """3 + 3 + 2 and 4 + 4 fill 8 each; the cheapest rank first would need 4 + 3 + 2 = 9."""
    plan = plan_micro_batches([4, 2, 3, 3, 4], dp_size=2, max_tokens=8)
    assert plan == [[[0, 4]], [[1, 2, 3]]]


def test_a_rank_that_is_too_full_for_one_sample_takes_a_smaller_one() -> None:
    """{6} and {4, 4}: 3 does not fit beside the latter, so {6, 3}; then 2 to the cheaper rank."""
    lengths = [4, 4, 6, 2, 3]
    squares = [length * length for length in lengths]
    plan = plan_micro_batches(lengths, dp_size=2, costs=squares, max_tokens=10)
    assert plan == [[[2, 4]], [[0, 1, 3]]]


def test_the_more_even_of_two_plans_is_taken() -> None:
    """The cheapest rank first gives 81 + 49 + 16 = 146 to one, dealing best fit's packs 81 + 64."""
    lengths = [9, 4, 8, 7, 8]
    squares = [length * length for length in lengths]
    plan = plan_micro_batches(lengths, dp_size=2, costs=squares, max_tokens=11)
    assert plan == [[[0], [4]], [[1, 3], [2]]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp_size=st.integers(1, 50),
    multiple_of=st.integers(1, 3),
    max_tokens=st.integers(60, 200),
    even_length=st.integers(0, 1000),
)
def test_a_plan_by_tokens_keeps_its_promises(
    lengths: list[int], dp_size: int, multiple_of: int, max_tokens: int, even_length: int
) -> None:
    """More samples than ranks and fewer, none at all, attention dear and cheap."""
    arguments = {
        "dp_size": dp_size,
        "costs": costs_of(lengths, even_length),
        "max_tokens": max_tokens,
        "multiple_of": multiple_of,
    }
    plan = plan_micro_batches(lengths, **arguments)
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
    assert plan == plan_micro_batches(np.array(lengths, dtype=np.int64), **arguments)


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


def test_dearest_micro_batches_come_first_on_every_rank() -> None:
    lengths = benchmark.long_tailed(500, seed=1)
    costs = costs_of(lengths, benchmark.EVEN_LENGTH)
    for rank in plan_micro_batches(lengths, dp_size=4, costs=costs, max_tokens=32_768):
        by_pack = [sum(costs[position] for position in pack) for pack in rank]
        assert by_pack == sorted(by_pack, reverse=True)
        assert len(by_pack) > 2


def test_ranks_are_as_even_as_the_best_deal_by_cost() -> None:
    """Every choice of six lengths whose attention costs more than the rest of the model."""
    for lengths in combinations_with_replacement([1, 2, 3, 5, 8], 6):
        costs = costs_of(lengths, 4)
        plan = plan_micro_batches(lengths, dp_size=2, costs=costs, max_tokens=100)
        ours = max(sum(tokens_of(pack, costs) for pack in rank) for rank in plan)
        splits = (sum(x for i, x in enumerate(costs) if m >> i & 1) for m in range(64))
        assert 6 * ours <= 7 * min(max(part, sum(costs) - part) for part in splits)


def test_cost_is_evened_out_and_not_tokens() -> None:
    """One sample of 6 costs as much as nine of 1 here: 6 * (3 + 6) = 54, 1 * (3 + 1) = 4."""
    lengths = [6, *[1] * 13]
    plan = plan_micro_batches(lengths, dp_size=2, costs=costs_of(lengths, 3), max_tokens=20)
    assert [len(rank[0]) for rank in plan] == [1, 13]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_tokens", [16_384, 32_768])
@pytest.mark.parametrize("num_samples", [40, 512, 1024, 2048, 8192])
def test_sixty_four_ranks_are_never_less_even_than_first_fit(
    num_samples: int, max_tokens: int, seed: int
) -> None:
    simple, ours = benchmark.compare(num_samples, 64, max_tokens, seed)
    assert ours.micro_batches <= simple.micro_batches
    assert ours.fill >= simple.fill
    assert ours.rank_imbalance <= simple.rank_imbalance


@pytest.mark.parametrize("num_samples", [2048, 100_000])
def test_sixty_four_ranks_are_even(num_samples: int) -> None:
    """Nothing but the longest sample alone can keep a rank above the mean."""
    lengths = benchmark.long_tailed(num_samples, seed=0)
    costs = costs_of(lengths, benchmark.EVEN_LENGTH)
    plan = plan_micro_batches(lengths, dp_size=64, costs=costs, max_tokens=16_384)
    balance = balance_of(plan, lengths, costs, 16_384)
    assert balance.rank_imbalance < 1.01
    fewest = -(-sum(lengths) // (64 * 16_384))
    assert fewest <= balance.micro_batches <= fewest + 1


def test_balance_by_hand() -> None:
    """Ranks cost 10 and 20 of a mean of 15; 9 tokens in four micro-batches of 5."""
    plan = [[[0, 2], []], [[1], [3]]]
    lengths, costs = [1, 3, 2, 3], [4, 10, 6, 10]
    expected = Balance(micro_batches=2, rank_imbalance=20 / 15, fill=9 / 20)
    assert balance_of(plan, lengths, costs, max_tokens=5) == expected
    assert balance_of(plan, lengths, costs) == Balance(2, 20 / 15, None)
    assert balance_of([[[]], [[]]], [], [], max_tokens=5) == Balance(1, 1.0, 0.0)


def test_the_benchmark_prints_both_rules_and_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--dp-size=4 --seeds=1 --samples 64 --budgets 16384 --timed-samples=64"
    benchmark.main(flags.split())
    lines = capsys.readouterr().out.splitlines()
    simple, ours = benchmark.compare(64, 4, 16_384, seed=0)
    assert lines[-2].split()[:2] == ["64", "16,384"]
    assert lines[-2].split()[4] == f"{simple.rank_imbalance:.4f}"
    assert lines[-2].split()[7] == f"{ours.rank_imbalance:.4f}"
    assert lines[-1].startswith("64 samples, budget 16,384: ")


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
        (
            {"dp_size": 1, "max_tokens": 9, "costs": [3, 9]},
            "costs must be one a sample: len(costs)=2, len(lengths)=4",
        ),
        ({"dp_size": 1}, "one of max_tokens and micro_batch_size must be given"),
        (
            {"dp_size": 1, "max_tokens": 9, "micro_batch_size": 1},
            "one of max_tokens and micro_batch_size must be given: max_tokens=9, "
            "micro_batch_size=1",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_micro_batches([3, 9, 5, 6], **arguments)


def test_only_the_first_long_samples_are_named() -> None:
    with pytest.raises(ValueError, match=r"position 9 \(7\) and 90 more$"):
        plan_micro_batches([7] * 100, dp_size=1, max_tokens=5)
