"""Every rank tells where it is, so that a wait has a name and an end.

Signs are left on the board at every change, and by a thread at every beat; nothing waits for them.
A second thread says on rank 0 whom a slow step waits for, and ends the process where the training
thread stands still beyond the timeout in a call that never raises.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Self

import torch.distributed as dist

from megatron.rl.board import Board, BoardError
from megatron.rl.logging import log_error, log_info, log_warning
from megatron.rl.signs import Sign, Survey, listed

EXIT_STUCK = 4
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pace:
    """Times of the watch, in seconds.

    Args:
        beat: between two signs.
        silence: without a sign before a rank counts as silent.
        slow: a step is not slow before this,
        slow_factor: nor before this many times the usual step.
    """

    beat: float = 1.0
    silence: float = 5.0
    slow: float = 30.0
    slow_factor: float = 5.0


class Watch:
    """One rank's place in the run, told to the others while the context is open.

    Without a board it only remembers the place.

    Args:
        rank: rank in the job.
        world_size: ranks of the job.
        board: where ranks leave word.
        timeout_s: how long a rank may wait for another.
        pace: times of the watch.
        launcher: the process that started this one and would end it; where it is gone, the rank
            stops as if it had got SIGTERM. None: nobody would.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        board: Board | None = None,
        timeout_s: float = 600.0,
        pace: Pace | None = None,
        launcher: int | None = None,
    ) -> None:
        self.rank = rank
        self._ranks = range(world_size)
        self._board = board
        self._timeout_s = timeout_s
        self._pace = pace or Pace()
        self._launcher = launcher
        self._sign = Sign(since=time.time())
        self._moved = self._step_began = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._next_line = self._pace.slow
        self._speaks = False
        self._is_telling = False
        self._beat = 0
        self._leaving = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._main = threading.get_ident()
        for loop in (self._tell, self._look):
            thread = threading.Thread(target=loop, daemon=True, name=f"watch {loop.__name__}")
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        ended = "done" if error is None else f"{type(error).__name__}: {_in_short(error)}"
        self._sign = replace(self._sign, ended=ended)
        self._closed.set()
        for thread in self._threads:
            thread.join(self._pace.silence)

    def enter(self, step: int, phase: str, samples: str = "") -> None:
        """The rank begins a phase of a step."""
        now = time.monotonic()
        if step != self._sign.step:
            if self._sign.step:
                self._step_seconds.append(now - self._step_began)
            self._step_began = now
            usual = self._usual or 0.0
            self._next_line = max(self._pace.slow, self._pace.slow_factor * usual)
        number = self._sign.number + 1
        self._sign = Sign(step, phase, samples, number, since=time.time())
        self._moved = now
        self._leave_sign()

    @property
    def place(self) -> str:
        """This rank's, for messages: `rank 3, step 12, training (samples [4, 5])`."""
        return f"rank {self.rank}, {self._sign.place}"

    def tick(self) -> None:
        """The rank begins a micro-batch of the phase."""
        self._sign = replace(self._sign, micro_batches=self._sign.micro_batches + 1)
        self._moved = time.monotonic()

    def explain(self, where: str, error: BaseException) -> str:
        """The message of an error of this rank: in full from one rank of the job.

        Where the error is that another rank was lost, it says which one, and what it did last.
        """
        if not is_lost_peer(error):
            with suppress(BoardError):
                self._claim()
                self._leave_word()
            return f"{where}: {type(error).__name__}: {error}"
        text = f"{where}: {type(error).__name__}: {_in_short(error)}"
        return self._said_once(
            text, f"{where}: ended with the others ({type(error).__name__})", asks_others=True
        )

    def once(self, text: str, short: str) -> str:
        """A message that every rank has: in full from one rank of the job."""
        return self._said_once(text, short, asks_others=False)

    def _said_once(self, text: str, short: str, *, asks_others: bool) -> str:
        self._is_telling = True
        try:
            speaker = self._claim()
        except BoardError as error:
            return f"{error}\n  so that {text}" if asks_others else text
        if speaker != self.rank:
            self._await_word()
            return f"{short}; rank {speaker} says why"
        if asks_others and self._board is not None:
            text = self._with_suspects(text)
        with suppress(BoardError):  # the others speak for themselves then
            self._leave_word()
        return text

    def _with_suspects(self, text: str) -> str:
        try:
            survey = self._survey()
        except BoardError as error:
            return f"{error}\n  so that {text}"
        if suspects := survey.lost() or survey.behind(self.rank):
            return f"{listed(suspects)}\n  so that {text}"
        others = listed(survey.elsewhere(self.rank))
        return f"{text}\n  {others or 'all ranks live and are in the same place'}"

    def _claim(self) -> int:
        if self._board is None or self._speaks:
            return self.rank
        speaker = self._board.claim(self.rank)
        self._speaks = speaker == self.rank
        return speaker

    def _leave_word(self) -> None:
        if self._board is not None and self._speaks:
            self._board.leave_word()

    def _await_word(self) -> None:
        """Let the speaker end first: a launcher ends the job with its first rank."""
        end = time.monotonic() + 3 * self._pace.silence
        with suppress(BoardError):
            while not self._board.has_word() and time.monotonic() < end:
                time.sleep(self._pace.beat / 4)

    def _survey(self) -> Survey:
        """Read all signs, until each rank has told a new one or has been silent for long enough."""
        if self._board is None:
            return Survey({self.rank: self._sign}, frozenset())
        end = time.monotonic() + self._pace.silence
        first = self._board.read(self._ranks)
        while True:
            signs = self._board.read(self._ranks)
            silent = frozenset(
                rank for rank in self._ranks if signs[rank] == first[rank] and rank != self.rank
            )
            if not silent or time.monotonic() > end or self._closed.wait(self._pace.beat / 4):
                return Survey(signs, silent)

    def _tell(self) -> None:
        """Leave a sign at every beat, and a last one."""
        while not self._closed.wait(self._pace.beat):
            self._leave_sign()
        self._leave_sign()

    def _leave_sign(self) -> None:
        """Without a wait: it goes to the store, and no answer comes."""
        if self._board is None:
            return
        stands = time.monotonic() - self._moved > self._pace.silence
        frame = _frame_of(self._main) if stands else ""
        with self._leaving:
            self._beat += 1
            sign = replace(self._sign, beat=self._beat, told=time.time(), frame=frame)
            self._board.leave(self.rank, sign)

    def _look(self) -> None:
        """Say whom a slow step waits for; end a process that stands still."""
        while not self._closed.wait(self._pace.beat):
            if time.monotonic() - self._step_began > self._next_line and self.rank == 0:
                self._say_slow()
            if self._launcher is not None and os.getppid() != self._launcher:
                self._stop_orphan()
            if self._is_stuck(1.1 * self._timeout_s + self._pace.silence):
                self._end_stuck()

    def _stop_orphan(self) -> None:
        """Nobody else would end this rank, and a job that is started again writes where it does."""
        log_warning(f"the launcher (process {self._launcher}) is gone: stopping as after SIGTERM")
        self._launcher = None
        os.kill(os.getpid(), signal.SIGTERM)

    def _is_stuck(self, limit_s: float) -> bool:
        stood = time.monotonic() - self._moved
        return len(self._ranks) > 1 and not self._is_telling and stood > limit_s

    def _say_slow(self) -> None:
        try:
            survey = self._survey()
            found = survey.lost() or survey.behind(self.rank) or survey.elsewhere(self.rank)
            about = listed(found) or "no rank is behind"
        except BoardError as error:
            about = str(error)
        if self._closed.is_set():
            return
        seconds = time.monotonic() - self._step_began
        usual = "" if self._usual is None else f" (usual {self._usual:.1f} s)"
        log_info(f"{self._sign.place}: {seconds:.0f} s so far{usual}; {about}")
        self._next_line = 2 * seconds

    def _end_stuck(self) -> None:
        """Nothing else ends a process whose main thread waits in a call that does not raise."""
        before = self._sign.position
        sign = replace(self._sign, frame=_frame_of(self._main))
        where = f"rank {self.rank}, {sign.describe()}"
        text = f"{where}: stands still beyond the timeout ({self._timeout_s:.0f} s), process ended"
        waits = self._waits_for_others() or self._is_stuck(2 * self._timeout_s)
        if not waits or self._sign.position != before or self._is_telling or self._closed.is_set():
            return
        short = f"{where}: stands still, process ended"
        log_error(self._said_once(text, short, asks_others=True), every_rank=True)
        os._exit(EXIT_STUCK)

    def _waits_for_others(self) -> bool:
        try:
            survey = self._survey()
        except BoardError:  # its keeper is lost
            return True
        return bool(survey.lost() or survey.behind(self.rank))

    @property
    def _usual(self) -> float | None:
        return median(self._step_seconds) if self._step_seconds else None


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a collective's or the store's, and so another rank's doing."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def _in_short(error: BaseException) -> str:
    """The first line of an error, without gloo's source file and advice."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[\S*gloo/\S*\] ", "", line).partition(". This is typically")[0]


def _frame_of(thread: int) -> str:
    """Where a thread is: the innermost line, and the innermost of this package."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    inner, ours = frame, frame
    while ours is not None and _HERE not in Path(ours.f_code.co_filename).parents:
        ours = ours.f_back
    if ours is None or ours is inner:
        return _line_of(inner)
    return f"{_line_of(inner)}, called from {_line_of(ours)}"


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
