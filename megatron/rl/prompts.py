"""Prompts of a run: what a row or a task's item says, as ids, and the order they are taken in.

Prompt j of a run is a pure function of the data, the seed and j, so that a resumed run goes on
where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from megatron.rl.chat import Messages
from megatron.rl.sources.order import epoch_order
from megatron.rl.sources.row import BrokenRuleError
from megatron.rl.sources.values import free_text, plain
from megatron.rl.text import TextTokenizer
from slime_loss.checked_config import CheckedConfig, Rule

IDS_FIELD = "prompt_ids"
"""A field of this name holds ids, which stand as they are."""


@dataclass(frozen=True)
class PromptConfig(CheckedConfig):
    """How prompts are read.

    Raises:
        ConfigError: A field has a value that cannot be.
    """

    input_key: str = "prompt"
    """The field with the prompt: a text, a list of messages, or a list of ids."""
    label_key: str | None = None
    """The field with the right answer (None: prompts have none)."""
    metadata_key: str = "metadata"
    """The field with an object that the reward function is given; a row may leave it out."""
    apply_chat_template: bool = False
    """A text becomes the message of a user, and messages become ids by the chat template."""
    max_prompt_length: int | None = None
    """Most ids of a prompt (None: no limit)."""
    long_prompts: Literal["error", "drop"] = "error"
    """drop: prompts that are longer are counted and left out."""
    bad_rows: Literal["error", "skip"] = "error"
    """skip: bad rows are counted and left out; a bad file is an error all the same."""

    def rules(self) -> Iterator[Rule]:
        """Names are names, and the limit leaves room for a prompt."""
        limit = self.max_prompt_length
        fix = "give a positive number of tokens"
        yield limit is None or limit > 0, "max_prompt_length", "must be positive", fix
        for name in ("input_key", "label_key", "metadata_key"):
            yield getattr(self, name) != "", name, "must not be empty", "give the field's name"
        keys = [self.input_key, self.metadata_key, *([self.label_key] if self.label_key else [])]
        differ = len(set(keys)) == len(keys)
        yield differ, "metadata_key", "must differ from the other keys", "name another field"

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read."""
        keys = (self.input_key, self.label_key, self.metadata_key, IDS_FIELD)
        return tuple(dict.fromkeys(key for key in keys if key is not None))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a response is wanted to."""

    prompt_ids: np.ndarray
    """int64 [P], P >= 1."""
    text: str | None
    """As it was given; None where messages or ids were."""
    messages: Messages | None
    label: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """"file:line", or the task and the item's number."""


class LongPromptError(BrokenRuleError):
    """A prompt has more ids than a run allows."""


