"""What scores a response: the functions that are built in, and how one of the user's is found.

Imported by the processes that score, so it imports little; neither torch nor megatron-core.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from megatron.rl.extras import import_extra
from megatron.rl.tasks import make_task

BUILT_IN = ("exact", "math")
TASK_PREFIX = "reasoning-gym:"


@dataclass(frozen=True, eq=False)
class RewardInput:
    """One response and all that is known of it."""

    index: int
    """The sample's number, unique in the run."""
    response: str
    """Decoded, without special tokens."""
    prompt: str | None = None
    """The prompt's text as it was given; None where messages or ids were."""
    messages: Sequence[Mapping[str, str]] | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [P]."""
    response_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 [R]: what was drawn, the stop token included."""
    status: Literal["completed", "truncated", "aborted"] = "completed"


Reward = Callable[[RewardInput], Any]
"""Gives a finite number, or a dict of finite numbers by name."""


def load_reward(name: str) -> Reward:
    """Find a reward function.

    Args:
        name: exact, math, reasoning-gym:TASK or module:function.

    Raises:
        ModuleNotFoundError: A package is not installed; the message names the extra.
        ValueError: There is no such function, or it does not take one argument.
    """
    if name == "exact":
        return exact
    if name == "math":
        return _load_math()
    if name.startswith(TASK_PREFIX):
        return TaskReward(name.removeprefix(TASK_PREFIX))
    return _load_own(name)


def extract_answer(response: str) -> str:
    """The text in the last `<answer>...</answer>`, or the whole response, without outer space."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end) if end >= 0 else -1
    found = response[start + len("<answer>") : end] if start >= 0 else response
    return found.strip()


def exact(sample: RewardInput) -> float:
    """1 where the answer is the label, letter by letter; else 0."""
    return float(extract_answer(sample.response) == _label_of(sample).strip())


class TaskReward:
    """A task of reasoning-gym scores the answer, in [0, 1].

    Args:
        name: The task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._task = make_task(name, {}, 0, 1)

    def __call__(self, sample: RewardInput) -> float:
        """The task's own score; items that this package made are made again, others are as given.

        Raises:
            ValueError: The sample is from another task, or has no label.
        """
        metadata = sample.metadata
        if metadata.get("task", self._name) != self._name:
            rule = f"must be of the task {self._name}"
            raise ValueError(f"metadata {rule}: task={metadata['task']!r}")
        task = self._task
        if "item" in metadata:
            parameters = json.dumps(metadata["task_parameters"], sort_keys=True)
            made = (self._name, parameters, metadata["seed"], metadata["size"])
            task, entry = _task(*made), _item(*made, metadata["item"])
        else:
            entry = {"question": sample.prompt, "answer": _label_of(sample), "metadata": metadata}
        return float(task.score_answer(extract_answer(sample.response), entry))


def reward_of(value: Any, reward_key: str | None) -> tuple[float, dict[str, float]]:
    """What a function gave, checked.

    Args:
        value: A number, or a dict of numbers.
        reward_key: The part of a dict that is the reward (None: a number is expected).

    Returns:
        The reward, and all parts of a dict.

    Raises:
        ValueError: It is something else, or not finite.
    """
    if not isinstance(value, Mapping):
        if reward_key is not None:
            raise ValueError(f"reward must be a dict, since reward_key={reward_key}: {value!r}")
        return _finite("reward", value), {}
    parts = {str(name): _finite(str(name), part) for name, part in value.items()}
    names = ", ".join(parts) or "none"
    if reward_key is None:
        raise ValueError(f"reward must be a number, or reward_key one of its parts: {names}")
    if reward_key not in parts:
        raise ValueError(f"reward_key must be one of the reward's parts ({names}): {reward_key!r}")
    return parts[reward_key], parts


def _finite(name: str, value: Any) -> float:
    number = value.item() if hasattr(value, "item") and np.size(value) == 1 else value
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number: {name}={value!r:.80}")
    return float(number)


def _label_of(sample: RewardInput) -> str:
    if sample.label is None:
        raise ValueError("label must be given (--label-key names its field): label=None")
    return sample.label


def _load_math() -> Reward:
    """math-verify, without its own time limits: these use SIGALRM, and the pool has one."""
    library = import_extra("math_verify", "tasks", "the reward math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # says so at every call

    def same_value(sample: RewardInput) -> float:
        label = _label_of(sample)
        marked = any(mark in label for mark in ("$", "\\boxed", "\\(", "\\["))
        gold = library.parse(label if marked else f"${label}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"label must be a mathematical expression: label={label!r:.80}")
        found = library.parse(sample.response, parsing_timeout=None)
        return float(library.verify(gold, found, timeout_seconds=None))

    return same_value


def _load_own(name: str) -> Reward:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward must name a module that can be imported ({why})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward must name a function of {module.__file__}: {function_name!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward must name a plain function, not an async one: {name!r}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(f"reward must name a function of one argument ({error})") from error
    except ValueError:  # some functions written in C do not tell
        pass
    return function


@lru_cache(maxsize=8)
def _task(name: str, parameters: str, seed: int, size: int) -> Any:
    """The task that made an item; some choose an item by its place among all."""
    return make_task(name, json.loads(parameters), seed, size)


@lru_cache(maxsize=64)
def _item(name: str, parameters: str, seed: int, size: int, item: int) -> dict[str, Any]:
    """The item of a task; the samples of a group ask for the same one."""
    return _task(name, parameters, seed, size)[item]
