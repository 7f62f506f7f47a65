"""The benchmark of the step at a tiny size: losses, parts and tables, never the time itself."""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rollouts import write_rollouts
from benchmarks.step import Summary, cases, main, parser, step_tables, summary_of
from benchmarks.step_on_rank import CORE, GRPO, SFT, StepCase, Times, seconds_to_read, time_steps
from benchmarks.stopwatch import MODEL, PARTS, REST, Stopwatch
from tests.spawn import World

CASE = StepCase(6, shortest=5, longest=20, prompt=2, hidden=16, layers=1, vocab=256)
LENGTHS = [5, 20, 11, 7, 9, 16]


def timed(rank: int, case: StepCase, folder: str) -> Times:
    return time_steps(rank, case, 2, folder)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=200.0) as world:
        yield world


@pytest.mark.parametrize("tp", [1, 2])
def test_core_alone_has_the_loss_of_our_imitation(
    tp: int, two_ranks: World, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", LENGTHS, prompt_length=2, vocab=256)
    ranks = two_ranks.run(timed, replace(CASE, ranks=2, tp=tp), str(tmp_path))
    found = summary_of(ranks)
    assert found.same_loss
    assert all(len(losses) == 3 for losses in found.losses.values())
    assert len(set(found.losses[SFT])) == 3
    assert found.losses[GRPO] != found.losses[SFT]
    for rank in ranks:
        assert {loop: len(seconds) for loop, seconds in rank.seconds.items()} == {
            CORE: 2,
            SFT: 2,
            GRPO: 2,
        }
        for loop, rounds in rank.parts.items():
            for parts, seconds in zip(rounds, rank.seconds[loop], strict=True):
                assert set(parts) == {*PARTS, REST}
                assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)


def test_reading_is_clocked_by_part(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "rollouts.jsonl", LENGTHS, prompt_length=2, vocab=256)
    assert list(seconds_to_read(path, 3)) == ["plan", "read", "digest", "report"]


def test_a_part_is_without_the_parts_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 4.0, 10.0, 13.0])
    monkeypatch.setattr("benchmarks.stopwatch.time.process_time", lambda: next(clock))
    stopwatch = Stopwatch()
    with stopwatch.part("outer"), stopwatch.part("inner"):
        pass
    assert stopwatch.wrap("outer", lambda x: x + 1)(1) == 2
    assert stopwatch.take() == {"inner": 0.5, "outer": 3.5 + 3.0}
    assert stopwatch.take() == {}


def summary(sft_loss: float) -> Summary:
    one = {name: [0.5] for name in (CORE, SFT, GRPO)}
    parts = {MODEL[0]: 0.3, MODEL[1]: 0.1, "reading": 0.1}
    ranks = [
        Times(
            {CORE: [1.0, 2.0, 3.0], SFT: [seconds] * 3, GRPO: [2.5] * 3},
            {SFT: [parts] * 3, GRPO: [parts | {"guard": 0.3}] * 3},
            one | {SFT: [sft_loss]},
        )
        for seconds in (1.0, 4.0)
    ]
    return summary_of(ranks)


def test_the_slowest_rank_counts_and_the_shares_are_of_the_step() -> None:
    found = summary(0.5)
    assert found.seconds == {CORE: 2.0, SFT: 4.0, GRPO: 2.5}
    assert (found.overhead(SFT), found.overhead(GRPO)) == pytest.approx((0.2, 0.5))
    lines = step_tables(CASE, found).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert ["sft", "4.000", "2.00", "loss equal at every step"] in cells
    assert ["forward and backward", "300.00", "60.00%", "300.00", "37.50%"] in cells
    assert cells[-1] == ["all beside the model", "", "20.00%", "", "50.00%"]


def test_another_loss_is_told() -> None:
    assert "loss DIFFERS from megatron-core's" in step_tables(CASE, summary(0.50001))


def options(*arguments: str) -> Namespace:
    return parser().parse_args(arguments)


def test_a_setting_for_each_prompt() -> None:
    found = list(cases(options("--prompt", "1", "9", "--ranks", "4", "--tp", "2")))
    assert [(case.prompt, case.ranks, case.tp) for case in found] == [(1, 4, 2), (9, 4, 2)]


@pytest.mark.slow
def test_prints_tables_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    small = "--samples 4 --lengths 5 20 --prompt 2 --hidden 16 --layers 1 --vocab 256 --repeats 1"
    arguments = [*small.split(), "--long-samples", "8", "--replicas", "1", "2"]
    assert main([*arguments, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "loss equal at every step" in printed
    report = json.loads(file.read_text(encoding="utf-8"))
    assert set(report) == {"machine", "step", "reading"}
    assert set(report["reading"]) == {"1", "2"}
    assert report["step"][0]["case"]["prompt"] == 2
