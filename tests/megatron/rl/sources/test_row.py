import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import check_rollouts
from megatron.rl.sources.row import BrokenRuleError, row_from_json

MakeRow = Callable[..., dict[str, Any]]
Write = Callable[..., str]

RULES = RowRules(vocab_size=50000, need_reward=True, need_group=True, max_length=8)

BAD_ROWS = {
    # name: (changes to a good row, field, rule, value)
    "token beyond the vocabulary": (
        {"tokens": [1, 70000], "response_length": 1, "loss_mask": [1], "rollout_log_probs": [-1]},
        ("tokens[1]", "must be less than vocab_size=50000", "70000"),
    ),
    "negative token": ({"tokens": [1, -2, 3, 4, 5]}, ("tokens[1]", "must be int >= 0", "-2")),
    "token is a float": ({"tokens": [1, 2, 2.5]}, ("tokens[2]", "must be int, got float", "2.5")),
    "token is text": ({"tokens": [1, "2", 3]}, ("tokens[1]", "must be int, got str", "2")),
    "token is true": ({"tokens": [True, 2, 3]}, ("tokens[0]", "must be int, got bool", "True")),
    "no tokens": (
        {"tokens": None},
        ("tokens", "must be given (or prompt_ids and response_ids)", "None"),
    ),
    "tokens twice": (
        {"prompt_ids": [1], "response_ids": [2]},
        ("tokens", "must not be given beside prompt_ids and response_ids", "[1, 5, 7, 11, 13]"),
    ),
    "half of the ids": (
        {"tokens": None, "response_ids": [2]},
        ("prompt_ids", "must be given beside the other half", "None"),
    ),
    "response_length against response_ids": (
        {"tokens": None, "prompt_ids": [1], "response_ids": [2, 3, 4]},
        ("response_length", "must be the number of response_ids, 3", "2"),
    ),
    "too long": (
        {"tokens": list(range(9))},
        ("tokens", "must be at most 8 ids long", "9"),
    ),
    "a prompt that fills the limit": (
        {"tokens": list(range(10))},
        ("tokens", "must leave room for a response token within 8 ids", "a prompt of 8"),
    ),
    "empty response": (
        {"response_length": 0},
        ("response_length", "must be at least 1 and less than the number of tokens, 5", "0"),
    ),
    "empty prompt": (
        {"response_length": 5},
        ("response_length", "must be at least 1 and less than the number of tokens, 5", "5"),
    ),
    "no response_length": (
        {"response_length": None},
        ("response_length", "must be given beside tokens", "None"),
    ),
    "mask too short": (
        {"loss_mask": [1]},
        ("loss_mask", "must have one item per response token, response_length=2", "1 items"),
    ),
    "mask of weights": ({"loss_mask": [1, 2]}, ("loss_mask[1]", "must be int <= 1", "2")),
    "log-probs too long": (
        {"rollout_log_probs": [-1, -1, -1]},
        (
            "rollout_log_probs",
            "must have one item per response token, response_length=2",
            "3 items",
        ),
    ),
    "log-probs empty": (
        {"rollout_log_probs": []},
        (
            "rollout_log_probs",
            "must have one item per response token, response_length=2",
            "0 items",
        ),
    ),
    "log-prob is a probability": (
        {"rollout_log_probs": [-0.1, 0.9]},
        ("rollout_log_probs[1]", "must be float <= 0.0001", "0.9"),
    ),
    "log-prob is NaN": (
        {"rollout_log_probs": [float("nan"), -1]},
        ("rollout_log_probs[0]", "must be finite", "nan"),
    ),
    "reference log-prob is -Infinity": (
        {"ref_log_probs": [-1, float("-inf")]},
        ("ref_log_probs[1]", "must be finite", "-inf"),
    ),
    "values too short": (
        {"values": [0.5]},
        ("values", "must have one item per response token, response_length=2", "1 items"),
    ),
    "value is infinite": (
        {"values": [0.5, float("inf")]},
        ("values[1]", "must be finite", "inf"),
    ),
    "value is text": ({"values": ["0", 1]}, ("values[0]", "must be float, got str", "0")),
    "rollout of text": ({"rollout_index": "a"}, ("rollout_index", "must be int, got str", "a")),
    "no reward": ({"reward": None}, ("reward", "must be given", "None")),
    "reward is infinite": ({"reward": float("inf")}, ("reward", "must be finite", "inf")),
    "reward is text": (
        {"reward": "1.0"},
        ("reward", "must be bool | float | object, got str", "1.0"),
    ),
    "reward is a dict": (
        {"reward": {"score": 1, "length": 2}},
        ("reward", "must be a number", "{'score': 1, 'length': 2}"),
    ),
    "no group": (
        {"group_index": None},
        ("group_index", "must be given: this run takes a prompt's samples together", "None"),
    ),
    "index beyond 64 bits": (
        {"index": 2**64},
        ("index", "must be int <= 9223372036854775807", "18446744073709551616"),
    ),
    "unknown status": (
        {"status": "done"},
        ("status", "must be one of completed, truncated, aborted, failed, pending", "done"),
    ),
    "kept ids without offsets": (
        {"rollout_top_p_token_ids": [1, 2]},
        ("rollout_top_p_token_offsets", "must be given beside rollout_top_p_token_ids", "None"),
    ),
    "offsets of another length": (
        {"rollout_top_p_token_ids": [1, 2], "rollout_top_p_token_offsets": [0, 2]},
        (
            "rollout_top_p_token_offsets",
            "must have one item more than response tokens, 3",
            "2 items",
        ),
    ),
    "offsets that fall": (
        {"rollout_top_p_token_ids": [1, 2], "rollout_top_p_token_offsets": [0, 3, 2]},
        ("rollout_top_p_token_offsets", "must rise from 0 to the number of ids, 2", "[0, 3, 2]"),
    ),
    "kept id beyond the vocabulary": (
        {"rollout_top_p_token_ids": [1, 50000], "rollout_top_p_token_offsets": [0, 1, 2]},
        ("rollout_top_p_token_ids", "must be less than vocab_size=50000", "50000"),
    ),
    "remove_sample is a number": (
        {"remove_sample": 1},
        ("remove_sample", "must be bool, got int", "1"),
    ),
    "lone surrogate": (
        {"prompt": "\ud800"},
        ("prompt", "must be Unicode without lone surrogates", "\\ud800"),
    ),
}

