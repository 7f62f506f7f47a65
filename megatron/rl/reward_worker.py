"""A process that scores responses one after the other, and may be killed while it does.

It reads pickles from its standard input and answers on its standard output; what a reward function
prints goes to standard error instead.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from threading import Thread
from typing import BinaryIO

from megatron.rl.reward_functions import Reward, RewardInput, load_reward, reward_of

COMMAND = (
    "import os, pickle; requests = os.fdopen(os.dup(0), 'rb'); import sys;"
    " sys.path[:] = pickle.load(requests);"
    " from megatron.rl.reward_worker import serve; serve(requests)"
)

Answer = tuple[float, dict[str, float]] | str
"""The reward and its parts, or why there is none."""
READY = "ready"
PARENT_SECONDS = 1.0
"""How often a process looks whether its parent is there."""


def serve(requests: BinaryIO) -> None:
    """Load a reward function, then answer one request after the other until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    name, reward_key = pickle.load(requests)
    try:
        function = load_reward(name)
    except Exception as error:  # told to the parent, which knows what to do
        _answer(answers, f"{error}")
        return
    _answer(answers, READY)
    while True:
        try:
            sample = pickle.load(requests)
        except EOFError:
            return
        _answer(answers, _score(function, sample, reward_key))


def _end_with(parent: int) -> None:
    """End when the parent is gone, which can kill nobody then; with all that was started here."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _score(function: Reward, sample: RewardInput, reward_key: str | None) -> Answer:
    try:
        return reward_of(function(sample), reward_key)
    except (Exception, SystemExit) as error:  # one sample's failure is not the run's
        return f"{type(error).__name__}: {error}"


def _answer(answers: BinaryIO, answer: Answer) -> None:
    pickle.dump(answer, answers)
    answers.flush()
