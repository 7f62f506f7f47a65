import pickle

import numpy as np
import pytest

from megatron.rl.samples import BadRowsError, RowError, RowRules, Sample


def test_a_sample_knows_its_lengths() -> None:
    sample = Sample(
        index=3,
        group_index=1,
        rollout_index=2,
        tokens=np.arange(7),
        response_length=4,
        loss_mask=np.array([True, False, True, True]),
        reward=0.5,
        status="completed",
        origin="rows.jsonl:4",
    )
    assert (sample.total_length, sample.prompt_length, sample.num_trained_tokens) == (7, 3, 3)
    assert isinstance(sample.num_trained_tokens, int)


def test_an_error_says_where_what_and_what_to_do() -> None:
    error = RowError("a.jsonl", 7, "tokens[1]", "must be less than 50", "77", "use the tokenizer")
    assert str(error) == (
        "a.jsonl:7: tokens[1] must be less than 50: tokens[1]=77; fix: use the tokenizer"
    )
    whole = RowError("a.jsonl", 0, "file", "must hold rows", "empty")
    assert str(whole) == "a.jsonl: file must hold rows: file=empty"


def test_the_first_twenty_errors_are_shown_and_all_are_counted() -> None:
    errors = [RowError("a.jsonl", line, "reward", "must be given", "None") for line in range(1, 31)]
    lines = str(BadRowsError(errors)).splitlines()
    assert lines[0] == "rollout data has 30 error(s):"
    assert lines[1:21] == [f"  {error}" for error in errors[:20]]
    assert lines[21:] == ["  ... and 10 more"]
    assert str(BadRowsError(errors, 500)).endswith("... and 480 more")
    assert str(BadRowsError(errors[:1])).count("\n") == 1


def test_an_error_travels_to_other_ranks() -> None:
    error = BadRowsError([RowError("a.jsonl", 7, "reward", "must be given", "None", "give it")], 9)
    received = pickle.loads(pickle.dumps(error))
    assert isinstance(received, BadRowsError)
    assert (str(received), received.errors, received.num_errors) == (str(error), error.errors, 9)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be positive: vocab_size=0"),
        ({"max_length": 1}, "max_length must be at least 2: max_length=1"),
    ],
)
def test_rules_that_no_row_can_meet_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowRules(**limits)
