"""Lines that no run may train on: what each does to a good row, and the field its error names."""

import json
from collections.abc import Iterator
from typing import Any

GOOD = {
    "index": 1,
    "group_index": 0,
    "tokens": [1, 5, 7, 11, 13],
    "response_length": 2,
    "loss_mask": [1, 0],
    "rollout_log_probs": [-0.5, -1.25],
    "reward": 1.0,
    "status": "completed",
}
VOCAB_SIZE = 300
MAX_LENGTH = 256
BIG = "1" + "0" * 5000
"""More digits than Python converts to a number."""

NOT_LISTS = {"number": "7", "half": "1.5", "true": "true", "text": '"[1, 2]"', "dict": "{}"}
NOT_NUMBERS = {
    "text": '"1"',
    "null": "null",
    "list": "[]",
    "dict": '{"a": 1}',
    "list of one": "[1]",
}
NOT_FINITE = {"NaN": "NaN", "Infinity": "Infinity", "-Infinity": "-Infinity", "1e999": "1e999"}
NOT_INTEGERS = NOT_NUMBERS | NOT_FINITE | {"true": "true", "half": "1.5", "whole float": "2.0"}
TOO_LARGE = {"2**63": str(2**63), "2**64": str(2**64), "400 digits": "9" * 400, "5000 digits": BIG}
NOT_IDS = {"negative": "-1", "-2**63": str(-(2**63)), "2**31": str(2**31)}

REQUIRED = ("response_length", "group_index", "reward")
INTEGERS = ("response_length", "group_index", "rollout_index", "index")
ID_LISTS = ("tokens", "prompt_ids", "response_ids")
NUMBER_LISTS = ("rollout_log_probs", "ref_log_probs", "values")


def line_with(**texts: str | None) -> bytes:
    """The good row with fields as the given JSON texts; None leaves a field out."""
    fields = {name: json.dumps(value) for name, value in GOOD.items()} | texts
    return (
        "{" + ", ".join(f'"{k}": {v}' for k, v in fields.items() if v is not None) + "}"
    ).encode()


def hostile_lines() -> dict[str, tuple[bytes, str]]:
    """Every line by name, with the field that its error names."""
    lines: dict[str, tuple[bytes, str]] = {}
    for field, name, line in _wrong_types():
        lines[f"{field}: {name}"] = (line, field)
    for name, (changes, field) in CONTRADICTIONS.items():
        texts = {k: None if v is None else json.dumps(v) for k, v in changes.items()}
        lines[name] = (line_with(**texts), field)
    return lines | LINES


def _wrong_types() -> Iterator[tuple[str, str, bytes]]:
    no_integers = NOT_INTEGERS | TOO_LARGE
    no_bits = no_integers | {"2": "2", "-1": "-1"}
    del no_bits["true"]
    no_numbers = NOT_NUMBERS | NOT_FINITE | {"true": "true", "-1e39": "-1e39"}
    items = dict.fromkeys(ID_LISTS, no_integers | NOT_IDS) | {"loss_mask": no_bits}
    for field, wrong in (items | dict.fromkeys(NUMBER_LISTS, no_numbers)).items():
        texts = {f"has {name}": f"[0, 0, {text}]" for name, text in wrong.items()}
        texts |= {f"is {name}": text for name, text in NOT_LISTS.items()}
        yield from ((field, name, _list_line(field, text)) for name, text in texts.items())
    no_reward = NOT_NUMBERS | NOT_FINITE | {"1e39": "1e39", "5000 digits": BIG}
    scalars = dict.fromkeys(INTEGERS, no_integers) | {"reward": no_reward}
    for field, wrong in scalars.items():
        for name, text in wrong.items():
            if name != "null" or field in REQUIRED:
                yield field, f"is {name}", line_with(**{field: text})


