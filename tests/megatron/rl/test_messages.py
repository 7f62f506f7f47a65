"""What a run says while it runs: progress, and messages with a rank and a time."""

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from megatron.rl.logging import (
    log_error,
    log_info,
    log_warning,
    progress,
    setup_messages,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    def test_is_drawn_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(progress(range(3), desc="rows", unit="row")) == [0, 1, 2]
        assert "rows:   0%|" in terminal.getvalue()
        assert "0/3 [00:00<?, ?row/s]" in terminal.getvalue()

    def test_counts_by_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress(desc="bytes", total=10) as bar:
            bar.update(4)
            assert str(bar).startswith("bytes:  40%|")
        assert "0/10 [" in terminal.getvalue()

    def test_stays_out_of_log_files(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert list(progress(range(3), desc="rows")) == [0, 1, 2]
        assert capsys.readouterr() == ("", "")

    def test_stays_off_other_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(progress(range(3), desc="rows", is_writer=False)) == [0, 1, 2]
        assert terminal.getvalue() == ""


@pytest.fixture
def message_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("megatron.rl")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.usefixtures("message_logger")
class TestMessages:
    def test_rank_0_speaks_for_the_job(self, capsys: pytest.CaptureFixture[str]) -> None:
        setup_messages(rank=0)
        log_info("12 files, 100% valid")
        assert re.fullmatch(
            r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 0\] INFO: 12 files, 100% valid\n",
            capsys.readouterr().err,
        )

    def test_other_ranks_say_what_concerns_only_them(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        setup_messages(rank=3)
        log_info("the same everywhere")
        log_warning("the same everywhere")
        log_error("the same everywhere")
        log_warning("slow disk", every_rank=True)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("rank 3] WARNING: slow disk\n")
        assert err.count("\n") == 1

    def test_every_rank_may_say_why_it_ends(self, capsys: pytest.CaptureFixture[str]) -> None:
        setup_messages(rank=3)
        log_error("out of memory", every_rank=True)
        assert capsys.readouterr().err.endswith("rank 3] ERROR: out of memory\n")

    def test_a_second_setup_replaces_the_first(self, capsys: pytest.CaptureFixture[str]) -> None:
        setup_messages(rank=0)
        setup_messages(rank=0)
        log_warning("once")
        assert capsys.readouterr().err.count("once") == 1
