"""Every number a run shows is the number it was given, once, wherever it is read from."""

import errno
import json
import math
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.rl.config import LoggingConfig
from megatron.rl.logging import (
    ConsoleLine,
    MetricsFile,
    RunLogger,
    memory_scalars,
    merge_console_lines,
)
from slime_loss import Histogram

CONFIG_TEXT = "loss-type: policy_loss\nlr: 1.0e-05\n"
NAN = math.nan


def console(step: int = 1, *, loss: float = -0.3, **changes: float) -> ConsoleLine:
    values = {
        "consumed_samples": 16 * step,
        "elapsed_ms": 1500.0,
        "learning_rate": 1e-5,
        "global_batch_size": 16,
        "losses": {"loss": loss},
        "grad_norm": 0.25,
    }
    return ConsoleLine(**(values | changes))


def open_logger(
    directory: Path | None,
    *,
    first_step: int = 1,
    is_writer: bool = True,
    log_interval: int = 1,
    total_steps: int = 20,
) -> RunLogger:
    return RunLogger(
        LoggingConfig(
            tensorboard_dir=None if directory is None else str(directory), log_interval=log_interval
        ),
        is_writer=is_writer,
        first_step=first_step,
        total_steps=total_steps,
        resolved_config=CONFIG_TEXT,
    )


