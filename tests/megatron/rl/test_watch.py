"""What a rank's watch says of others, once for the job, and that nothing of it waits for ever."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.rl import watch as watch_module
from megatron.rl.board import Board, BoardError
from megatron.rl.signs import Sign
from megatron.rl.watch import EXIT_STUCK, Pace, Watch, is_lost_peer

LOST = RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Connection closed. This is typically bad")
QUICK = Pace(beat=0.05, silence=1.0, slow=0.2, slow_factor=3.0)
KEEPER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@contextmanager
def watches(num_ranks: int, pace: Pace = QUICK) -> Iterator[list[Watch]]:
    """The watches of a whole job in one process; the test opens those of ranks that live."""
    store = dist.HashStore()
    boards = [Board(store, keeper="rank 0") for _ in range(num_ranks)]
    yield [Watch(rank, num_ranks, board, 600.0, pace) for rank, board in enumerate(boards)]


def test_without_a_board_a_watch_remembers_the_place() -> None:
    alone = Watch(3, 8)
    alone.enter(5, "training", "[1]")
    assert alone.place == "rank 3, step 5, training (samples [1])"
    assert alone.explain(alone.place, ValueError("x")).endswith("(samples [1]): ValueError: x")
    assert alone.explain("here", LOST) == "here: RuntimeError: Connection closed"
    assert alone.once("long", "short") == "long"


def test_a_lost_peer_is_named_by_one_rank_and_the_others_are_short() -> None:
    with watches(3) as (first, second, third):
        third.enter(4, "training", "[7, 8]")
        with first, second:
            first.enter(4, "training", "[1, 2]")
            second.enter(4, "training", "[3, 4]")
            text = second.explain(second.place, LOST)
            assert text.startswith("rank 2 gives no sign of life since ")
            assert "; it was in step 4, training (samples [7, 8]) since " in text
            assert text.endswith(
                "\n  so that rank 1, step 4, training (samples [3, 4]): RuntimeError: "
                "Connection closed"
            )
            assert first.explain(first.place, LOST) == (
                "rank 0, step 4, training (samples [1, 2]): ended with the others (RuntimeError); "
                "rank 1 says why"
            )


def test_a_rank_that_lives_and_is_behind_is_named_with_its_line() -> None:
    with watches(2) as (first, second), first:
        first.enter(2, "reading rollouts")
        first.enter(2, "step guard")
        with second:
            second.enter(2, "reading rollouts")
            time.sleep(QUICK.silence + 4 * QUICK.beat)  # it stands
            text = first.explain(first.place, LOST)
    assert text.startswith("rank 1 is behind, still in step 2, reading rollouts since ")
    assert ".py:" in text.partition(", at ")[2]


def test_a_rank_that_left_a_collective_out_is_named_by_the_one_that_waits() -> None:
    with watches(2) as (first, second), first, second:
        first.enter(2, "step guard")
        second.enter(2, "training", "[5]")
        text = first.explain(first.place, LOST)
    assert "\n  rank 1 is elsewhere, in step 2, training (samples [5])" in text


def test_an_error_of_a_rank_itself_is_told_in_full_and_at_once() -> None:
    with watches(2) as (first, second), first, second:
        second.enter(3, "saving")
        text = second.explain(second.place, OSError(28, "No space left on device"))
        assert text == "rank 1, step 3, saving: OSError: [Errno 28] No space left on device"
        first.enter(3, "saving")
        assert first.explain(first.place, LOST).endswith("; rank 1 says why")


def test_what_all_ranks_know_is_told_once() -> None:
    with watches(2) as (first, second), first, second:
        assert first.once("ranks differ", "rank 0, step 1") == "ranks differ"
        assert second.once("ranks differ", "rank 1, step 1") == "rank 1, step 1; rank 0 says why"
        assert first.once("again", "short") == "again"


def test_a_new_attempt_has_a_speaker_of_its_own() -> None:
    store = dist.HashStore()
    with Watch(1, 2, Board(store, keeper="rank 0"), pace=QUICK) as second:
        assert second.once("ranks differ", "short") == "ranks differ"
    Board(store, keeper="rank 0").begin()
    with Watch(0, 2, Board(store, keeper="rank 0"), pace=QUICK) as first:
        assert first.once("again", "short") == "again"


def test_a_rank_that_ended_is_told_with_its_error() -> None:
    with watches(2) as (first, second), first:
        second.enter(6, "advantages")
        with pytest.raises(KeyError), second:
            raise KeyError("name")
        text = first.explain("rank 0, step 6", LOST)
    assert text.startswith("rank 1 ended in step 6, advantages: KeyError: 'name'")


def test_a_slow_step_says_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(watch_module, "log_info", lines.append)
    with watches(2) as (first, second), second:
        second.enter(1, "training")
        with first:
            first.enter(1, "training")
            first.enter(2, "training")
            while not lines:
                time.sleep(0.02)
    assert lines[0].startswith("step 2, training: ")
    assert "s so far (usual 0.0 s); rank 1 is behind, still in step 1, training since " in lines[0]


def test_a_step_that_is_not_slow_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first, of which nothing is usual yet, nor one of many times the usual."""
    lines: list[str] = []
    monkeypatch.setattr(watch_module, "log_info", lines.append)
    with watches(1, replace(QUICK, slow=600.0, slow_factor=0.0)) as (alone,), alone:
        for step in range(1, 4):
            alone.enter(step, "training")
            time.sleep(3 * QUICK.beat)
    assert lines == []