def _list_line(field: str, text: str) -> bytes:
    if field not in ("prompt_ids", "response_ids"):
        return line_with(**{field: text})
    other = "response_ids" if field == "prompt_ids" else "prompt_ids"
    return line_with(tokens=None, response_length=None, **{field: text, other: "[1, 2]"})


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "tokens"),
    "empty tokens": ({"tokens": []}, "response_length"),
    "one token": ({"tokens": [1], "response_length": 1}, "response_length"),
    "tokens beyond the vocabulary": ({"tokens": [1, 2, 300]}, "tokens"),
    "prompt_ids beyond the vocabulary": (
        {"tokens": None, "prompt_ids": [300], "response_ids": [1, 2]},
        "tokens",
    ),
    "no response_length": ({"response_length": None}, "response_length"),
    "a response of none": ({"response_length": 0}, "response_length"),
    "a response of -1": ({"response_length": -1}, "response_length"),
    "a response of everything": ({"response_length": 5}, "response_length"),
    "a response of more": ({"response_length": 10**12}, "response_length"),
    "tokens twice": ({"prompt_ids": [1], "response_ids": [2]}, "tokens"),
    "ids without prompt": ({"tokens": None, "response_ids": [1, 2]}, "prompt_ids"),
    "ids without response": ({"tokens": None, "prompt_ids": [1, 2]}, "response_ids"),
    "empty prompt_ids": (
        {"tokens": None, "prompt_ids": [], "response_ids": [1, 2]},
        "response_length",
    ),
    "empty response_ids": (
        {"tokens": None, "response_length": None, "prompt_ids": [1, 2], "response_ids": []},
        "response_length",
    ),
    "response_ids of another length": (
        {"tokens": None, "prompt_ids": [1], "response_ids": [1, 2, 3]},
        "response_length",
    ),
    "longer than the model": ({"tokens": [1] * (MAX_LENGTH + 1)}, "tokens"),
    "mask too short": ({"loss_mask": [1]}, "loss_mask"),
    "mask of the whole row": ({"loss_mask": [0, 0, 0, 1, 1]}, "loss_mask"),
    "empty mask": ({"loss_mask": []}, "loss_mask"),
    "no log-probs": ({"rollout_log_probs": None}, "rollout_log_probs"),
    "empty log-probs": ({"rollout_log_probs": []}, "rollout_log_probs"),
    "log-probs of the whole row": ({"rollout_log_probs": [-1.0] * 5}, "rollout_log_probs"),
    "probabilities": ({"rollout_log_probs": [0.5, 0.25]}, "rollout_log_probs"),
    "reference too short": ({"ref_log_probs": [-1.0]}, "ref_log_probs"),
    "reference above 0": ({"ref_log_probs": [-1.0, 3.5]}, "ref_log_probs"),
    "values too long": ({"values": [1.0, 2.0, 3.0]}, "values"),
    "no reward": ({"reward": None}, "reward"),
    "rewards by name": ({"reward": {"score": 1.0}}, "reward"),
    "rewards by a hundred thousand names": (
        {"reward": {str(i): i for i in range(100_000)}},
        "reward",
    ),
    "no group": ({"group_index": None}, "group_index"),
    "index of the row before": ({"index": 0}, "index"),
    "unknown status": ({"status": "done"}, "status"),
    "status in capitals": ({"status": "COMPLETED"}, "status"),
    "status is a number": ({"status": 1}, "status"),
    "status is NUL": ({"status": "\0"}, "status"),
    "remove_sample is a number": ({"remove_sample": 1}, "remove_sample"),
    "remove_sample is text": ({"remove_sample": "false"}, "remove_sample"),
    "kept ids alone": ({"rollout_top_p_token_ids": [1]}, "rollout_top_p_token_offsets"),
    "offsets alone": ({"rollout_top_p_token_offsets": [0, 1, 1]}, "rollout_top_p_token_ids"),
    "offsets beyond the ids": (
        {"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 1, 9]},
        "rollout_top_p_token_offsets",
    ),
    "offsets below 0": (
        {"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [-1, 0, 1]},
        "rollout_top_p_token_offsets",
    ),
    "kept id beyond the vocabulary": (
        {"rollout_top_p_token_ids": [300], "rollout_top_p_token_offsets": [0, 1, 1]},
        "rollout_top_p_token_ids",
    ),
}


def _extra(text: bytes) -> bytes:
    return line_with()[:-1] + b", " + text + b"}"


_ROW = line_with()
_DEEP = b"[" * 20_000 + b"]" * 20_000
LINES: dict[str, tuple[bytes, str]] = {
    "cut off": (_ROW[:40], "line"),
    "no closing brace": (_ROW[:-1], "line"),
    "two rows": (_ROW + _ROW, "line"),
    "a trailing comma": (_ROW[:-1] + b",}", "line"),
    "a comma after the row": (_ROW + b",", "line"),
    "a comment": (_ROW + b" // good", "line"),
    "in an array": (b"[" + _ROW + b"]", "line"),
    "an empty object": (b"{}", "tokens"),
    "a number": (b"12", "line"),
    "null": (b"null", "line"),
    "text": (b'"tokens"', "line"),
    "true": (b"true", "line"),
    "NaN": (b"NaN", "line"),
    "NUL bytes": (bytes(64), "line"),
    "control characters": (b"\x01\x02\x7f", "line"),
    "Python's repr": (repr(GOOD).encode(), "line"),
    "a name without quotes": (_ROW.replace(b'"tokens"', b"tokens"), "line"),
    "CSV": (b"tokens,response_length,reward", "line"),
    "a header of another file": (b"PAR1\x15\x04", "line"),
    "two byte order marks": (b"\xef\xbb\xbf" * 2 + _ROW, "line"),
    "UTF-16": (_ROW.decode().encode("utf-16"), "line"),
    "UTF-32": (_ROW.decode().encode("utf-32"), "line"),
    "Latin-1": (_extra('"prompt": "é"'.encode("latin-1")), "line"),
    "a cut character": (_extra(b'"prompt": "\xe2\x82"'), "line"),
    "an overlong character": (_extra(b'"prompt": "\xc0\xaf"'), "line"),
    "an encoded surrogate": (_extra(b'"prompt": "\xed\xa0\x80"'), "line"),
    "broken UTF-8 in a free field": (_extra(b'"metadata": "\xff"'), "line"),
    "broken UTF-8 in a name": (_extra(b'"\xff": 1'), "line"),
    "a lone surrogate": (_extra(b'"prompt": "\\ud800"'), "prompt"),
    "NUL within a string": (_extra(b'"prompt": "a\0b"'), "line"),
    "a tab within a string": (_extra(b'"prompt": "a\tb"'), "line"),
    "an unknown escape": (_extra(b'"prompt": "\\q"'), "line"),
    "half an escape": (_extra(b'"prompt": "\\u12"'), "line"),
    "a free field with NaN": (_extra(b'"metadata": {"x": NaN}'), "line"),
    "a free field of 20,000 levels": (_extra(b'"metadata": ' + _DEEP), "line"),
    "a prompt of 20,000 levels": (_extra(b'"prompt": ' + _DEEP), "line"),
    "tokens of 20,000 levels": (line_with(tokens=_DEEP.decode()), "tokens"),
    "reward of 20,000 levels": (line_with(reward=f'{{"a": {_DEEP.decode()}}}'), "line"),
    "brackets without end": (b'{"tokens": ' + b"[" * 100_000, "tokens"),
    "a name of a million letters": (_extra(b'"' + b"n" * 10**6 + b'": NaN'), "nnn"),
    "leading zeros": (line_with(response_length="02"), "line"),
    "a plus sign": (line_with(response_length="+2"), "line"),
    "hexadecimal": (line_with(response_length="0x2"), "line"),
    "a number with underscores": (line_with(response_length="1_0"), "line"),
    "a number cut off": (line_with(reward="1e"), "line"),
    "-": (line_with(reward="-"), "line"),
    "digits of another script": (line_with(reward="\u0661"), "line"),
    "reward twice": (_extra(b'"reward": 2'), "reward"),
    "tokens twice, once escaped": (_extra(b'"t\\u006fkens": [2, 3]'), "tokens"),
    "reward thrice, all the same": (_extra(b'"reward": 1.0, "reward": 1.0'), "reward"),
    "index twice, the second null": (_extra(b'"index": null'), "index"),
}
