"""The job's rendezvous store as a board where ranks leave word: every question has a bound.

torch's client waits without end for the answer of a store whose process is stopped, so questions
are asked on a thread that is left behind when the time is over. Writing needs no answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.rl.signs import Sign

T = TypeVar("T")


class BoardError(Exception):
    """The store does not answer; the message says who keeps it."""


class Board:
    """Signs of all ranks, and which of them speaks for the job.

    Every question raises BoardError where the store does not answer in time.

    Args:
        store: the job's; the board has connections of its own, since one is not for two threads.
        keeper: who keeps the store, for messages.
        patience_s: seconds that an answer may take.
    """

    def __init__(self, store: dist.Store, *, keeper: str, patience_s: float = 5.0) -> None:
        self._written = dist.PrefixStore("watch", store).clone()
        self._asked = dist.PrefixStore("watch", store).clone()
        self._keeper = keeper
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._is_lost = False

    def begin(self) -> None:
        """Forget who spoke in an earlier attempt at the job; rank 0 asks for it."""
        self._ask(lambda: [self._asked.delete_key(key) for key in ("speaker", "spoken")])

    def leave(self, rank: int, sign: Sign) -> None:
        """Write this rank's sign; nothing is said where the store is gone."""
        if self._is_lost:
            return
        try:
            self._written.set(str(rank), sign.encode())
        except RuntimeError:  # DistNetworkError: whoever asks next will say so
            self._is_lost = True

    def read(self, ranks: Sequence[int]) -> dict[int, Sign | None]:
        """The last sign of each rank, None where there is none."""
        return self._ask(lambda: self._read([str(rank) for rank in ranks]))

    def claim(self, rank: int) -> int:
        """The rank that speaks for the job: this one, if it is the first to ask."""
        return int(self._ask(lambda: self._asked.compare_set("speaker", "", str(rank))))

    def leave_word(self) -> None:
        """Say that the speaker has spoken."""
        self._ask(lambda: self._asked.set("spoken", "1"))

    def has_word(self) -> bool:
        """Whether the speaker has spoken."""
        return self._ask(lambda: self._asked.check(["spoken"]))

    def _read(self, keys: list[str]) -> dict[int, Sign | None]:
        there = keys if self._asked.check(keys) else [k for k in keys if self._asked.check([k])]
        found = dict(zip(there, self._asked.multi_get(there) if there else [], strict=True))
        return {int(key): Sign.decode(found[key]) if key in found else None for key in keys}

    def _ask(self, question: Callable[[], T]) -> T:
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(question())
            except RuntimeError:
                self._is_lost = True

        with self._turn:
            if not self._is_lost:
                thread = threading.Thread(target=ask, daemon=True, name="board")
                thread.start()
                thread.join(self._patience_s)
            if not answer:
                self._is_lost = True
                raise BoardError(f"{self._keeper}, which keeps the job's store, does not answer")
        return answer[0]
