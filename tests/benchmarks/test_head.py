"""The benchmark at a tiny size: checks, tables and JSON, never the time itself."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import measure
from benchmarks.contenders import HEADS, Contender, Step, UnavailableError
from benchmarks.head import cases, main, parser
from benchmarks.measure import CONTENDERS, Plan, Result
from benchmarks.peers import PEERS
from benchmarks.problem import Case, Problem, make_problem
from benchmarks.ranks import RankError, run_on_ranks
from benchmarks.reference import Outcome
from benchmarks.report import memory_table, plain_needs, time_table
from tests import spawn

CASE = Case(tokens=64, hidden=16, vocab=96)
OWN = tuple(one.name for one in HEADS)


def timed(rank: int, case: Case, plan: Plan) -> list[Result]:
    return measure._time_on_rank(rank, case, plan)


def remembered(rank: int, case: Case, plan: Plan, name: str) -> Result:
    return measure._memory_on_rank(rank, case, plan, name)


class TestContenders:
    @pytest.mark.parametrize(
        "case",
        [
            CASE,
            Case(64, 16, 96, share=0.4),
            Case(64, 16, 96, entropy="none"),
            Case(64, 16, 96, entropy="loss", zeros=0.5),
            Case(64, 16, 96, share=0.4, entropy="loss", ranks=2),
        ],
        ids=str,
    )
    def test_give_the_right_results(self, case: Case) -> None:
        plan = Plan(names=OWN, repeats=2)
        for results in spawn.run_on_ranks(case.ranks, timed, case, plan):
            assert {one.name for one in results} == {one.name for one in plan.contenders(case)}
            assert {one.name: one.problem for one in results if one.problem} == {}
            assert {len(one.seconds) for one in results} == {2}

    @pytest.mark.slow
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_of_other_packages_give_the_right_results_where_they_run(self, ranks: int) -> None:
        case = Case(64, 16, 96, share=0.4, entropy="loss", ranks=ranks)
        plan = Plan(names=tuple(one.name for one in PEERS), repeats=1)
        for results in spawn.run_on_ranks(ranks, timed, case, plan, timeout_s=280.0):
            wrong = {
                one.name: one.problem
                for one in results
                if one.problem and not one.problem.startswith(("pip install ", "needs CUDA"))
            }
            assert wrong == {}
            assert "megatron.core" in {one.name for one in results if one.seconds}

    @pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
    def test_give_the_right_results_from_logits(self, entropy: str) -> None:
        case = Case(64, 16, 96, share=0.4, entropy=entropy)
        own = ("softmax, scaled", "slime_loss", "slime_loss reuse_logits", "torch")
        (results,) = spawn.run_on_ranks(1, timed, case, Plan("logits", own, repeats=1))
        assert [(one.name, one.problem, len(one.seconds)) for one in results] == [
            (name, "", 1) for name in own
        ]

    def test_are_not_timed_with_wrong_results(self) -> None:
        (results,) = spawn.run_on_ranks(1, with_wrong_ones)
        by_name = {one.name: one for one in results}
        assert by_name["slime_loss"].problem == ""
        assert by_name["half the loss"].problem.startswith("differs: loss by")
        assert by_name["raises"].problem == "failed: RuntimeError: out of order"
        assert by_name["half the loss"].seconds == by_name["raises"].seconds == []

    def test_say_what_to_install(self) -> None:
        def absent(problem: Problem) -> Step:
            raise ModuleNotFoundError("No module named 'some_head'")

        one = Contender("other", absent, package="some-head")
        with pytest.raises(UnavailableError, match=r"pip install some-head \(No module named"):
            measure._Running(one, make_problem(CASE), "head")

    @pytest.mark.parametrize("name", ["cut-cross-entropy", "liger cross entropy"])
    def test_of_triton_need_cuda(self, name: str) -> None:
        one = next(one for one in PEERS if one.name == name)
        with pytest.raises(UnavailableError, match="needs CUDA"):
            measure._Running(one, make_problem(CASE), "head")


def with_wrong_ones(rank: int) -> list[Result]:
    def half(problem: Problem) -> Step:
        whole = next(one for one in HEADS if one.name == "torch").make(problem)
        return lambda *leaves: Outcome(0.5 * whole(*leaves).loss)

    def raises(problem: Problem) -> Step:
        def step(*_: torch.Tensor) -> Outcome:
            raise RuntimeError("out of order\nin line 2")

        return step

    ours = next(one for one in HEADS if one.name == "slime_loss")
    CONTENDERS["head"] = (ours, Contender("half the loss", half), Contender("raises", raises))
    return measure._time_on_rank(rank, Case(64, 16, 96, share=0.4), Plan(repeats=1))


class TestMemory:
    def test_holds_the_gradients(self) -> None:
        case = Case(tokens=256, hidden=64, vocab=8192)
        (plain,) = spawn.run_on_ranks(1, remembered, case, Plan(), "torch")
        gradients = 4 * 64 * (256 + 8192) / 2**20
        assert plain.gradient_mib == gradients
        assert plain.peak_mib > gradients + 8

    def test_says_what_is_not_there(self) -> None:
        (result,) = spawn.run_on_ranks(1, remembered, CASE, Plan(), "liger cross entropy")
        assert (result.problem, result.peak_mib) == ("needs CUDA", 0.0)

    def test_of_plain_torch_is_computed(self) -> None:
        assert "8.4 GB" in plain_needs(Case(8192, 256, 128256))


class TestTables:
    def test_show_medians_and_ratios(self) -> None:
        results = [
            Result("3 products", seconds=[2.0, 2.0, 9.0]),
            Result("slime_loss", seconds=[3.0, 2.9, 3.1]),
            Result("other", "no entropy", seconds=[6.0, 6.0, 6.0]),
            Result("absent", problem="needs CUDA"),
        ]
        table = time_table(CASE, results, "head").splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[4:]]
        assert table[0].startswith("T=64 H=16 V=96, 100% of the rows train")
        assert cells == [
            ["3 products", "2.000", "1.00", "0.67", ""],
            ["slime_loss", "3.000", "1.50", "1.00", ""],
            ["other", "6.000", "3.00", "2.00", "no entropy"],
            ["absent", "", "", "", "needs CUDA"],
        ]

    def test_show_memory_beside_the_gradients(self) -> None:
        results = [Result("torch", peak_mib=30.0, gradient_mib=10.0), Result("x", problem="no")]
        table = memory_table(CASE, results, "head").splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[4:]]
        assert cells == [["torch", "20", "10", ""], ["x", "", "", "no"]]


def options(*arguments: str) -> Namespace:
    return parser().parse_args(arguments)


class TestCommandLine:
    def test_changes_one_thing_at_a_time(self) -> None:
        found = list(cases(options("--size", "64x16x96")))
        assert found == [
            CASE,
            Case(64, 16, 96, share=0.4),
            Case(64, 16, 96, entropy="none"),
            Case(64, 16, 96, entropy="loss"),
            Case(64, 16, 96, ranks=2),
            Case(64, 16, 96, zeros=0.5),
        ]

    def test_takes_every_combination_with_grid(self) -> None:
        assert len(set(cases(options("--size", "64x16x96", "--grid")))) == 2 * 3 * 2 * 2

    def test_has_an_example_in_its_help(self) -> None:
        assert "python -m benchmarks.head --json" in parser().format_help()

    @pytest.mark.slow
    def test_prints_tables_and_writes_json(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "head.json"
        small = "--size 64x16x96 --share 1 --entropy metric --ranks 1 --zeros 0 --repeats 2"
        arguments = [*small.split(), "--contenders", "3 products", "slime_loss", "torch"]
        assert main([*arguments, "--json", str(file)]) == 0
        printed = capsys.readouterr().out
        assert [line for line in printed.splitlines() if line.startswith("## ")] == [
            "## From hidden states",
            "## From logits",
            "## Memory of forward and backward",
        ]
        assert printed.count("| torch ") == 3
        report = json.loads(file.read_text(encoding="utf-8"))
        assert set(report) == {"machine", "head", "logits", "memory"}
        assert len(report["machine"]["load_average"]) == 3
        (record,) = report["head"]
        assert record["case"]["vocab"] == 96
        assert [one["name"] for one in record["results"]] == ["3 products", "slime_loss", "torch"]
        assert all(len(one["seconds"]) == 2 for one in record["results"])


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*ZeroDivisionError"):
        run_on_ranks(1, 1, divide, 0)


def divide(rank: int, by: int) -> float:
    return rank / by
