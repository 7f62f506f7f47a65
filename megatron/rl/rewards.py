"""Scores responses in processes of their own, each within a time limit that holds.

A function that hangs, crashes or ends its process costs its sample the reward, and nothing else:
the process is killed, together with all that it started, and another one takes its place.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Timer
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from megatron.rl.reward_functions import BUILT_IN, TASK_PREFIX, RewardInput
from megatron.rl.reward_worker import COMMAND, READY, Answer
from slime_loss.checked_config import CheckedConfig, ConfigError, Rule, Violation

START_SECONDS = 300.0
"""A process may take so long to import a reward function."""
NUM_ERRORS_KEPT = 5


@dataclass(frozen=True)
class RewardConfig(CheckedConfig):
    """What scores responses, and how long it may take.

    Raises:
        ConfigError: A field has a value that cannot be.
    """

    reward: str
    """exact, math, reasoning-gym:TASK, or module:function."""
    reward_key: str | None = None
    """The part that is the reward, of a function that gives a dict."""
    reward_errors: Literal["skip", "error"] = "skip"
    """skip: samples whose scoring failed have no reward; error: they end the run."""
    time_limit: float = 10.0
    """Seconds for one response."""
    num_workers: int = 4
    """Responses scored at a time, each by a process."""

    def rules(self) -> Iterator[Rule]:
        """The name has a form that is known; numbers are positive."""
        is_task = self.reward.startswith(TASK_PREFIX) and self.reward != TASK_PREFIX
        if not is_task and self.reward not in BUILT_IN:
            holds, name, _, _ = self.names_function("reward")
            rule = f"must be one of {', '.join(BUILT_IN)}, {TASK_PREFIX}TASK or module:function"
            yield holds and self.reward != "", name, rule, "choose one of them"
        yield self.time_limit > 0, "time_limit", "must be positive", "give seconds"
        yield self.num_workers > 0, "num_workers", "must be positive", "give a number of processes"


@dataclass(frozen=True)
class SampleError:
    """Why a sample has no reward."""

    index: int
    """The sample's."""
    message: str

    def __str__(self) -> str:
        """`sample 7: why`."""
        return f"sample {self.index}: {self.message}"


class RewardError(Exception):
    """Responses could not be scored; the message names the first samples and why."""


@dataclass(frozen=True, eq=False)
class Rewards:
    """What became of n responses."""

    rewards: np.ndarray
    """float64 [n]; NaN where `scored` is False."""
    scored: np.ndarray
    """bool [n]: which responses have a reward."""
    parts: dict[str, np.ndarray]
    """By the names of a function's dict, float64 [n]; NaN where a response has no such part."""
    errors: tuple[SampleError, ...]
    """The first failures, in the order of the responses."""
    num_errors: int

    def part_means(self) -> dict[str, float]:
        """The mean of each part over the responses that have it."""
        return {name: float(np.nanmean(part)) for name, part in self.parts.items()}


class RewardPool:
    """Processes that score. Close it, or use it in a `with`.

    Args:
        config: By what.

    Raises:
        ConfigError: The function cannot be loaded.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers = [_Worker(config) for _ in range(config.num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(config.num_workers)
        try:
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """The pool itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the processes."""
        self.close()

    def score(self, samples: Sequence[RewardInput]) -> Rewards:
        """Score responses, several at a time.

        Takes at most n * time_limit / num_workers seconds, and the starts of processes that
        take the place of killed ones.

        Args:
            samples: Of any prompts; n of them.

        Returns:
            In the order of the samples.

        Raises:
            RewardError: A response could not be scored, and `reward_errors` is error.
            ConfigError: The function can no longer be loaded.
        """
        answers = list(self._threads.map(self._ask, samples))
        numbers = np.array([a[0] if isinstance(a, tuple) else np.nan for a in answers], np.float64)
        failures = [
            SampleError(sample.index, answer)
            for sample, answer in zip(samples, answers, strict=True)
            if isinstance(answer, str)
        ]
        if failures and self._config.reward_errors == "error":
            raise RewardError(self._refusal(failures))
        return Rewards(
            rewards=numbers,
            scored=~np.isnan(numbers),
            parts=_parts(answers),
            errors=tuple(failures[:NUM_ERRORS_KEPT]),
            num_errors=len(failures),
        )

    def close(self) -> None:
        """End the processes, whatever they do; responses that wait for one are not scored."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.refuse()
        self._threads.shutdown()
        for worker in self._workers:
            worker.end()

    def _ask(self, sample: RewardInput) -> Answer:
        worker = self._idle.get()
        try:
            return worker.score(sample)
        finally:
            self._idle.put(worker)

    def _refusal(self, failures: Sequence[SampleError]) -> str:
        shown = [f"  {failure}" for failure in failures[:NUM_ERRORS_KEPT]]
        hidden = len(failures) - len(shown)
        lines = [f"reward {self._config.reward} failed for {len(failures)} sample(s):", *shown]
        return "\n".join(lines + ([f"  ... and {hidden} more"] if hidden else []))


class _Worker:
    """One process, started anew whenever it has ended."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._starting = Lock()

    def start(self) -> None:
        """Start the process and wait until it has loaded the function.

        Raises:
            ConfigError: It cannot.
            RewardError: The pool is closed.
        """
        with self._starting:  # and closing: a process that is not known would never end
            if self._closed:
                raise RewardError("the pool must be open to score: it was closed")
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that what it starts can be killed with it
            )
        given = (self._config.reward, self._config.reward_key)
        answer = self._exchange([sys.path, given], START_SECONDS, "import")
        if answer != READY:
            self.end()
            rule = f"must be a reward function ({answer})"
            fix = "check the name; python must find the module (PYTHONPATH)"
            raise ConfigError([Violation("reward", rule, self._config.reward, fix)])

    def score(self, sample: RewardInput) -> Answer:
        """Score one response, or say why not."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            self.start()
        return self._exchange([sample], self._config.time_limit, "score")

    def end(self) -> None:
        """Kill the process, together with all that it started."""
        process, self._process = self._process, None
        if process is not None:
            _kill_running(process)
            with suppress(BrokenPipeError), process:  # closes its pipes and waits for its end
                pass

    def refuse(self) -> None:
        """Kill the process, so that a thread which waits for it goes on, and start none again."""
        with self._starting:
            self._closed = True
        if self._process is not None:
            _kill_running(self._process)

    def _exchange(self, requests: Sequence[Any], limit: float, what: str) -> Answer:
        """Send requests and wait for an answer; the process is killed when the time is over.

        Killing it also ends a write or a read that waits for it.
        """
        process = self._process
        assert process is not None, "it was started"
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        expired = Event()

        def expire() -> None:
            expired.set()
            _kill(process)

        late = Timer(limit, expire)
        late.start()
        try:
            for request in requests:
                pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            answer = None
        finally:
            late.cancel()
            late.join()
        if answer is not None and not expired.is_set():
            return answer
        ended = _exit_of(process)  # waited for, or the next response would go to it
        if answer is not None:
            return answer
        late_by = f"took more than {limit:g} s to {what}"
        return late_by if expired.is_set() else f"its process ended ({ended})"


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    """How a process ended that answers no more; killed where it has not ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    _kill(process)  # what it started may go on without it
    code = process.wait()
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_running(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # else its number may be another one's by now
        _kill(process)


def _parts(answers: Sequence[Answer]) -> dict[str, np.ndarray]:
    found = [answer[1] if isinstance(answer, tuple) else {} for answer in answers]
    names = dict.fromkeys(name for parts in found for name in parts)
    return {
        name: np.array([parts.get(name, np.nan) for parts in found], np.float64) for name in names
    }