class PromptSet(Protocol):
    """Prompts that are read by number."""

    @property
    def fingerprint(self) -> str:
        """The same for the same prompts; a resumed run compares it."""
        ...

    def __len__(self) -> int: ...

    def read(self, positions: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions, in this order."""
        ...


class PromptMaker:
    """Makes prompts of rows.

    Args:
        config: How.
        tokenizer: Encodes text and dialogues; ids that are given must be in its vocabulary.
    """

    def __init__(self, config: PromptConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self._tokenizer = tokenizer

    def from_record(self, record: Mapping[str, Any], origin: str) -> Prompt:
        """The prompt of one row.

        Raises:
            BrokenRuleError: A field is missing or not what it must be.
        """
        config = self.config
        given = record.get(IDS_FIELD)
        if given is None:
            given = record.get(config.input_key)
        if given is None:
            keys = ", ".join(sorted(str(key) for key in record)[:10]) or "none"
            rule = f"must be given (fields of the row: {keys})"
            raise BrokenRuleError(config.input_key, rule, None, "check --input-key")
        label = None if config.label_key is None else record.get(config.label_key)
        if config.label_key is not None and label is None:
            fix = "give the answer, or leave --label-key out"
            raise BrokenRuleError(config.label_key, "must be given", None, fix)
        return self.make(given, label, record.get(config.metadata_key), origin)

    def make(self, given: Any, label: Any, metadata: Any, origin: str) -> Prompt:
        """A prompt of what was given for it.

        Args:
            given: A text, messages or ids.
            label: Text, or another value that is kept as JSON.
            metadata: A dict, or None.
            origin: Where it is from.

        Raises:
            BrokenRuleError: Something is not what it must be.
        """
        if metadata is not None and not isinstance(metadata, Mapping):
            fix = "give a JSON object, or leave it out"
            raise BrokenRuleError(self.config.metadata_key, "must be an object", metadata, fix)
        ids, text, messages = self._encoded(plain(given))
        self._check_ids(ids)
        return Prompt(
            prompt_ids=ids,
            text=text,
            messages=messages,
            label=None if label is None else free_text(plain(label)),
            metadata=dict(metadata or {}),
            origin=origin,
        )

    def _encoded(self, given: Any) -> tuple[np.ndarray, str | None, Messages | None]:
        key = self.config.input_key
        if isinstance(given, str) and not self.config.apply_chat_template:
            return self._encode(self._tokenizer.encode, given), given, None
        if isinstance(given, str):
            messages: Messages = [{"role": "user", "content": given}]
            return self._encode(self._tokenizer.apply_chat_template, messages), given, None
        if not isinstance(given, list) or not given:
            rule = "must be a text, a list of messages or a list of ids"
            raise BrokenRuleError(key, rule, given, "write one of these")
        if isinstance(given[0], Mapping):
            messages = _checked_messages(given, key)
            if not self.config.apply_chat_template:
                fix = "pass --apply-chat-template"
                raise BrokenRuleError(key, "must be a text without a chat template", given, fix)
            return self._encode(self._tokenizer.apply_chat_template, messages), None, messages
        return self._given_ids(given), None, None

    def _encode(self, encode: Any, given: Any) -> np.ndarray:
        try:
            return encode(given)
        except (ValueError, TypeError) as error:
            rule = f"must be what the tokenizer takes ({error})"
            fix = "check --tokenizer-type and --apply-chat-template"
            raise BrokenRuleError(self.config.input_key, rule, given, fix) from None

    def _given_ids(self, ids: list[Any]) -> np.ndarray:
        size = self._tokenizer.vocab_size
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < size:
                rule = f"must be an id in [0, {size})"
                fix = "give the ids of the run's own tokenizer"
                raise BrokenRuleError(f"{IDS_FIELD}[{position}]", rule, token, fix)
        return np.array(ids, np.int64)

    def _check_ids(self, ids: np.ndarray) -> None:
        key, limit = self.config.input_key, self.config.max_prompt_length
        if len(ids) == 0:
            raise BrokenRuleError(key, "must have a token", "none", "give a prompt that has text")
        if limit is not None and len(ids) > limit:
            rule = f"must have at most {limit} tokens"
            fix = "raise the most tokens of a prompt, or have long prompts dropped"
            raise LongPromptError(key, rule, f"{len(ids)} tokens", fix)


class PromptSource:
    """Endless prompts: epoch after epoch of a set, each in an order of its own.

    Args:
        prompts: The set.
        seed: Decides the order, together with the epoch.
        shuffle: False keeps the order of the set.

    Raises:
        ValueError: The seed is negative, or the set is empty.
    """

    def __init__(self, prompts: PromptSet, *, seed: int = 0, shuffle: bool = True) -> None:
        if seed < 0:
            raise ValueError(f"seed must not be negative: seed={seed}")
        if len(prompts) == 0:
            raise ValueError("prompts must not be empty: len(prompts)=0")
        self.prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._newest = (-1, np.empty(0, np.int64))  # an epoch and its order

    def take(self, first: int, count: int) -> list[Prompt]:
        """Prompts `first` to `first + count - 1` of the run."""
        return self.prompts.read([self.position(first + i) for i in range(count)])

    def position(self, number: int) -> int:
        """Where prompt `number` of the run is in the set."""
        if number < 0:
            raise ValueError(f"number must not be negative: number={number}")
        epoch, place = divmod(number, len(self.prompts))
        if not self._shuffle:
            return place
        if self._newest[0] != epoch:
            self._newest = (epoch, epoch_order(len(self.prompts), self._seed, epoch))
        return int(self._newest[1][place])


def _checked_messages(given: list[Any], key: str) -> Messages:
    for position, message in enumerate(given):
        holds = isinstance(message, Mapping) and all(
            isinstance(message.get(name), str) for name in ("role", "content")
        )
        if not holds:
            rule = "must have a role and a content that are text"
            fix = "write {role, content} for each message"
            raise BrokenRuleError(f"{key}[{position}]", rule, message, fix)
    # Parquet gives each message the names of all; a template asks which are there
    return [{k: v for k, v in message.items() if v is not None} for message in given]
