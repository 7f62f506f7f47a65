"""What one rank does for all, and what all do for one: a failure anywhere is raised everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_first_rank(function: Callable[[], T]) -> T:
    """What `function` gives on rank 0, on every rank. One broadcast over the whole job.

    Raises:
        Exception: what it raises there, on every rank alike.
    """
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        outcome[0] = _outcome(function)
    dist.broadcast_object_list(outcome, src=0)
    return _value(outcome[0])


def gathered(function: Callable[[], T]) -> list[T] | None:
    """What `function` gives on every rank, by rank, on rank 0; None elsewhere.

    `function` must not communicate with ranks that may have failed in it. One gather and one
    broadcast over the whole job.

    Raises:
        Exception: of the lowest rank that raised one, on every rank alike.
    """
    is_first = dist.get_rank() == 0
    outcomes: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(_outcome(function), outcomes, dst=0)
    on_first_rank(lambda: next((_value(o) for o in outcomes if o[1] is not None), None))
    return [value for value, _ in outcomes] if is_first else None


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _value(outcome: tuple[T, Exception | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value
