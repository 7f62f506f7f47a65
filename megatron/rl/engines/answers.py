"""What the answers of all servers have in common, and the checks that each must pass."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron.rl.engines.calls import PassingError, shown
from megatron.rl.engines.engine import Completion, Request, Sampling

NUM_LIKELIEST = 5
"""Likeliest tokens whose log-probs a server is asked for, to learn what it calls a log-prob."""
MAX_ROUNDING = 1e-3
"""A log-prob may be above 0 by rounding, up to this, in nats; it is then 0."""
MIN_LOG_PROB = -9998.0
"""Servers write -9999 where they mean minus infinity."""


class HalfAnswerError(PassingError):
    """The answer is not whole, or not possible."""


class Dialect(Protocol):
    """The requests and answers of one kind of server."""

    @property
    def path(self) -> str:
        """Of the POST that draws a response."""
        ...

    def body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """What is posted to draw one response."""
        ...

    def completion(
        self, answer: Mapping[str, Any], request: Request, sampling: Sampling
    ) -> Completion:
        """The answer, checked.

        Raises:
            HalfAnswerError: It is not whole.
            RefusedError: A server of this kind cannot give what is needed.
        """
        ...

    def likeliest_body(self, request: Request, temperature: float) -> dict[str, Any]:
        """What is posted to learn the log-probs of the likeliest first tokens."""
        ...

    def likeliest(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Log-probs of the likeliest first tokens, nats, by a name of the token.

        Raises:
            HalfAnswerError: It is not whole.
        """
        ...

    def version(self, answer: Mapping[str, Any]) -> str | None:
        """The name of the weights that the answer was drawn with; None: it says none.

        Raises:
            HalfAnswerError: It is not whole.
        """
        ...

    def update_body(self, directory: str, version: int) -> dict[str, Any]:
        """What is posted to make the server load weights."""
        ...


@dataclass(frozen=True, eq=False)
class Drawn:
    """A response as a server told it."""

    tokens: np.ndarray
    """int64 [R]."""
    log_probs: np.ndarray
    """float32 [R], nats."""
    finish: str
    """stop, length, or something else."""
    kept_ids: np.ndarray | None = None
    """int64 [K]."""
    kept_offsets: np.ndarray | None = None
    """int64 [R + 1]."""


def max_new_tokens(request: Request, sampling: Sampling) -> int:
    """Most tokens that the response may have; 0 or less where the prompt leaves no room."""
    if sampling.max_length is None:
        return sampling.max_response_length
    return min(sampling.max_response_length, sampling.max_length - len(request.prompt_ids))


def restricts(sampling: Sampling) -> bool:
    """Whether top-p or top-k leave tokens out; temperature 0 has no use for either."""
    return sampling.temperature > 0 and not sampling.keeps_all


def seed_of(request: Request) -> int:
    """The request's seed as one number of 31 bits."""
    return int(np.random.SeedSequence(request.seed).generate_state(1)[0]) >> 1


def completion_of(
    drawn: Drawn, request: Request, sampling: Sampling, version: str | None
) -> Completion:
    """A completion, where what was drawn can be one.

    Raises:
        HalfAnswerError: It cannot.
    """
    num_tokens, limit = len(drawn.tokens), max_new_tokens(request, sampling)
    if num_tokens != len(drawn.log_probs):
        raise HalfAnswerError(f"{num_tokens} ids with {len(drawn.log_probs)} log-probs")
    if drawn.finish not in ("stop", "length"):
        raise HalfAnswerError(f"the response was not finished: finish_reason={drawn.finish!r}")
    if not 1 <= num_tokens <= limit:
        raise HalfAnswerError(f"a response must have 1 to {limit} tokens: tokens={num_tokens}")
    is_stop = np.isin(drawn.tokens, sampling.stop_token_ids)
    if is_stop[:-1].any():
        raise HalfAnswerError(
            f"the response must end with its first stop token: tokens={shown(str(drawn.tokens))}, "
            f"stop_token_ids={sampling.stop_token_ids}"
        )
    # A server may call a stop token in the last place that there is the end by length.
    is_completed = drawn.finish == "stop" or bool(is_stop[-1])
    return Completion(
        index=request.index,
        tokens=drawn.tokens,
        log_probs=drawn.log_probs,
        status="completed" if is_completed else "truncated",
        kept_ids=drawn.kept_ids,
        kept_offsets=drawn.kept_offsets,
        weight_version=int(version) if version is not None and version.isdecimal() else None,
    )


def part(answer: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of an answer, of this type.

    Raises:
        HalfAnswerError: Not there, or of another type.
    """
    if name not in answer:
        raise HalfAnswerError(f"the answer lacks {name}: it has {shown(', '.join(answer))}")
    value = answer[name]
    if not isinstance(value, kind):
        raise HalfAnswerError(
            f"{name} must be of type {kind.__name__}: type={type(value).__name__}"
        )
    return value


def ids_of(values: Sequence[object], name: str, vocab_size: int | None) -> np.ndarray:
    """Token ids, int64.

    Raises:
        HalfAnswerError: One that is none.
    """
    limit = 2**31 if vocab_size is None else vocab_size
    for position, value in enumerate(values):
        if type(value) is not int or not 0 <= value < limit:
            rule = f"must be a token id below {limit}"
            raise HalfAnswerError(f"{name} {rule}: {name}[{position}]={value!r}")
    return np.array(values, dtype=np.int64)


def log_probs_of(values: Sequence[Any], name: str) -> np.ndarray:
    """Log-probs in nats, float32.

    Raises:
        HalfAnswerError: One that is none.
    """
    for position, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not MIN_LOG_PROB < value <= MAX_ROUNDING:
            rule = "must be a finite log-prob, at most 0"
            raise HalfAnswerError(f"{name} {rule}: {name}[{position}]={value!r}")
    return np.minimum(np.array(values, dtype=np.float32), np.float32(0))


def integers_of(value: object, name: str) -> list[int]:
    """A list of integers, which a server may have packed as base64 of little-endian int32.

    Raises:
        HalfAnswerError: It is neither.
    """
    if isinstance(value, str):
        try:
            return np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4").tolist()
        except (binascii.Error, ValueError) as error:
            raise HalfAnswerError(f"{name} must be base64 of int32: {error}") from error
    if not isinstance(value, list):
        raise HalfAnswerError(f"{name} must be of type list: type={type(value).__name__}")
    return value


def check_offsets(offsets: np.ndarray, num_tokens: int, num_ids: int) -> None:
    """Refuse offsets that do not cut the kept ids into one set a token.

    Raises:
        HalfAnswerError: They do not.
    """
    rises = bool((np.diff(offsets) >= 0).all())
    if len(offsets) != num_tokens + 1 or offsets[0] != 0 or offsets[-1] != num_ids or not rises:
        raise HalfAnswerError(
            f"offsets of kept ids must be {num_tokens + 1} and rise from 0 to {num_ids}: "
            f"offsets={shown(str(offsets.tolist()))}"
        )
