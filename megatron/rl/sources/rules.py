"""The rules that span the fields of a row, and the way from a checked row to a `Sample`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron.rl.samples import RowRules, Sample
from megatron.rl.sources.row import FLOAT32_MAX, BrokenRuleError, Row
from megatron.rl.sources.values import free_text, plain, shown, size_of

RESPONSE_STREAMS = ("loss_mask", "rollout_log_probs", "ref_log_probs", "values")
"""Fields of one item per response token."""


def check_row(row: Row, rules: RowRules) -> int:
    """Refuse a row that breaks a rule; give `tokens` and `response_length` their one form.

    Where the rules say so, a row that is too long loses the end of its response. It is checked
    as it was: what is cut off hides no broken rule.

    Returns:
        How many tokens the row lost.

    Raises:
        BrokenRuleError: The first broken rule.
    """
    _join_ids(row)
    _check_lengths(row, rules)
    _check_vocabulary(row, rules)
    _check_streams(row, rules)
    _check_kept_ids(row, rules)
    reward_of(row, rules)
    if rules.need_group and row.group_index is None:
        raise BrokenRuleError(
            "group_index", "must be given: this run takes a prompt's samples together", None
        )
    return _cut(row, rules.max_length)


def reward_of(row: Row, rules: RowRules) -> float:
    """The row's reward as the run reads it; 0.0 where no number is given and none is needed.

    Raises:
        BrokenRuleError: Missing, not finite, or a dict where a number is read (or the reverse).
    """
    reward = row.reward
    if rules.reward_key is not None and (reward is not None or rules.need_reward):
        return _reward_by_key(reward, rules.reward_key)
    if not rules.need_reward and (reward is None or isinstance(reward, dict)):
        return 0.0
    if reward is None:
        raise BrokenRuleError("reward", "must be given", None)
    if isinstance(reward, dict):
        raise BrokenRuleError(
            "reward", "must be a number", reward, f"pass --reward-key, one of {_keys(reward)}"
        )
    return float(reward)


def num_trained_tokens_of(row: Row) -> int:
    """How many response tokens train: none of a removed sample, all where there is no mask."""
    if row.remove_sample:
        return 0
    return row.response_length if row.loss_mask is None else sum(row.loss_mask)


def make_sample(row: Row, entry: Mapping[str, Any], origin: str) -> Sample:
    """A checked row as a sample; its numbers come from the index, which knows all files.

    Args:
        row: the row.
        entry: index, group, rollout, reward and num_cut_tokens of the row, as its record in the
            index has them.
        origin: "file:line".
    """
    length = row.response_length
    mask = np.ones(length, bool) if row.loss_mask is None else np.array(row.loss_mask, bool)
    return Sample(
        index=int(entry["index"]),
        group_index=int(entry["group"]),
        rollout_index=int(entry["rollout"]),
        tokens=np.array(row.tokens, np.int64),
        response_length=length,
        loss_mask=np.zeros(length, bool) if row.remove_sample else mask,
        reward=float(entry["reward"]),
        status=row.status or "completed",
        origin=origin,
        rollout_log_probs=_array(row.rollout_log_probs, np.float32),
        ref_log_probs=_array(row.ref_log_probs, np.float32),
        values=_array(row.values, np.float32),
        kept_ids=_array(row.rollout_top_p_token_ids, np.int64),
        kept_offsets=_array(row.rollout_top_p_token_offsets, np.int64),
        num_cut_tokens=int(entry["num_cut_tokens"]),
        prompt=_text(row.prompt),
        response=_text(row.response),
        label=_text(row.label),
    )


def _join_ids(row: Row) -> None:
    """Give the row `tokens` and `response_length`, whichever way it names its ids."""
    if row.prompt_ids is None and row.response_ids is None:
        if row.tokens is None:
            raise BrokenRuleError("tokens", "must be given (or prompt_ids and response_ids)", None)
        return
    if row.tokens is not None:
        raise BrokenRuleError(
            "tokens", "must not be given beside prompt_ids and response_ids", row.tokens
        )
    for name in ("prompt_ids", "response_ids"):
        if getattr(row, name) is None:
            raise BrokenRuleError(name, "must be given beside the other half", None)
    if row.response_length not in (None, len(row.response_ids)):
        rule = f"must be the number of response_ids, {len(row.response_ids)}"
        raise BrokenRuleError("response_length", rule, row.response_length)
    row.tokens = row.prompt_ids + row.response_ids
    row.response_length = len(row.response_ids)


def _check_lengths(row: Row, rules: RowRules) -> None:
    total, response = len(row.tokens), row.response_length
    if response is None:
        raise BrokenRuleError("response_length", "must be given beside tokens", None)
    if not 1 <= response < total:
        rule = f"must be at least 1 and less than the number of tokens, {total}"
        raise BrokenRuleError("response_length", rule, response)
    if rules.max_length is None or total <= rules.max_length:
        return
    fix = "leave the row out, or raise --max-tokens-per-gpu or --max-position-embeddings"
    if total - response >= rules.max_length:
        rule = f"must leave room for a response token within {rules.max_length} ids"
        raise BrokenRuleError("tokens", rule, f"a prompt of {total - response}", fix)
    if not rules.truncate:
        rule = f"must be at most {rules.max_length} ids long"
        raise BrokenRuleError("tokens", rule, total, f"add --truncate-samples, {fix}")


def _cut(row: Row, max_length: int | None) -> int:
    """Take the end of a long response off every stream; the number of tokens taken."""
    num_cut = 0 if max_length is None else max(len(row.tokens) - max_length, 0)
    if not num_cut:
        return 0
    row.tokens = row.tokens[:max_length]
    row.response_length -= num_cut
    row.status = "truncated"
    for name in RESPONSE_STREAMS:
        if (stream := getattr(row, name)) is not None:
            setattr(row, name, stream[: row.response_length])
    if row.rollout_top_p_token_offsets is not None:
        row.rollout_top_p_token_offsets = row.rollout_top_p_token_offsets[: row.response_length + 1]
        row.rollout_top_p_token_ids = row.rollout_top_p_token_ids[
            : row.rollout_top_p_token_offsets[-1]
        ]
    return num_cut


def _check_vocabulary(row: Row, rules: RowRules) -> None:
    if rules.vocab_size is None or max(row.tokens) < rules.vocab_size:
        return
    position = next(i for i, token in enumerate(row.tokens) if token >= rules.vocab_size)
    rule = f"must be less than vocab_size={rules.vocab_size}"
    raise BrokenRuleError(f"tokens[{position}]", rule, row.tokens[position])


def _check_streams(row: Row, rules: RowRules) -> None:
    """Every per-token list has one item per response token; what the run needs is there."""
    needed = {
        "rollout_log_probs": rules.need_rollout_log_probs,
        "ref_log_probs": rules.need_ref_log_probs,
        "values": rules.need_values,
    }
    for name in RESPONSE_STREAMS:
        stream = getattr(row, name)
        if stream is None and needed.get(name):
            raise BrokenRuleError(name, "must be given: this run trains with it", None)
        if stream is not None and len(stream) != row.response_length:
            rule = f"must have one item per response token, response_length={row.response_length}"
            raise BrokenRuleError(name, rule, f"{len(stream)} items")


def _check_kept_ids(row: Row, rules: RowRules) -> None:
    ids, offsets = row.rollout_top_p_token_ids, row.rollout_top_p_token_offsets
    if ids is None and offsets is None:
        if rules.need_kept_ids:
            raise BrokenRuleError(
                "rollout_top_p_token_ids", "must be given: top-p is replayed", None
            )
        return
    for name, other in (
        ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
        ("rollout_top_p_token_offsets", "rollout_top_p_token_ids"),
    ):
        if getattr(row, name) is None:
            raise BrokenRuleError(name, f"must be given beside {other}", None)
    _check_offsets(offsets, num_ids=len(ids), num_rows=row.response_length)
    if rules.vocab_size is not None and max(ids, default=0) >= rules.vocab_size:
        rule = f"must be less than vocab_size={rules.vocab_size}"
        raise BrokenRuleError("rollout_top_p_token_ids", rule, max(ids))


def _check_offsets(offsets: list[int], *, num_ids: int, num_rows: int) -> None:
    name = "rollout_top_p_token_offsets"
    if len(offsets) != num_rows + 1:
        rule = f"must have one item more than response tokens, {num_rows + 1}"
        raise BrokenRuleError(name, rule, f"{len(offsets)} items")
    if offsets[0] != 0 or offsets[-1] != num_ids or sorted(offsets) != offsets:
        raise BrokenRuleError(name, f"must rise from 0 to the number of ids, {num_ids}", offsets)


def _reward_by_key(reward: object, key: str) -> float:
    if not isinstance(reward, dict):
        raise BrokenRuleError("reward", f"must be a dict that has --reward-key {key}", reward)
    if key not in reward:
        rule = f"must have --reward-key {key}"
        raise BrokenRuleError("reward", rule, _keys(reward), "name one of the keys there are")
    value = plain(reward[key]) if size_of(reward[key]) == 1 else reward[key]
    if not isinstance(value, int | float) or not abs(value) <= FLOAT32_MAX:
        raise BrokenRuleError(f"reward.{key}", "must be a finite number", value)
    return float(value)


def _keys(reward: Mapping[str, Any]) -> str:
    return shown(sorted(reward))


def _array(values: list[Any] | None, dtype: type) -> np.ndarray | None:
    return None if values is None else np.array(values, dtype)


def _text(value: object) -> str | None:
    """Free fields may hold anything (a chat is a list of messages); as text they stay readable."""
    return None if value is None else free_text(value)