def read_rows(directory: Path) -> list[dict[str, float | None]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def read_events(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return events


class TestConsoleLine:
    def test_is_megatrons_line(self) -> None:
        line = console(3, loss=-0.3, tokens_per_second=4096.04)
        assert line.format(3, 20, datetime(2026, 1, 31, 12, 0, 5)) == (
            " [2026-01-31 12:00:05] iteration        3/      20 | consumed samples:           48 |"
            " elapsed time per iteration (ms): 1500.0 | learning rate: 1.000000E-05 |"
            " global batch size:    16 | loss: -3.000000E-01 | grad norm: 0.250 |"
            " tokens per second: 4096.0 | number of skipped iterations:   0 |"
            " number of nan iterations:   0 |"
        )

    @pytest.mark.parametrize("loss", [-0.3, 0.0, -0.0, 2.5, NAN, math.inf, -math.inf])
    def test_shows_every_loss(self, loss: float) -> None:
        text = console(loss=loss).format(1, 1, datetime(2026, 1, 1))
        shown = re.search(r"\| loss: (\S+) \|", text)
        assert shown is not None
        assert float(shown.group(1)) == pytest.approx(loss, nan_ok=True)

    def test_scalars_have_megatrons_names(self) -> None:
        assert console(2, num_skipped=1, num_nan=1).scalars == {
            "learning-rate": 1e-5,
            "batch-size": 16,
            "grad-norm": 0.25,
            "iteration-time": 1.5,
            "consumed-samples": 32,
            "skipped-iterations": 1,
            "nan-iterations": 1,
        }


class TestMergeConsoleLines:
    def test_averages_what_is_a_rate_and_adds_what_is_a_count(self) -> None:
        lines = [
            console(1, loss=-1.0, elapsed_ms=100.0, tokens_per_second=10.0, grad_norm=1.0),
            console(2, loss=NAN, elapsed_ms=200.0, num_skipped=1, num_nan=1, grad_norm=NAN),
            console(3, loss=0.5, elapsed_ms=600.0, tokens_per_second=30.0, learning_rate=2e-5),
        ]
        assert merge_console_lines(lines) == console(
            3,
            loss=-0.25,
            elapsed_ms=300.0,
            learning_rate=2e-5,
            num_skipped=1,
            num_nan=1,
            tokens_per_second=20.0,
        )

    def test_leaves_one_line_as_it_is(self) -> None:
        assert merge_console_lines([console(7, loss=-0.1)]) == console(7, loss=-0.1)

    def test_a_loss_that_never_was_finite_stays_visible(self) -> None:
        merged = merge_console_lines([console(1, loss=NAN), console(2, loss=math.inf)])
        assert math.isnan(merged.losses["loss"])


class TestRunLogger:
    def test_prints_one_line_a_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        with open_logger(None) as logger:
            logger.log_step(1, {}, console=console(1, loss=-0.3))
            logger.log_step(2, {}, console=console(2, loss=0.3))
        first, second = capsys.readouterr().out.splitlines()
        assert "iteration        1/      20 |" in first
        assert "| loss: -3.000000E-01 |" in first
        assert "iteration        2/      20 |" in second
        assert "| loss: 3.000000E-01 |" in second

    def test_prints_every_interval_and_what_is_left_at_the_end(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_logger(None, log_interval=2, total_steps=5) as logger:
            for step in range(1, 6):
                logger.log_step(step, {}, console=console(step, loss=-float(step)))
        shown = re.findall(r"iteration +(\d)/.*\| loss: (\S+) ", capsys.readouterr().out)
        assert [(step, float(loss)) for step, loss in shown] == [
            ("2", -1.5),
            ("4", -3.5),
            ("5", -5.0),
        ]

    def test_tensorboard_and_metrics_hold_the_same_numbers(self, tmp_path: Path) -> None:
        scalars = {
            step: {"train/pg_loss": -0.1 * step, "rollout/reward": step / 3, "perf/tokens": 1e9}
            for step in (1, 2, 3)
        }
        with open_logger(tmp_path) as logger:
            for step, values in scalars.items():
                logger.log_step(step, values, console=console(step))
        rows = read_rows(tmp_path)
        assert rows == [
            {"step": step} | console(step).scalars | scalars[step] for step in (1, 2, 3)
        ]
        events = read_events(tmp_path)
        assert set(events.Tags()["scalars"]) == set(rows[0]) - {"step"}
        for name in events.Tags()["scalars"]:
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert found == [(row["step"], np.float32(row[name])) for row in rows]

    def test_histograms_are_shown_by_tensorboard_alone(self, tmp_path: Path) -> None:
        found = Histogram(
            edges=(0.0, 1.0),
            counts=(1.0, 2.0, 3.0),
            minimum=-1.0,
            maximum=4.0,
            total=9.0,
            sum_of_squares=41.0,
        )
        empty = Histogram((0.0,), (0.0, 0.0), NAN, NAN, 0.0, 0.0)
        with open_logger(tmp_path) as logger:
            histograms = {"train/ratio": found, "train/advantages": empty}
            logger.log_step(1, {}, console=console(1), histograms=histograms)
        assert set(read_rows(tmp_path)[0]) == {"step", *console(1).scalars}
        events = read_events(tmp_path)
        assert events.Tags()["histograms"] == ["train/ratio"]
        value = events.Histograms("train/ratio")[0].histogram_value
        assert (value.min, value.max, value.num) == (-1.0, 4.0, 6.0)
        assert (value.sum, value.sum_squares) == (9.0, 41.0)
        assert value.bucket == [1.0, 2.0, 3.0]
        assert list(value.bucket_limit[:2]) == [0.0, 1.0]

    def test_what_is_not_finite_is_null(self, tmp_path: Path) -> None:
        values = {"a": NAN, "b": math.inf, "c": -math.inf, "d": -0.5}
        with open_logger(tmp_path) as logger:
            logger.log_step(1, values, console=console(grad_norm=NAN, num_nan=1))
        (row,) = read_rows(tmp_path)
        assert [row[name] for name in ("a", "b", "c", "d", "grad-norm")] == [
            None,
            None,
            None,
            -0.5,
            None,
        ]
        assert math.isnan(read_events(tmp_path).Scalars("grad-norm")[0].value)

    def test_takes_numbers_of_other_libraries(self, tmp_path: Path) -> None:
        with open_logger(tmp_path) as logger:
            values = {"numpy": float(np.float64(0.1)), "torch": torch.tensor(0.5).item()}
            logger.log_step(1, values, console=console())
        (row,) = read_rows(tmp_path)
        assert (row["numpy"], row["torch"]) == (0.1, 0.5)

    def test_saves_the_resolved_configuration(self, tmp_path: Path) -> None:
        with open_logger(tmp_path / "new" / "folder"):
            pass
        assert (tmp_path / "new" / "folder" / "config.yaml").read_text() == CONFIG_TEXT
        (text,) = read_events(tmp_path / "new" / "folder").Tensors("config/text_summary")
        assert text.tensor_proto.string_val[0].decode() == (
            "    loss-type: policy_loss\n    lr: 1.0e-05\n"
        )

    def test_a_resumed_run_has_each_step_once(self, tmp_path: Path) -> None:
        for first_step, loss in ((1, 1.0), (4, 2.0)):
            with open_logger(tmp_path, first_step=first_step) as logger:
                for step in range(first_step, 7 if loss == 2.0 else 6):
                    logger.log_step(step, {"train/loss": loss}, console=console(step))
        expected = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
        assert [(row["step"], row["train/loss"]) for row in read_rows(tmp_path)] == expected
        scalars = read_events(tmp_path).Scalars("train/loss")
        assert [(event.step, event.value) for event in scalars] == expected

    def test_every_step_survives_kill_9(self, tmp_path: Path) -> None:
        program = (
            "import os, signal, sys\n"
            "from megatron.rl.config import LoggingConfig\n"
            "from megatron.rl.logging import ConsoleLine, RunLogger\n"
            "logger = RunLogger(LoggingConfig(tensorboard_dir=sys.argv[1]), is_writer=True,\n"
            "                   first_step=1, total_steps=9, resolved_config='')\n"
            "for step in (1, 2, 3):\n"
            "    line = ConsoleLine(step, 1.0, 1e-5, 1, {'loss': -0.5}, 1.0)\n"
            "    logger.log_step(step, {'train/loss': -0.5}, console=line)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            check=False,
            timeout=120,
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]
        assert [event.step for event in read_events(tmp_path).Scalars("train/loss")] == [1, 2, 3]
        assert done.stdout.count("| loss: -5.000000E-01 |") == 3

    def test_other_ranks_leave_no_trace(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_logger(tmp_path / "run", is_writer=False) as logger:
            logger.log_step(1, {"train/loss": 0.5}, console=console())
        assert not (tmp_path / "run").exists()
        assert capsys.readouterr() == ("", "")

    def test_closes_twice(self, tmp_path: Path) -> None:
        logger = open_logger(tmp_path)
        logger.close()
        logger.close()
        assert read_rows(tmp_path) == []

    @pytest.mark.parametrize(
        ("step", "scalars", "message"),
        [
            (3, {}, "step must grow: step=3, last step=3"),
            (2, {}, "step must grow: step=2, last step=3"),
            (4, {"grad-norm": 1.0, "step": 1.0}, r"names=\['grad-norm', 'step'\]"),
        ],
    )
    def test_refuses_what_would_overwrite(
        self, step: int, scalars: dict[str, float], message: str
    ) -> None:
        with open_logger(None, is_writer=False) as logger:
            logger.log_step(3, {}, console=console(3))
            with pytest.raises(ValueError, match=message):
                logger.log_step(step, scalars, console=console(step))

    def test_refuses_a_step_before_the_first(self) -> None:
        with pytest.raises(ValueError, match="first_step must be at least 1: first_step=0"):
            open_logger(None, first_step=0)


class TestMetricsFile:
    def test_cuts_a_line_that_a_crash_left_half_written(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": 0.25}\n{"step": 2', "utf-8")
        metrics = MetricsFile(path, first_step=3)
        metrics.write(3, {"a": 0.125})
        metrics.close()
        assert read_rows(tmp_path) == [
            {"step": 1, "a": 0.5},
            {"step": 2, "a": 0.25},
            {"step": 3, "a": 0.125},
        ]

    def test_a_crash_while_cutting_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        before = '{"step": 1, "a": 0.5}\n{"step": 2, "a": 0.25}\n'
        path.write_text(before, encoding="utf-8")

        def crash(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="disk full"):
            MetricsFile(path, first_step=2)
        assert path.read_text(encoding="utf-8") == before


class TestMemoryScalars:
    def test_host_memory_grows_with_what_is_allocated(self) -> None:
        before = memory_scalars(torch.device("cpu"))
        held = torch.ones(32 * 2**20)  # 128 MiB
        after = memory_scalars(torch.device("cpu"))
        assert set(before) == {"mem-host-rss-bytes"}
        grown = after["mem-host-rss-bytes"] - before["mem-host-rss-bytes"]
        assert grown == pytest.approx(held.nbytes, rel=0.1)


def test_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "at the close")

    monkeypatch.setattr("megatron.rl.logging.RunFiles.close", fail)
    with pytest.raises(KeyError, match="before"), open_logger(tmp_path):
        raise KeyError("before")
    with pytest.raises(OSError, match="at the close"), open_logger(tmp_path):
        pass
