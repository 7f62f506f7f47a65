"""The packs most likely to make ranks differ, on real ranks: none hangs, and all equal one rank."""

from collections.abc import Sequence
from itertools import cycle, islice, product

import pytest

from tests.slime_loss.objective_variants import VARIANTS
from tests.slime_loss.packs import LAYOUTS, Case, Sample, all_train, none_trains
from tests.slime_loss.places import Topology, real_place
from tests.slime_loss.sharded_runs import (
    Outcome,
    check_equals_unsharded,
    check_sharded,
    run_rank,
    run_unsharded,
)
from tests.spawn import World

WORST: dict[str, tuple[Sample, ...]] = {
    "a sample wholly on the first rank": (all_train(3, 3), none_trains(6, 20)),
    "both samples train, one wholly on the first rank": (all_train(3, 3), all_train(6, 20)),
    "the last rank alone trains": (none_trains(20, 6), all_train(3, 3)),
    "one trained token": (all_train(1, 1),),
    "responses of one token": (all_train(1, 1), all_train(2, 1), all_train(5, 1), all_train(1, 1)),
    "everything masked": (none_trains(2, 3), none_trains(4, 1)),
    "fewer tokens than ranks": (all_train(1, 2),),
    "the last token alone trains": (Sample(9, (False,) * 6 + (True,)),),
    "the first token alone trains": (Sample(1, (True,) + (False,) * 12),),
    "every second token trains": (Sample(1, (True, False) * 6), Sample(2, (False, True) * 3)),
    "a long sample and a short one": (all_train(2, 40), all_train(1, 1)),
}
MULTIPLES = (1, 5)
"""Padded to 5 times the tensor-parallel size, a short pack lies wholly on the first rank."""

CASES_PER_CALL = 20
CASES = list(product(WORST.values(), LAYOUTS, MULTIPLES))
TWO = [Topology(cp_size=2), Topology(tp_size=2), Topology(tp_size=2, sequence_parallel=True)]
FOUR = [Topology(cp_size=4), Topology(cp_size=2, tp_size=2, sequence_parallel=True)]


def worst_cases(topology: Topology, runs_per_variant: int) -> list[Case]:
    """Every variant on that many packs, one after the other, so that every pack is run."""
    packs = islice(cycle(CASES), runs_per_variant * len(VARIANTS))
    return [
        Case(variant, samples, topology, layout, multiple=multiple, chunk_rows=2)
        for variant, (samples, layout, multiple) in zip(cycle(VARIANTS), packs, strict=False)
    ]


def run_on_real_ranks(rank: int, topology: Topology, cases: Sequence[Case]) -> list[Outcome]:
    place = real_place(topology, rank)
    return [run_rank(case, place) for case in cases]


def check_on_real_ranks(world: World, topology: Topology, cases: Sequence[Case]) -> None:
    """In calls so short that a slow machine does not take one for a hang."""
    for start in range(0, len(cases), CASES_PER_CALL):
        some = cases[start : start + CASES_PER_CALL]
        ranks = world.run(run_on_real_ranks, topology, some)
        for case, *outcomes in zip(some, *ranks, strict=True):
            check_equals_unsharded(case, outcomes, run_unsharded(case))


@pytest.mark.parametrize("topology", TWO, ids=str)
def test_two_real_ranks_equal_one(two_ranks: World, topology: Topology) -> None:
    check_on_real_ranks(two_ranks, topology, worst_cases(topology, 2))


@pytest.mark.parametrize("topology", FOUR, ids=str)
def test_four_real_ranks_equal_one(four_ranks: World, topology: Topology) -> None:
    check_on_real_ranks(four_ranks, topology, worst_cases(topology, 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", [*TWO, *FOUR], ids=str)
def test_every_objective_on_a_quarter_of_the_worst_packs(topology: Topology) -> None:
    cases = worst_cases(topology, 11)
    with World(topology.num_ranks) as world:
        check_on_real_ranks(world, topology, cases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entropy", ["ppo", "entropy"])
def test_a_sample_wholly_on_one_rank(two_ranks: World, entropy: str, layout: str) -> None:
    samples = WORST["a sample wholly on the first rank"]
    topology = Topology(cp_size=2)
    case = Case(entropy, samples, topology, layout)
    assert case.lengths == (6, 26)
    check_on_real_ranks(two_ranks, topology, [case])


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_tokens_on_eight_ranks(variant: str) -> None:
    for layout in LAYOUTS:
        check_sharded(Case(variant, (all_train(1, 1),), Topology(cp_size=8), layout))
