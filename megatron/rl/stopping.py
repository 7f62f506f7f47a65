"""Why a run ends before its last step, and with which exit code."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import NoReturn

from megatron.rl.checkpoint_files import CheckpointError
from megatron.rl.config import CheckpointConfig
from megatron.rl.guard import SkippedStepsError, StepError
from megatron.rl.initialize import World
from megatron.rl.logging import log_error
from megatron.rl.samples import BadRowsError
from megatron.rl.watch import EXIT_STUCK


class Stop(IntEnum):
    """A reason to save and end; of several ranks' reasons the largest counts."""

    NONE = 0
    NO_ROLLOUT = 1
    INTERVAL = 2
    DURATION = 3
    SIGUSR1 = 4
    SIGTERM = 5
    SIGINT = 6

    @property
    def words(self) -> str:
        """What asked for the end, as the user knows it."""
        return _WORDS.get(self, self.name)


_WORDS = {
    Stop.NO_ROLLOUT: "no further rollout",
    Stop.INTERVAL: "--exit-interval",
    Stop.DURATION: "--exit-duration-in-mins",
}

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_SKIPPED = 3
EXIT_SIGNAL = 75  # EX_TEMPFAIL of sysexits.h: saved, run it again

FORESEEN = (BadRowsError, RuntimeError, OSError, ValueError)
"""What a lost peer, a full disk or bad input raise: their message is enough."""

EXIT_CODES = {
    EXIT_OK: "trained to the end, or to --exit-interval or --exit-duration-in-mins",
    EXIT_ERROR: "failed; the message names rank, step, phase and samples",
    EXIT_USAGE: "flags, rollout data or checkpoint refused; nothing was trained",
    EXIT_SKIPPED: "more than --max-skipped-steps steps were not finite",
    EXIT_STUCK: "waited beyond --distributed-timeout-minutes; the message names the rank",
    EXIT_SIGNAL: "stopped by SIGTERM, SIGUSR1 or Ctrl-C after saving; run again with --load",
}


SECONDS_FOR_RANK_0 = 5.0


class StopRequest:
    """Collects this rank's reasons to stop; asked once a step.

    Installs handlers for SIGTERM, SIGUSR1 and SIGINT: the step in flight is finished first. A
    second Ctrl-C does not wait.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._start = time.monotonic()
        self._signal = Stop.NONE
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._signal = max(self._signal, Stop[signal.Signals(number).name])
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def reason(self, step: int, steps_taken: int) -> Stop:
        """The reason of this rank to end.

        Args:
            step: steps of the run so far, those before a resume included.
            steps_taken: steps of this process: a resumed run takes at least one.
        """
        minutes = self._config.exit_duration_in_mins
        interval = self._config.exit_interval
        reason = self._signal
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            reason = max(reason, Stop.DURATION)
        if interval and steps_taken and step % interval == 0:
            reason = max(reason, Stop.INTERVAL)
        return reason


@contextmanager
def exit_with_message(world: World) -> Iterator[None]:
    """End the process with one message and the documented code on every error that has one.

    What all ranks know is said by rank 0; the others end later, since a launcher ends the job
    with its first rank. Errors that are nobody's mistake but ours keep their traceback.
    """
    try:
        yield
    except (BadRowsError, CheckpointError, ValueError) as error:
        _end(EXIT_USAGE, str(error), world)
    except SkippedStepsError as error:
        _end(EXIT_SKIPPED, str(error), world)
    except StepError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, FORESEEN):
            traceback.print_exception(error.__cause__)
        log_error(str(error), every_rank=True)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        _end(EXIT_SIGNAL, "interrupted; --load goes on from the last checkpoint", world)


def _end(code: int, message: str, world: World) -> NoReturn:
    log_error(message)
    if world.rank != 0:
        time.sleep(SECONDS_FOR_RANK_0)
    sys.exit(code)
