"""What is asked of an engine, and what it answers: ids in, ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np


class EngineError(Exception):
    """An engine did not do what it was asked; the message says which one, what and the fix."""


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn, token by token.

    Raises:
        ValueError: A value that cannot be.
    """

    max_response_length: int
    """Most tokens of a response, the stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token, at the log-probs of temperature 1."""
    top_p: float = 1.0
    """Only the likeliest tokens that hold this much probability are drawn from."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 0 is no limit."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which belongs to it."""
    max_length: int | None = None
    """Most tokens of prompt and response together; None is no limit."""

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        rules = {
            "max_response_length must be positive": self.max_response_length > 0,
            "temperature must be >= 0 and finite": 0 <= self.temperature < float("inf"),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be >= 0": self.top_k >= 0,
        }
        for rule, holds in rules.items():
            if not holds:
                name = rule.split()[0]
                raise ValueError(f"{rule}: {name}={getattr(self, name)}")

    @property
    def keeps_all(self) -> bool:
        """Whether every token of the vocabulary can be drawn."""
        return self.top_p == 1 and self.top_k == 0


@dataclass(frozen=True, eq=False)
class Request:
    """One response that is wanted."""

    index: int
    """The sample's number, unique in the run."""
    prompt_ids: np.ndarray
    """int64 [P], P >= 1."""
    seed: tuple[int, ...]
    """What the draws depend on: the same seed, weights and prompt give the same response, whatever
    is asked for beside it. Engines that cannot promise it may use it as a hint."""


@dataclass(frozen=True, eq=False)
class Completion:
    """One response."""

    index: int
    """The request's."""
    tokens: np.ndarray
    """The response's ids, int64 [R]; R may be 0 where `status` is aborted."""
    log_probs: np.ndarray
    """Of each token among those that could be drawn, at the temperature, nats, float32 [R]."""
    status: Literal["completed", "truncated", "aborted"]
    """completed: ended by a stop token; truncated: by a limit; aborted: by the engine."""
    kept_ids: np.ndarray | None = None
    """Ids that could be drawn, all response tokens end to end, int64 [K]; None: all of them."""
    kept_offsets: np.ndarray | None = None
    """Token i could be one of `kept_ids[kept_offsets[i]:kept_offsets[i + 1]]`, int64 [R + 1]."""
    weight_version: int | None = None
    """Optimizer steps that the weights it was drawn with had taken; None: the engine says none."""


class Engine(Protocol):
    """Draws responses. Every rank holds one and makes the same calls in the same order."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one response to each request.

        Args:
            requests: The same on every rank.
            sampling: How.

        Returns:
            Those that this rank drew, in the order of the requests: each request is answered on
            exactly one rank.

        Raises:
            EngineError: A request could not be answered.
        """
        ...

    def refresh(self, weight_version: int) -> None:
        """Draw from the weights that the model in training has now.

        Args:
            weight_version: Optimizer steps they have taken.

        Raises:
            EngineError: The engine does not hold them.
        """
        ...

    def close(self) -> None:
        """Let go of what the engine holds."""
        ...
