"""What is known of each response token of rollout rows, and which rows are looked at.

Rows are read as training reads them; advantages, ratios and clips are those of the loss.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.rl.samples import Sample
from megatron.rl.sources import RolloutFiles
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import open_rows
from megatron.rl.sources.row import STATUSES
from slime_loss import (
    AdvantageConfig,
    AdvantageInputs,
    PolicyLossConfig,
    clipped_surrogate,
    compute_advantages,
    importance_log_ratio,
)

TRAIN_FIELDS = ("log_probs", "old_log_probs")
"""Where a row may have the trainer's log-probs, the first of them first."""
OF_INDEX = {
    "index": "index",
    "group": "group",
    "line": "line",
    "reward": "reward",
    "length": "response_length",
    "total_length": "total_length",
    "trained": "num_trained_tokens",
}
"""Numbers of a row that are known without reading it, and the index's name of each."""
OF_TOKENS = ("difference", "mean_difference", "advantage", "clipped")
"""Numbers of a row that its tokens decide."""
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
SORTS = {
    "file": None,
    "difference": ("difference", -1),
    "longest": ("length", -1),
    "shortest": ("length", 1),
    "lowest-reward": ("reward", 1),
    "highest-reward": ("reward", -1),
}
"""Orders of rows: which number of a row, and the sign that puts the wanted end first."""

TrainLogProbs = Callable[[Sample], Tensor]
"""Gives the trainer's log-probs of a sample's response, fp32 [R], nats."""


class InspectError(ValueError):
    """Something that was asked for cannot be shown, and why."""


@dataclass(frozen=True)
class Condition:
    """`FIELD OPERATOR VALUE` of one row."""

    field: str
    operator: str
    value: float | str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition; nothing of it is run as code.

        Raises:
            InspectError: it is none, or compares what cannot be compared.
        """
        match = re.fullmatch(r"\s*([a-z_]+)\s*([<>]=?|[=!]?=)\s*(\S+)\s*", text)
        fields = ", ".join((*OF_INDEX, *OF_TOKENS, "status"))
        if match is None or match[1] not in fields.split(", "):
            fix = f"use one of {fields}, then < <= > >= = !=, then a value"
            raise InspectError(
                f"--where must be FIELD OPERATOR VALUE: --where={text!r}; fix: {fix}"
            )
        field, sign, value = match.groups()
        if field == "status":
            if sign not in ("=", "==", "!=") or value not in STATUSES:
                fix = f"use = or != and one of {', '.join(STATUSES)}"
                raise _not_a_condition(text, "must name a status", fix)
            return cls(field, sign, value)
        try:
            number = float(value)
        except ValueError:
            fix = "compare with a number, as in reward<0"
            raise _not_a_condition(text, "must end in a number", fix) from None
        return cls(field, sign, number)

    def holds(self, value: float | str) -> bool:
        """Whether it holds of a row's value; of an unknown one (NaN) it does not."""
        unknown = isinstance(value, float) and math.isnan(value)
        return not unknown and OPERATORS[self.operator](value, self.value)


def _not_a_condition(text: str, rule: str, fix: str) -> InspectError:
    return InspectError(f"--where {rule}: --where={text!r}; fix: {fix}")


@dataclass(frozen=True)
class ResponseTokens:
    """A sample and what is known of each of its R response tokens; None where nothing is.

    Args:
        sample: the row.
        train: [R] nats, the trainer's log-probs.
        advantages: [R], 0 where a token does not train.
        clip: bounds of the ratio, where clips are asked for.
    """

    sample: Sample
    train: Tensor | None
    advantages: Tensor
    clip: PolicyLossConfig | None = None

    @property
    def ids(self) -> np.ndarray:
        """[R] the response's tokens."""
        return self.sample.tokens[self.sample.prompt_length :]

    @property
    def rollout(self) -> Tensor | None:
        """[R] nats, the rollout engine's log-probs."""
        found = self.sample.rollout_log_probs
        return None if found is None else torch.from_numpy(found)

    @property
    def difference(self) -> Tensor | None:
        """[R] nats, |train - rollout|."""
        if self.train is None or self.rollout is None:
            return None
        return (self.train - self.rollout).abs()

    @property
    def log_ratio(self) -> Tensor | None:
        """[R] train - rollout, held within [-20, 20] as in the loss."""
        if self.train is None or self.rollout is None:
            return None
        return importance_log_ratio(self.train, self.rollout)

    @cached_property
    def clips(self) -> list[str] | None:
        """[R]: which bound takes a token's gradient away (high, low, dual), or nothing."""
        if self.clip is None or self.log_ratio is None:
            return None
        found = clipped_surrogate(self.log_ratio, self.advantages, self.clip)
        named = {
            "high": found.clipped_high,
            "low": found.clipped_low,
            "dual": found.clipped_dual,
        }
        trained = self.sample.loss_mask
        return [
            "".join(name for name, where in named.items() if trained[token] and bool(where[token]))
            for token in range(len(self.ids))
        ]

    def number(self, name: str) -> float:
        """One of `OF_TOKENS` over the trained tokens; NaN where it is not known."""
        mask = torch.from_numpy(self.sample.loss_mask)
        if name == "clipped":
            clips = self.clips
            return math.nan if clips is None else sum(map(bool, clips)) / max(int(mask.sum()), 1)
        stream = self.advantages if name == "advantage" else self.difference
        if stream is None or not bool(mask.any()):
            return math.nan
        trained = stream[mask]
        return float(trained.max() if name == "difference" else trained.mean())


