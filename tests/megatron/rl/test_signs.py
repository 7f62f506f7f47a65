"""What the signs of all ranks say about who holds up the job."""

from dataclasses import replace

from megatron.rl.signs import Sign, Survey, brief, clock, listed

NOON = 1_800_000_000.0
TRAINING = Sign(12, "training", "[4, 5]", number=40, since=NOON, beat=7, told=NOON + 3)
READING = Sign(12, "reading rollouts", number=38, since=NOON, frame="read (files.py:71)")


def test_a_sign_comes_back_from_the_store_as_it_was() -> None:
    sign = replace(TRAINING, frame='at "x"', ended="OSError: é")
    assert Sign.decode(sign.encode().encode()) == sign


def test_a_sign_says_step_phase_samples_and_line() -> None:
    assert TRAINING.place == "step 12, training (samples [4, 5])"
    assert Sign(phase="loading").place == "start-up, loading"
    since = f"since {clock(NOON)}"
    assert READING.describe() == f"step 12, reading rollouts {since}, at read (files.py:71)"
    assert replace(TRAINING, micro_batches=3).describe() == (
        f"step 12, training (samples [4, 5]) {since}, micro-batch 3"
    )


def test_a_silent_rank_is_named_with_its_last_sign() -> None:
    found = Survey({0: TRAINING, 1: TRAINING, 2: READING}, frozenset({1})).lost()
    assert found == {
        1: f"rank 1 gives no sign of life since {clock(NOON + 3)} (killed, stopped, or its machine "
        f"is gone); it was in step 12, training (samples [4, 5]) since {clock(NOON)}"
    }


def test_a_rank_that_is_not_there_and_one_that_ended_are_named() -> None:
    ended = replace(TRAINING, ended="KeyError: 'x'")
    assert Survey({0: TRAINING, 1: None, 2: ended}, frozenset({1, 2})).lost() == {
        1: "rank 1 has not started, or cannot reach the job's store",
        2: "rank 2 ended in step 12, training (samples [4, 5]): KeyError: 'x'",
    }


def test_a_rank_that_lives_is_behind_one_that_is_further() -> None:
    survey = Survey({0: TRAINING, 1: READING, 2: TRAINING}, frozenset())
    assert survey.lost() == {}
    text = f"rank 1 is behind, still in {READING.describe()}"
    assert survey.behind(0) == survey.behind(2) == {1: text}
    assert survey.behind(1) == {}


def test_micro_batches_of_one_phase_count() -> None:
    slow, fast = replace(TRAINING, micro_batches=1), replace(TRAINING, micro_batches=4)
    survey = Survey({0: fast, 1: slow}, frozenset())
    assert survey.behind(0).keys() == {1}
    assert survey.elsewhere(1) == {}


def test_a_rank_in_another_phase_is_elsewhere() -> None:
    saving = replace(TRAINING, phase="saving")
    survey = Survey({0: TRAINING, 1: saving, 2: TRAINING}, frozenset())
    assert survey.behind(0) == {}
    assert survey.elsewhere(0) == {1: f"rank 1 is elsewhere, in {saving.describe()}"}
    assert Survey({0: READING, 1: TRAINING}, frozenset()).elsewhere(0).keys() == {1}


def test_many_ranks_and_samples_are_counted() -> None:
    assert listed({4: "a", 2: "b"}) == "a; b"
    assert listed({i: str(i) for i in range(11)}) == "0; 1; 2; 3; 4; 5; 6; 7; and 3 more ranks"
    assert brief([3, 1]) == "[3, 1]"
    assert brief(range(64)) == "[0, 1, 2, 3, 4, 5, 6, 7, ... 64 in all]"