BAD_LINES = {
    # name: (line, field, rule's beginning, value)
    "cut off": (b'{"tokens": [1, 2', "line", "must be one whole JSON object", '{"tokens": [1, 2'),
    "an array": (b"[1, 2]", "line", "must be object, got array", "[1, 2]"),
    "text": (b'"row"', "line", "must be object, got str", "row"),
    "two objects": (b"{} {}", "line", "must be one whole JSON object", "{} {}"),
    "not JSON": (b"index: 1", "line", "must be one whole JSON object", "index: 1"),
    "zero bytes": (bytes(9), "line", "must be one whole JSON object", "\\x00" * 9),
    "broken UTF-8": (b'{"prompt": "a\xffb"}', "line", "must be UTF-8 (byte 13)", '\\xffb"}'),
    "UTF-16": ('{"index": 1}'.encode("utf-16"), "line", "must be UTF-8 (byte 0)", None),
    "too deep": (b'{"prompt": ' + b"[" * 10**5, "line", "must be one whole JSON object", None),
    "number too large": (b'{"reward": 1e999}', "reward", "must fit a 64-bit number", "inf"),
    "a field twice": (
        b'{"reward": 1, "metadata": {"reward": 3}, "reward": 2}',
        "reward",
        "must be given once",
        "given 2 times",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named(case: str, make_row: MakeRow, write: Write) -> None:
    changes, (field, rule, value) = BAD_ROWS[case]
    path = write([make_row(0), b"", make_row(**{"index": 1} | changes), make_row(2)])
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([path], RULES)
    [error] = caught.value.errors
    assert (error.file, error.line, error.field) == (path, 3, field)
    assert (error.rule, error.value) == (rule, value)
    assert error.fix
    assert f"{path}:3: {field} {rule}: {field}=" in str(caught.value)


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(case: str, make_row: MakeRow, write: Write) -> None:
    line, field, rule, value = BAD_LINES[case]
    path = write([make_row(0), line])
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([path], RULES)
    [error] = caught.value.errors
    assert (error.file, error.line, error.field) == (path, 2, field)
    assert error.rule.startswith(rule)
    assert value is None or error.value == value
    assert error.fix
    assert len(error.value) <= 80


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        (RowRules(need_rollout_log_probs=True), "rollout_log_probs"),
        (RowRules(need_ref_log_probs=True), "ref_log_probs"),
        (RowRules(need_values=True), "values"),
        (RowRules(need_kept_ids=True), "rollout_top_p_token_ids"),
        (RowRules(need_group=True), "group_index"),
        (RowRules(need_reward=True), "reward"),
    ],
)
def test_what_the_run_needs_must_be_there(
    rules: RowRules, field: str, make_row: MakeRow, write: Write
) -> None:
    path = write([make_row(rollout_log_probs=None, group_index=None, reward=None)])
    check_rollouts([path], RowRules())
    with pytest.raises(BadRowsError, match=f"{field} must be given"):
        check_rollouts([path], rules)


