"""Samples that are too long: named and refused, or cut at the end of the response and counted."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import check_rollouts

MakeRow = Callable[..., dict[str, Any]]
Write = Callable[..., str]

REFUSE = RowRules(vocab_size=50, max_length=7, need_values=True)
CUT = replace(REFUSE, truncate=True)
LONG = {
    "tokens": [1, 5, 7, 11, 13, 17, 19, 23, 29],
    "response_length": 6,
    "loss_mask": [1, 0, 1, 1, 0, 1],
    "rollout_log_probs": [-0.5, -1.0, -1.5, -2.0, -2.5, -3.0],
    "ref_log_probs": [-0.25, -0.5, -0.75, -1.0, -1.25, -1.5],
    "values": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "rollout_top_p_token_ids": [11, 12, 13, 17, 18, 19, 23, 29],
    "rollout_top_p_token_offsets": [0, 2, 2, 3, 5, 7, 8],
}
"""Three prompt and six response ids, two more than fit."""


def long_row(make_row: MakeRow, index: int = 1, **changes: Any) -> dict[str, Any]:
    return make_row(index, **(LONG | changes))


def short_row(make_row: MakeRow, index: int = 0) -> dict[str, Any]:
    return make_row(index, values=[1.0, 2.0])


def test_a_long_sample_loses_the_end_of_every_stream(make_row: MakeRow, write: Write) -> None:
    files = check_rollouts([write([short_row(make_row), long_row(make_row)])], CUT)
    whole, cut = files.read([0, 1])
    assert (whole.num_cut_tokens, whole.status, whole.total_length) == (0, "completed", 5)
    assert (cut.num_cut_tokens, cut.status) == (2, "truncated")
    assert (cut.total_length, cut.prompt_length, cut.response_length) == (7, 3, 4)
    assert cut.tokens.tolist() == [1, 5, 7, 11, 13, 17, 19]
    assert cut.loss_mask.tolist() == [True, False, True, True]
    assert cut.rollout_log_probs.tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert cut.ref_log_probs.tolist() == [-0.25, -0.5, -0.75, -1.0]
    assert cut.values.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert cut.kept_offsets.tolist() == [0, 2, 2, 3, 5]
    assert cut.kept_ids.tolist() == [11, 12, 13, 17, 18]
    assert (cut.reward, cut.index, cut.group_index) == (1.0, 1, 0)


def test_every_stream_of_a_cut_sample_has_its_length(make_row: MakeRow, write: Write) -> None:
    """A stream that is added to rows and not cut fails here."""
    [cut] = check_rollouts([write([long_row(make_row)])], CUT).read([0])
    arrays = {name: getattr(cut, name) for name in cut.__slots__}
    lengths = {name: len(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
    assert lengths.pop("tokens") == 7
    assert lengths.pop("kept_offsets") == 5
    assert lengths.pop("kept_ids") == 5
    assert set(lengths) >= {"loss_mask", "rollout_log_probs", "ref_log_probs", "values"}
    assert set(lengths.values()) == {4}


def test_the_index_knows_what_was_cut(make_row: MakeRow, write: Write) -> None:
    path = write([short_row(make_row), long_row(make_row), long_row(make_row, 2, values=[0.0] * 6)])
    files = check_rollouts([path], CUT)
    assert files.rows["total_length"].tolist() == [5, 7, 7]
    assert files.rows["response_length"].tolist() == [2, 4, 4]
    assert files.rows["num_trained_tokens"].tolist() == [1, 3, 3]
    assert files.rows["num_cut_tokens"].tolist() == [0, 2, 2]
    summary = files.summary
    assert (summary.num_cut_samples, summary.num_cut_tokens) == (2, 4)
    assert summary.statuses == {"completed": 1, "truncated": 2}
    assert "cut samples       2 (4 tokens cut off)" in str(summary)
    whole = check_rollouts([path], replace(CUT, max_length=9))
    assert whole.summary.num_cut_samples == 0
    assert whole.fingerprint != files.fingerprint


def test_prompt_and_response_ids_are_cut_alike(make_row: MakeRow, write: Write) -> None:
    changes = {"tokens": None, "prompt_ids": LONG["tokens"][:3], "response_ids": LONG["tokens"][3:]}
    [cut] = check_rollouts([write([long_row(make_row, **changes)])], CUT).read([0])
    assert cut.tokens.tolist() == LONG["tokens"][:7]
    assert (cut.response_length, cut.num_cut_tokens) == (4, 2)


def test_one_response_token_is_left_at_least(make_row: MakeRow, write: Write) -> None:
    [cut] = check_rollouts([write([long_row(make_row)])], replace(CUT, max_length=4)).read([0])
    assert (cut.tokens.tolist(), cut.response_length) == ([1, 5, 7, 11], 1)
    path = write([short_row(make_row), long_row(make_row)])
    message = f"{path}:2: tokens must leave room for a response token within 3 ids: tokens=a prompt"
    with pytest.raises(BadRowsError, match=re.escape(message)):
        check_rollouts([path], replace(CUT, max_length=3))


def test_without_the_flag_the_error_names_it(make_row: MakeRow, write: Write) -> None:
    path = write([short_row(make_row), long_row(make_row)])
    message = f"{path}:2: tokens must be at most 7 ids long: tokens=9; fix: add --truncate-samples"
    with pytest.raises(BadRowsError, match=re.escape(message)):
        check_rollouts([path], REFUSE)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": [*LONG["tokens"][:8], 50]}, "tokens[8]"),
        ({"values": [1.0] * 4}, "values"),
        ({"rollout_top_p_token_offsets": [0, 2, 2, 3, 5, 7, 7]}, "rollout_top_p_token_offsets"),
    ],
)
def test_a_cut_hides_no_broken_rule(
    changes: dict[str, Any], field: str, make_row: MakeRow, write: Write
) -> None:
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([write([long_row(make_row, **changes)])], CUT)
    assert [error.field for error in caught.value.errors] == [field]
