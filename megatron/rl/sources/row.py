"""The row on the wire: its fields, their types and ranges.

Every format ends here: a JSONL line is decoded straight into `Row`, a Parquet record or a slime
dump's dict is converted into it. What spans fields is in `rules.py`, how a value is shown in
`values.py`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron.rl.sources.values import plain, shown, size_of

MAX_ROW_BYTES = 64 << 20
"""A longer line is refused unread: it is a file without line ends, not a sample."""
MAX_ROW_ITEMS = MAX_ROW_BYTES // 2
"""As many as a line can hold; formats that repeat a number in less space are held to it too."""
LOG_PROB_SLACK = 1e-4
"""A log-prob may be this far above 0: engines round a log-softmax in low precision."""
FLOAT32_MAX = 3.4028234663852886e38
INT64_MAX = 2**63 - 1

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LogProb = Annotated[float, Meta(ge=-FLOAT32_MAX, le=LOG_PROB_SLACK)]
Finite = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
MaskBit = Annotated[int, Meta(ge=0, le=1)]
Number = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
Offset = Annotated[int, Meta(ge=0, le=INT64_MAX)]
STATUSES = ("completed", "truncated", "aborted", "failed", "pending")


class Row(msgspec.Struct):
    """One sample as a file holds it. Null means absent; fields that are not listed are ignored."""

    tokens: list[TokenId] | None = None
    prompt_ids: list[TokenId] | None = None
    response_ids: list[TokenId] | None = None
    response_length: int | None = None
    loss_mask: list[MaskBit | bool] | None = None
    rollout_log_probs: list[LogProb] | None = None
    ref_log_probs: list[LogProb] | None = None
    values: list[Finite] | None = None
    rollout_top_p_token_ids: list[TokenId] | None = None
    rollout_top_p_token_offsets: list[Offset] | None = None
    reward: Finite | bool | dict[str, Any] | None = None
    group_index: Number | None = None
    rollout_index: Number | None = None
    index: Number | None = None
    status: Literal["completed", "truncated", "aborted", "failed", "pending"] | None = None
    remove_sample: bool | None = None
    weight_version: Offset | None = None
    prompt: Any = None
    response: Any = None
    label: Any = None


FIELDS = Row.__struct_fields__
FREE_FIELDS = ("prompt", "response", "label")
MAX_RULE_CHARS = 300
MAX_INTEGER_CHARS = 1000

FIXES = {
    "tokens": "give the ids of prompt and response, made with the model's own tokenizer",
    "prompt_ids": "give both prompt_ids and response_ids, or tokens and response_length",
    "response_ids": "give both prompt_ids and response_ids, or tokens and response_length",
    "response_length": "give how many of the last tokens are the response; no prompt may be empty",
    "loss_mask": "give one 0 or 1 per response token, or leave it out",
    "rollout_log_probs": "give the engine's log-prob of each response token, in nats",
    "ref_log_probs": "give the reference model's log-prob of each response token, in nats",
    "values": "give the critic's value before each response token",
    "rollout_top_p_token_ids": "give the kept ids of all response tokens, end to end",
    "rollout_top_p_token_offsets": "give response_length + 1 offsets into rollout_top_p_token_ids",
    "reward": "give a finite number, or a dict together with --reward-key",
    "group_index": "give the samples of one prompt the same number",
    "rollout_index": "give the samples of one rollout the same number, or leave it out",
    "index": "give each row of a file its own number, or leave it out of all of them",
    "status": f"use one of {', '.join(STATUSES)}",
    "remove_sample": "use true or false",
    "weight_version": "give the optimizer steps that the engine's weights had taken, if any",
    "line": "write one JSON object a line, in UTF-8",
}
FREE_FIX = "write valid JSON and Unicode, or leave the field out"
FIXES |= dict.fromkeys(FREE_FIELDS, FREE_FIX)


class BrokenRuleError(Exception):
    """A row breaks a rule; whoever reads the file adds its name and the line.

    Args:
        field: The field, with the position in it where there is one (`tokens[3]`).
        rule: What it must be.
        value: What it is.
        fix: What to do about it; by default the field's own advice.
    """

    def __init__(self, field: str, rule: str, value: object, fix: str | None = None) -> None:
        super().__init__(field, rule, value, fix)
        self.field = shown(field)
        self.rule = shown(rule, MAX_RULE_CHARS)
        self.value = shown(value)
        self.fix = FIXES.get(re.split(r"[.\[]", field)[0], FREE_FIX) if fix is None else fix

    def __str__(self) -> str:
        """`field rule: field=value`, for the errors that quote this one."""
        return f"{self.field} {self.rule}: {self.field}={self.value}"


class BadFileError(BrokenRuleError):
    """A whole file cannot be used."""

    def __init__(self, rule: str, value: object, fix: str) -> None:
        super().__init__("file", rule, value, fix)


def row_from_json(line: bytes) -> Row:
    """Decode one line of a JSONL file.

    Raises:
        BrokenRuleError: No JSON object, a field given twice, or one of a wrong type or range.
    """
    if len(line) > MAX_ROW_BYTES:
        raise BrokenRuleError("line", f"must be at most {MAX_ROW_BYTES} bytes long", _text(line))
    line = line.removeprefix(b"\xef\xbb\xbf").strip()
    try:
        if not line.isascii():
            line.decode()  # fields that are passed over must be UTF-8 too
        row = _JSON_ROW.decode(line)
    except msgspec.ValidationError as error:
        raise _fault(error, lambda: json.loads(line, parse_int=_integer)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(line, error) from None
    names = [piece for piece in line.split(b'"') if piece in _NAMES]
    if len(names) > len(set(names)) or _ESCAPED_NAME.search(line):
        _refuse_repeated_fields(line)
    return row


def row_from_record(record: object) -> Row:
    """Convert one Parquet record or one sample of a slime dump.

    Raises:
        BrokenRuleError: It is no dict, or a field has a wrong type or range.
    """
    if not isinstance(record, Mapping):
        raise BrokenRuleError("line", "must be a dict of fields", record)
    known = {name: _plain(name, record[name]) for name in FIELDS if name in record}
    try:
        return msgspec.convert(known, Row)
    except msgspec.ValidationError as error:
        raise _fault(error, lambda: known) from None


_JSON_ROW = msgspec.json.Decoder(Row)
_NAMES = frozenset(name.encode() for name in FIELDS)
_ESCAPED_NAME = re.compile(rb"\\u00[567][0-9a-fA-F]")
"""An escaped letter may be one of a field's name, which writers of JSON leave as they are."""
_MESSAGE = re.compile(r"(?P<rule>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)


def _plain(name: str, value: object) -> object:
    """The value of a field as Python's own.

    Raises:
        BrokenRuleError: It has no order, has no numbers, or more of them than a row may have.
    """
    if name in FREE_FIELDS:
        return value
    if size_of(value) > MAX_ROW_ITEMS:
        rule = f"must have at most {MAX_ROW_ITEMS} items"
        raise BrokenRuleError(name, rule, f"{size_of(value)} items")
    if isinstance(value, set | frozenset):
        raise BrokenRuleError(name, "must be array, got set", value)
    try:
        return plain(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BrokenRuleError(name, f"must hold plain values ({error})", type(value)) from None


def _integer(digits: str) -> int | str:
    """An integer as it is, or as text where it is longer than Python converts."""
    return int(digits) if len(digits) < MAX_INTEGER_CHARS else digits


def _fault(error: msgspec.ValidationError, record: Callable[[], Any]) -> BrokenRuleError:
    """Add the refused value: msgspec's message has the rule and the path only."""
    match = _MESSAGE.fullmatch(str(error))
    assert match is not None, "the pattern matches every text"
    rule, path = match["rule"].replace("`", ""), match["path"] or "line"
    rule = re.sub(r"^(Number|Integer value) out of range", "must fit a 64-bit number", rule)
    rule = rule.replace(" | null", "")
    rule = re.sub("^Invalid enum value.*", f"must be one of {', '.join(STATUSES)}", rule)
    try:
        value = _at(record(), path)
    except (ValueError, LookupError, TypeError, RecursionError):
        value = "(nested too deep to show)"
    rule = re.sub("^Expected", "must be", rule)
    return BrokenRuleError(path, f"keys {rule}" if match["key"] else rule, value)


def _at(record: Any, path: str) -> Any:
    if path == "line":
        return record
    for name, position in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        record = record[name] if name else record[int(position)]
    return record


def _malformed(line: bytes, error: Exception) -> BrokenRuleError:
    """Say why a line is no JSON: most often it is cut off, or NaN, which only Python accepts."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as unicode_error:
        start = unicode_error.start
        return BrokenRuleError("line", f"must be UTF-8 (byte {start})", _text(line[start:]))
    except (ValueError, RecursionError):
        return BrokenRuleError("line", f"must be one whole JSON object ({error})", _text(line))
    for path, value in _leaves(record):
        if isinstance(value, float) and not math.isfinite(value):
            return BrokenRuleError(path, "must be finite", value)
        if isinstance(value, str) and _has_lone_surrogate(value):
            return BrokenRuleError(path, "must be Unicode without lone surrogates", value)
    return BrokenRuleError("line", f"must be JSON ({error})", _text(line))


def _text(line: bytes) -> str:
    """The beginning of a line that may be anything."""
    return line[:80].decode(errors="backslashreplace")


def _leaves(record: object) -> Iterator[tuple[str, object]]:
    """The fields of a row and the items of its lists, with their paths."""
    for name, value in record.items() if isinstance(record, dict) else ():
        yield name, value
        for position, item in enumerate(value if isinstance(value, list) else ()):
            yield f"{name}[{position}]", item


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _refuse_repeated_fields(line: bytes) -> None:
    """JSON readers keep the last of two equal keys silently; which was meant is unknown."""
    text = line.decode(errors="replace")
    pairs = json.loads(text, object_pairs_hook=list, parse_int=str, parse_float=str)
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1 and name in FIELDS:
            raise BrokenRuleError(
                name, "must be given once", f"given {count} times", "keep one of them"
            )
