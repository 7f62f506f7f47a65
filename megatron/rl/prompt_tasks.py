"""Prompts that a task makes: as many as are wanted, and others for evaluation.

Item i of a task depends on its parameters, `seed + i` and for few tasks on the size, so nothing is
kept in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.rl.prompts import LongPromptError, Prompt, PromptMaker
from megatron.rl.samples import BadRowsError
from megatron.rl.sources.row import BrokenRuleError
from megatron.rl.sources.scan import error_of
from megatron.rl.tasks import make_task
from slime_loss.checked_config import CheckedConfig, ConfigError, Rule, Violation

HELD_OUT = 1 << 30
"""Added to the seed of held-out items; all others are made from seeds below it."""


@dataclass(frozen=True)
class TaskConfig(CheckedConfig):
    """Which items of which task.

    Raises:
        ConfigError: A field has a value that cannot be.
    """

    task: str
    """A name of reasoning-gym's, for example `chain_sum`."""
    task_parameters: dict = field(default_factory=dict)
    """Fields of the task's config."""
    size: int = 10_000
    """Different items; behind the last one they begin anew, in another order."""
    seed: int = 0
    """Item i is made from `seed + i`."""
    held_out: bool = False
    """Items for evaluation: none of them is made from a seed that training has."""
    system_prompt: str | None = None
    """The system's message, or without a chat template a text before each question."""

    def rules(self) -> Iterator[Rule]:
        """Seeds of training end where those of held-out items begin."""
        yield self.size > 0, "size", "must be positive", "give the number of items"
        yield self.seed >= 0, "seed", "must not be negative", "give another seed"
        within = self.seed + self.size <= HELD_OUT
        yield within, "seed", f"plus size must be at most {HELD_OUT}", "give smaller numbers"
        own = not {"seed", "size"} & set(self.task_parameters)
        fix = "set seed and size beside the parameters"
        yield own, "task_parameters", "must not have seed or size", fix


class TaskPrompts:
    """The items of a task; a `PromptSet`.

    Args:
        config: Which.
        maker: Makes prompts of them. Where it has a limit of length, every item is made once here,
            so that a long one is an error now, or is left out.

    Attributes:
        num_long: Items that were left out since they are too long.

    Raises:
        ConfigError: There is no such task, or it refuses its parameters.
        BadRowsError: An item is too long or cannot be encoded, or all were left out.
    """

    def __init__(self, config: TaskConfig, maker: PromptMaker) -> None:
        self._config = config
        self._maker = maker
        self._seed = config.seed + (HELD_OUT if config.held_out else 0)
        parameters = config.task_parameters
        try:
            self._task = make_task(config.task, parameters, self._seed, config.size)
        except ValueError as error:
            fix = "see the tasks and configs of reasoning-gym"
            raise ConfigError([Violation("task", str(error), config.task, fix)]) from error
        self._items = np.arange(config.size)
        if maker.config.max_prompt_length is not None:
            self._items = np.array([i for i in range(config.size) if self._fits(i)], np.int64)
        self.num_long = config.size - len(self._items)
        if not len(self._items):
            rule = "must have a prompt that is short enough"
            fault = BrokenRuleError("task", rule, config.task, "raise the most tokens of a prompt")
            raise self._error(fault, 0)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def fingerprint(self) -> str:
        """The same for the same items, as far as the first few and the config tell."""
        first = self.read(range(min(8, len(self))))
        config = self._config
        told = [config.task, config.task_parameters, self._seed, config.size, len(self)]
        told += [prompt.prompt_ids.tolist() for prompt in first]
        text = json.dumps(told, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, positions: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions, in this order.

        Raises:
            BadRowsError: An item cannot be made or encoded.
        """
        return [self._prompt(int(self._items[position])) for position in positions]

    def _fits(self, item: int) -> bool:
        try:
            self._make(item)
        except LongPromptError as fault:
            if self._maker.config.long_prompts == "drop":
                return False
            raise self._error(fault, item + 1) from None
        except BrokenRuleError as fault:
            raise self._error(fault, item + 1) from None
        return True

    def _prompt(self, item: int) -> Prompt:
        try:
            return self._make(item)
        except BrokenRuleError as fault:
            raise self._error(fault, item + 1) from None

    def _make(self, item: int) -> Prompt:
        config = self._config
        try:
            entry = self._task[item]
        except Exception as error:  # a task runs code of its author
            rule = f"must make item {item} ({type(error).__name__}: {error})"
            raise BrokenRuleError("task", rule, config.task, "choose other parameters") from error
        metadata: Mapping[str, Any] = {
            "task": config.task,
            "task_parameters": config.task_parameters,
            "seed": self._seed,
            "size": config.size,
            "item": item,
        }
        given = self._with_system_prompt(entry["question"])
        return self._maker.make(given, entry["answer"], metadata, f"task {config.task}:{item}")

    def _with_system_prompt(self, question: str) -> Any:
        system = self._config.system_prompt
        if system is None:
            return question
        if not self._maker.config.apply_chat_template:
            return f"{system}\n\n{question}"
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    def _error(self, fault: BrokenRuleError, line: int) -> BadRowsError:
        return BadRowsError([error_of(fault, f"task {self._config.task}", line)], 1, "prompt data")
