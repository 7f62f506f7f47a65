"""What the device check says and returns; what it would do on a GPU, done on the CPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tools import device_check
from tools.kernel_cases import Case, Check

CPU = torch.device("cpu")


@pytest.fixture
def triton() -> None:
    pytest.importorskip("triton")


@pytest.fixture
def few_cases(triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "CASES", [Case(7), Case(130, torch.bfloat16)])


@pytest.fixture
def fake_clock(triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes two milliseconds."""

    def median_ms(function: Callable[[], object]) -> float:
        function()
        return 2.0

    monkeypatch.setattr(device_check, "median_ms", median_ms)


def test_without_a_device_it_says_so_before_it_asks_for_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_check.main([]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "nothing was checked: there is no CUDA device" in said.err


def test_without_triton_it_says_that_nothing_was_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert device_check.main(["--interpret"]) == 3
    assert "nothing was checked: triton is not installed" in capsys.readouterr().err


@pytest.mark.usefixtures("few_cases")
def test_interpreted_it_checks_the_kernels_and_writes_what_it_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "found.json"
    assert device_check.main(["--interpret", "--json", str(output)]) == 0
    assert "15 of 15 checks passed" in capsys.readouterr().out
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["environment"]["device"] == "cpu, interpreted"
    assert found["timings"] == []
    assert [check["passed"] for check in found["checks"]] == [True] * 15
    assert found["checks"][0]["name"] == "5x7-float32 label"


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("error", [2.0, float("nan")])
def test_a_failed_check_is_named_and_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float
) -> None:
    monkeypatch.setattr(device_check, "check_statistics", lambda _: [Check("total", error, 1.0)])
    assert device_check.main(["--interpret"]) == 1
    said = capsys.readouterr().out
    assert "5 of 7 checks passed" in said
    assert f"FAILED  error {error:.2e}  bound 1.00e+00  5x7-float32 total" in said


def test_the_head_is_as_near_to_float64_as_plain_torch() -> None:
    checks = device_check.check_head(CPU)
    assert [check for check in checks if not check.passed] == []
    assert [check.name for check in checks][3:] == [
        "RLHead torch.bfloat16 loss",
        "RLHead torch.bfloat16 hidden gradient",
        "RLHead torch.bfloat16 weight gradient",
    ]


def test_collectives_give_back_what_they_got() -> None:
    checks = device_check.check_collectives(CPU, "gloo")
    assert [(check.name, check.error) for check in checks] == [
        ("gloo all-gather of bytes", 0.0),
        ("gloo reduce-scatter", 0.0),
        ("gloo all-reduce", 0.0),
    ]


@pytest.mark.usefixtures("fake_clock")
def test_bandwidth_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "KERNEL_ROWS", 3)
    monkeypatch.setattr(device_check, "KERNEL_COLUMNS", 1000)
    copy, *others = device_check.time_kernels(CPU)
    assert copy.rate == pytest.approx(2 * 2**30 / 2e-3 / 1e9)
    assert [timing.name.split()[0] for timing in others] == ["statistics", "gradient"] * 2
    num_bytes = [4 * 3000, 2 * 4 * 3000, 2 * 3000, 2 * 2 * 3000]
    for timing, read_and_written in zip(others, num_bytes, strict=True):
        assert timing.rate == pytest.approx(read_and_written / 2e-3 / 1e9)
        assert timing.share == pytest.approx(timing.rate / copy.rate)


@pytest.mark.usefixtures("fake_clock")
def test_heads_are_compared_with_their_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "HEAD_SIZES", ((64, 16, 130),))
    (timing,) = device_check.time_heads(CPU)
    assert (timing.rate, timing.share) == (1.0, None)
    assert timing.name == "RLHead 64x16x130, matmuls 2.00 ms"


def test_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, device_check.__file__, "--help"],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "python tools/device_check.py --json device.json" in done.stdout