@dataclass(frozen=True)
class RowReader:
    """Rows with all that is known of their tokens.

    Args:
        files: checked rows.
        estimator: how rewards become advantages; their groups are those of all rows.
        clip: bounds of the ratio, or None.
        train: gives the trainer's log-probs; None takes them from the rows that have them.
        train_field: the field that has them; None for the first of `TRAIN_FIELDS`.
    """

    files: RolloutFiles
    estimator: AdvantageConfig
    clip: PolicyLossConfig | None = None
    train: TrainLogProbs | None = None
    train_field: str | None = None

    def tokens(self, position: int) -> ResponseTokens:
        """Read one row.

        Raises:
            BadRowsError: its file has changed.
            InspectError: its trainer's log-probs do not fit, or the estimator lacks a stream.
        """
        (sample,) = self.files.read([position])
        train = self._own_log_probs(position, sample) if self.train is None else self.train(sample)
        return ResponseTokens(sample, train, self._advantages(position, sample), self.clip)

    def number(self, position: int, name: str) -> float | str:
        """A number (or the status) of one row, by the name that conditions know."""
        if name == "status":
            return STATUSES[self.files.rows["status"][position]]
        if name in OF_INDEX:
            return float(self.files.rows[OF_INDEX[name]][position])
        return self._cached_numbers(position)[name]

    @cached_property
    def _cached_numbers(self) -> Callable[[int], dict[str, float]]:
        @cache
        def numbers(position: int) -> dict[str, float]:
            tokens = self.tokens(position)
            return {name: tokens.number(name) for name in OF_TOKENS}

        return numbers

    @cached_property
    def _of_all(self) -> tuple[Tensor, Tensor]:
        rows = self.files.rows
        return torch.from_numpy(rows["reward"].copy()), torch.from_numpy(rows["group"].copy())

    def _advantages(self, position: int, sample: Sample) -> Tensor:
        rewards, groups = self._of_all
        values = sample.values
        inputs = AdvantageInputs(
            rewards=rewards,
            group_index=groups,
            own=torch.tensor([position]),
            loss_mask=[torch.from_numpy(sample.loss_mask)],
            values=None if values is None else [torch.from_numpy(values)],
        )
        try:
            return compute_advantages(inputs, self.estimator).advantages[0].float()
        except ValueError as error:
            fix = "choose another --advantage-estimator"
            raise InspectError(f"{sample.origin}: {error}; fix: {fix}") from error

    def _own_log_probs(self, position: int, sample: Sample) -> Tensor | None:
        """What the row itself says of the trainer."""
        row = self.files.rows[position]
        record = self._record(self.files.paths[row["file"]], int(row["place"]))
        name = next((name for name in self._names if record.get(name) is not None), None)
        if name is None and self.train_field is None:
            return None
        rule = f"must be one number a response token ({sample.response_length})"
        fix = "write the log-probs anew, or name another --log-probs-field"
        fault = f"{sample.origin}: {name or self.train_field} {rule}: "
        try:
            found = torch.tensor(record.get(name), dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InspectError(f"{fault}{error}; fix: {fix}") from error
        if found.shape != (sample.response_length,):
            raise InspectError(f"{fault}shape={list(found.shape)}; fix: {fix}")
        return found

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.train_field,) if self.train_field else TRAIN_FIELDS

    def _record(self, path: str, place: int) -> dict[str, Any]:
        """Fields of a raw row; none of a slime dump, which is read without those it has beside."""
        columns = () if path.endswith(".pt") else self._columns(path)
        if not columns:
            return {}
        (raw,) = open_rows(path, self._cache, columns=columns).read([place])
        return json.loads(raw) if isinstance(raw, bytes) else raw

    @cached_property
    def _columns(self) -> Callable[[str], tuple[str, ...]]:
        """The trainer's fields that a file has, or its first rows."""

        @cache
        def columns(path: str) -> tuple[str, ...]:
            there = open_rows(path, self._cache).names()
            return tuple(name for name in self._names if name in there)

        return columns

    @cached_property
    def _cache(self) -> UnitCache:
        return UnitCache()


def choose_rows(
    reader: RowReader, conditions: Sequence[Condition], sort: str, limit: int | None
) -> tuple[list[int], int]:
    """The rows that every condition holds of, in order.

    Returns:
        At most `limit` positions, and how many rows there were.

    Raises:
        InspectError: a condition, or the order, needs log-probs that no row has.
    """
    # what the index knows is asked first, so that fewer rows are read
    positions = list(range(len(reader.files)))
    for condition in sorted(conditions, key=lambda one: one.field in OF_TOKENS):
        values = {at: reader.number(at, condition.field) for at in positions}
        _refuse_unknown(f"--where {condition.field}", condition.field, values)
        positions = [at for at in positions if condition.holds(values[at])]
    order = SORTS[sort]
    if order is not None:
        field, sign = order
        keys = {at: float(reader.number(at, field)) for at in positions}
        _refuse_unknown(f"--sort {sort}", field, keys)
        positions.sort(key=lambda at: math.inf if math.isnan(keys[at]) else sign * keys[at])
    return positions[:limit], len(positions)


def _refuse_unknown(flag: str, field: str, values: dict[int, Any]) -> None:
    """Raise InspectError where a number is not known of any row."""
    is_known = field not in OF_TOKENS or field == "advantage"
    if is_known or not values or not all(map(math.isnan, values.values())):
        return
    needs = "rollout_log_probs and the trainer's log-probs of a trained token"
    fix = "give --hf-checkpoint and --model-log-probs, or rows with a field log_probs"
    if field == "clipped":
        needs, fix = f"{needs}, and --eps-clip", f"{fix}; and --eps-clip"
    raise InspectError(f"{flag} needs {needs}: no row has them; fix: {fix}")