@pytest.mark.parametrize(
    ("reward", "rule", "value"),
    [
        (1.0, "must be a dict that has --reward-key score", "1.0"),
        ({"length": 1}, "must have --reward-key score", "['length']"),
        ({"score": "high"}, "must be a finite number", "high"),
        ({"score": 1e39}, "must be a finite number", "1e+39"),
    ],
)
def test_a_reward_key_must_lead_to_a_number(
    reward: object, rule: str, value: str, make_row: MakeRow, write: Write
) -> None:
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([write([make_row(reward=reward)])], RowRules(reward_key="score"))
    [error] = caught.value.errors
    assert (error.rule, error.value) == (rule, value)


def test_what_is_allowed(make_row: MakeRow, write: Write) -> None:
    rows = [
        make_row(0, loss_mask=[0, 0], reward=True, rollout_log_probs=[9e-5, 0], values=[-7, 2.5]),
        make_row(1, loss_mask=[True, False], metadata={"index": 7}, extra=[None]),
        make_row(2, loss_mask=None, reward=-3, status=None, prompt=[{"role": "user"}]),
        make_row(3, remove_sample=True, label=7),
        {"prompt_ids": [1, 2], "response_ids": [3], "reward": 0, "group_index": 1, "index": 4},
    ]
    path = write([b"\xef\xbb\xbf" + json.dumps(rows[0]).encode() + b"\r", *rows[1:]])
    files = check_rollouts([path], RULES)
    assert files.rows["num_trained_tokens"].tolist() == [0, 1, 2, 0, 1]
    assert files.rows["reward"].tolist() == [1.0, 1.0, -3.0, 1.0, 0.0]
    samples = files.read(range(5))
    assert [sample.loss_mask.tolist() for sample in samples] == [
        [False, False],
        [True, False],
        [True, True],
        [False, False],
        [True],
    ]
    assert samples[0].values.tolist() == [-7.0, 2.5]
    assert samples[1].values is None
    assert samples[2].prompt == '[{"role": "user"}]'
    assert (samples[2].status, samples[3].label) == ("completed", "7")
    assert samples[4].tokens.tolist() == [1, 2, 3]
    assert (samples[4].response_length, samples[4].prompt_length) == (1, 2)


def fault_of(line: bytes) -> BrokenRuleError | None:
    try:
        row_from_json(line)
    except BrokenRuleError as error:
        return error
    return None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_row_or_a_broken_rule(line: bytes) -> None:
    error = fault_of(line)
    assert error is None or (error.field and error.rule)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
FIELD = st.sampled_from(["tokens", "response_length", "loss_mask", "reward", "status", "index"])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # other work on the machine
@given(st.dictionaries(FIELD, JSON, max_size=3))
def test_any_json_is_a_row_or_a_broken_rule(record: dict[str, Any]) -> None:
    error = fault_of(json.dumps(record).encode())
    assert error is None or (error.field and error.fix and len(error.value) <= 80)
