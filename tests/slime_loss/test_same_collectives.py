"""No rank may skip a collective: random packs on simulated ranks, which must also equal one."""

import pytest

from tests.slime_loss.many_packs import COMBINATIONS, TOPOLOGIES, check_packs, main, random_cases
from tests.slime_loss.objective_variants import VARIANTS, alternatives, missing_values, value_of
from tests.slime_loss.packs import LAYOUTS
from tests.slime_loss.references import without_type_checker

HARD = [
    "a rank with only padding",
    "a rank without a trained row beside one with",
    "everything masked",
    "a response of one token",
    "a sample shorter than 2 * cp_size",
]


def check_all_alike(num_packs: int) -> None:
    # Half of the time would go into types, which other tests check.
    with without_type_checker():
        counts, differences = check_packs(random_cases(num_packs, seed=1))
    assert differences == []
    assert counts["packs"] == num_packs
    assert counts["rank runs"] > 4 * num_packs
    # One rank alone calls none.
    assert counts["collectives"] > 3 * counts["rank runs"]
    for name in HARD:
        assert counts[name] > num_packs // 40, name
    for names in (
        [f"objective {name}" for name in VARIANTS],
        [f"layout {name}" for name in LAYOUTS],
        [str(topology) for topology in TOPOLOGIES],
    ):
        assert all(counts[name] > 0 for name in names)


def test_every_alternative_of_the_config_is_run() -> None:
    assert missing_values(VARIANTS.values()) == set()


@pytest.mark.parametrize(("name", "value"), list(alternatives()))
def test_an_alternative_that_nothing_runs_is_noticed(name: str, value: str) -> None:
    others = [one for one in VARIANTS.values() if value_of(one.config, name) != value]
    assert (name, value) in missing_values(others)


def test_random_packs_call_the_same_and_equal_one_rank() -> None:
    check_all_alike(120)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_packs_call_the_same_and_equal_one_rank() -> None:
    check_all_alike(10_000)


def test_combinations_come_up_equally_often() -> None:
    cases = list(random_cases(2 * len(COMBINATIONS) + 1, seed=3))
    drawn = [(case.variant, case.layout, case.topology) for case in cases]
    assert sorted({drawn.count(one) for one in drawn[::97]}) == [2]
    assert len(set(drawn)) == len(COMBINATIONS)


def test_the_program_prints_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--packs", "3", "--seed", "5"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("3 packs (0.0 of each of ")
    assert last.endswith(" collectives recorded, 0 differences")