def test_a_rank_whose_launcher_is_gone_stops_as_after_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[int] = []
    monkeypatch.setattr(watch_module, "log_warning", lambda _: None)
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with Watch(0, 1, pace=QUICK, launcher=os.getppid()):
            time.sleep(2 * QUICK.beat)
        assert got == []
        with Watch(0, 1, pace=QUICK, launcher=-1):
            end = time.monotonic() + 30
            while not got and time.monotonic() < end:
                time.sleep(QUICK.beat)
            time.sleep(2 * QUICK.beat)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


class EndedError(Exception):
    """In place of the end of the process."""


def answers_of(watch: Watch) -> list[bool]:
    """What the watch finds each time that it asks whether its rank waits for another."""
    answers, ask = [], watch._waits_for_others
    watch._waits_for_others = lambda: answers.append(ask()) or answers[-1]
    return answers


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_stuck_beyond_the_timeout_ends_if_it_waits_for_another(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    codes: list[int] = []
    errors: list[str] = []

    def end(code: int) -> None:
        codes.append(code)
        raise EndedError

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(watch_module, "log_error", lambda text, **_: errors.append(text))
    with watches(2, replace(QUICK, silence=30.0)) as (first, second), second:
        second.enter(2, "reading rollouts")
        answers = answers_of(first)
        with first:
            first.enter(2, "reading rollouts")
            if waits:
                first.enter(2, "step guard", "[1]")
            first._moved -= 700.0  # beyond the timeout, not beyond twice that
            while not codes and len(answers) < 3:
                time.sleep(0.02)
    assert codes == ([EXIT_STUCK] if waits else [])
    assert set(answers) == {waits}
    if waits:
        assert errors[0].startswith("rank 1 is behind, still in step 2, reading rollouts since ")
        assert "stands still beyond the timeout (600 s), process ended" in errors[0]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_board_whose_keeper_is_lost_answers_in_time(how: signal.Signals) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        assert keeper.stdout is not None
        port = int(keeper.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
        board = Board(store, keeper="rank 0", patience_s=0.5)
        board.leave(1, Sign(step=3))
        found = board.read([0, 1])
        assert (found[0], found[1]) == (None, Sign(step=3))
        os.kill(keeper.pid, how)
        for question in (lambda: board.read([1]), lambda: board.claim(1), board.has_word):
            with pytest.raises(BoardError, match=r"^rank 0, which keeps the job's store, does not"):
                question()
        board.leave(1, Sign(step=4))
        watch = Watch(1, 2, board, pace=QUICK)
        assert watch.explain("rank 1, step 4", LOST).startswith("rank 0, which keeps the job's")
    finally:
        keeper.kill()
        keeper.wait()


def test_threads_end_with_the_context() -> None:
    before = threading.active_count()
    with watches(2) as (first, second), first, second:
        assert threading.active_count() == before + 4
    assert threading.active_count() == before


def test_errors_of_collectives_and_of_the_store_are_lost_peers() -> None:
    assert is_lost_peer(LOST)
    assert is_lost_peer(dist.DistStoreError("wait timeout"))
    assert is_lost_peer(dist.DistBackendError("NCCL"))
    assert not is_lost_peer(RuntimeError("shapes"))
