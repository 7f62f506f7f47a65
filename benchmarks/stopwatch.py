"""CPU seconds of the trainer's parts, by wrapping the functions that they are."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from megatron.rl import computed, rollout, trainer
from megatron.rl.logging import RunLogger
from megatron.rl.sources.files import RolloutFiles
from megatron.rl.step import Trainee
from megatron.rl.trainer import Trainer

MODEL = ("forward and backward", "optimizer")
REST = "rest of the loop"
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    MODEL[0]: ((Trainee, "_run"),),
    MODEL[1]: ((Trainee, "_zero_gradients"), (Trainee, "_update")),
    "reading": ((RolloutFiles, "read"),),
    "weights and packing": ((rollout, "plan_rollout"),),
    "advantages": ((trainer, "compute"),),
    "guard": ((Trainer, "_agree"),),
    "batching": ((trainer, "micro_batch_of"), (computed, "build_micro_batch")),
    "metrics of the loss": ((Trainee, "_reduce"),),
    "numbers of the step": (
        (trainer, "step_scalars"),
        (trainer, "packing_scalars"),
        (trainer, "console_line"),
    ),
    "logging": ((RunLogger, "log_step"),),
}
"""The functions of each part; where one calls another, each has its own time alone."""


class Stopwatch:
    """Seconds of this process's processor time by part, without those of parts within it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block's time for a part."""
        start = time.process_time()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.process_time() - start
            self._seconds[name] += whole - self._inner.pop()
            self._inner[-1] += whole

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted for a part."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return counted


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """Count the parts of every trainer of this process."""
    stopwatch = Stopwatch()
    with ExitStack() as stack:
        for name, functions in PARTS.items():
            for owner, attribute in functions:
                counted = stopwatch.wrap(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, counted))
        yield stopwatch
