"""CPU seconds and peak memory of contenders, in fresh processes, after a check of their results.

Contenders take turns, so that whatever else the machine does hits all alike, and what counts is
the processor's time of the process, not the clock's.
"""

import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, distributed

from benchmarks.contenders import HEADS, Contender, Step, UnavailableError
from benchmarks.logits import LOGITS
from benchmarks.peers import PEERS
from benchmarks.problem import Case, Problem, make_problem
from benchmarks.ranks import run_on_ranks
from benchmarks.reference import Expected, Objective, Outcome, Reference

Kind = Literal["head", "logits"]
CONTENDERS: dict[Kind, tuple[Contender, ...]] = {"head": (*HEADS, *PEERS), "logits": LOGITS}
_WARM_UP = Case(tokens=64, hidden=16, vocab=256, share=0.5)
_MIB = 2**20


@dataclass(frozen=True)
class Result:
    """What was found of one contender in one case.

    Attributes:
        name: Its name.
        lacks: What of the task it leaves out.
        problem: Why it was not measured; empty when it was.
        seconds: CPU seconds of forward and backward, a repeat each; of the slowest rank.
        peak_mib: Most memory beyond what was there before; 0 where it was not measured.
        gradient_mib: How much of that is the gradients.
    """

    name: str
    lacks: str = ""
    problem: str = ""
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    gradient_mib: float = 0.0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        kind: From hidden states or from logits.
        names: Contenders; empty means all.
        repeats: Rounds.
        threads: Threads of a rank.
        device: "cpu" or "cuda".
    """

    kind: Kind = "head"
    names: tuple[str, ...] = ()
    repeats: int = 5
    threads: int = 1
    device: str = "cpu"

    def contenders(self, case: Case) -> list[Contender]:
        """Those that take part, in the order of the table."""
        return [
            one
            for one in CONTENDERS[self.kind]
            if one.suits(case) and (not self.names or one.name in self.names)
        ]


def time_case(case: Case, plan: Plan) -> list[Result]:
    """Check and time the contenders.

    Args:
        case: The setting.
        plan: How.

    Returns:
        A result each, of the slowest rank in each round.
    """
    ranks = run_on_ranks(case.ranks, plan.threads, _time_on_rank, case, plan)
    results = []
    for parts in zip(*ranks, strict=True):
        seconds = [max(times) for times in zip(*(part.seconds for part in parts), strict=True)]
        results.append(replace(parts[0], seconds=seconds))
    return results


def measure_memory(case: Case, plan: Plan) -> list[Result]:
    """The peak memory of each contender, each in processes of its own; of the largest rank."""
    results = []
    for one in plan.contenders(case):
        if one.objective is not None:
            parts = run_on_ranks(case.ranks, plan.threads, _memory_on_rank, case, plan, one.name)
            results.append(max(parts, key=lambda part: part.peak_mib))
    return results


class _Running:
    """A contender at work on a problem."""

    def __init__(self, one: Contender, problem: Problem, kind: Kind) -> None:
        self.contender = one
        self._problem, self._kind = problem, kind
        self.step: Step = _step(one, problem)

    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of; logits anew each time, since one may overwrite them."""
        if self._kind == "head":
            leaves = (self._problem.hidden, self._problem.weight)
        else:
            hidden, weight = self._problem.hidden.detach(), self._problem.weight.detach()
            leaves = ((hidden @ weight.T).requires_grad_(),)
        for leaf in leaves:
            leaf.grad = None
        return leaves

    def run(self, leaves: tuple[Tensor, ...]) -> Outcome:
        """Forward and backward."""
        outcome = self.step(*leaves)
        if outcome.loss is not None:
            outcome.loss.backward()
        return outcome

    def difference(self, expected: Callable[[Contender], Expected]) -> str:
        """What of its results is not right; empty when all is."""
        leaves = self.leaves()
        outcome = self.run(leaves)
        if self.contender.objective is None:
            return ""
        found = expected(self.contender).difference(
            outcome, tuple(leaf.grad for leaf in leaves), self.contender.tolerance
        )
        return found and f"differs: {found}"


def _step(one: Contender, problem: Problem) -> Step:
    try:
        return one.make(problem)
    except ImportError as error:
        raise UnavailableError(f"pip install {one.package} ({error})") from error


def _time_on_rank(rank: int, case: Case, plan: Plan) -> list[Result]:
    warnings.simplefilter("ignore")
    results, running = _check(rank, case, plan)
    for _ in range(plan.repeats):
        for name, one in running.items():
            results[name].seconds.append(_time(one, plan.device))
    return list(results.values())


def _check(rank: int, case: Case, plan: Plan) -> tuple[dict[str, Result], dict[str, _Running]]:
    """Whose results are right, and can be timed.

    What the check itself needs is gone when it returns: it must take no room from what is timed.
    """
    group = distributed.group.WORLD
    reference = Reference(make_problem(case, rank=rank, group=group, device=plan.device))
    problem = replace(reference.problem, whole_weight=torch.empty(0))
    find = reference.expected if plan.kind == "head" else reference.expected_of_logits

    @cache
    def known(objective: Objective, entropy_coef: float) -> Expected:
        return find(objective, entropy_coef=entropy_coef)

    def expected(one: Contender) -> Expected:
        return known(one.objective, problem.entropy_coef if one.does_entropy else 0.0)

    results: dict[str, Result] = {}
    running: dict[str, _Running] = {}
    for one in plan.contenders(case):
        reason, candidate = _prepare(one, problem, plan.kind, expected)
        results[one.name] = Result(one.name, one.lacks, reason)
        if not reason:
            running[one.name] = candidate
    return results, running


def _prepare(
    one: Contender, problem: Problem, kind: Kind, expected: Callable[[Contender], Expected]
) -> tuple[str, _Running | None]:
    """The contender at work; and why it must not be timed, empty when all ranks may time it."""
    try:
        candidate = _Running(one, problem, kind)
    except UnavailableError as error:
        return str(error), None
    try:
        found = candidate.difference(expected)
    except (RuntimeError, ValueError, TypeError) as error:
        found = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    everywhere: list[str] = [""] * problem.case.ranks
    distributed.all_gather_object(everywhere, found)
    return next(filter(None, everywhere), ""), candidate


def _time(one: _Running, device: str) -> float:
    leaves = one.leaves()
    gc.collect()
    distributed.barrier()
    start = _now(device)
    one.run(leaves)
    return _now(device) - start


def _now(device: str) -> float:
    """Seconds of this process's processor time; of the clock where a GPU does the work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _memory_on_rank(rank: int, case: Case, plan: Plan, name: str) -> Result:
    warnings.simplefilter("ignore")
    one = next(one for one in plan.contenders(case) if one.name == name)
    group = distributed.group.WORLD
    try:
        # Compilers and libraries take their own memory on the first call.
        small = replace(_WARM_UP, ranks=case.ranks, entropy=case.entropy)
        little = make_problem(small, rank=rank, group=group, device=plan.device)
        warm = _Running(one, little, plan.kind)
        warm.run(warm.leaves())
        problem = make_problem(case, rank=rank, group=group, device=plan.device)
        running = _Running(one, replace(problem, whole_weight=torch.empty(0)), plan.kind)
    except UnavailableError as error:
        return Result(name, one.lacks, str(error))
    leaves = running.leaves()
    del problem
    gc.collect()
    distributed.barrier()
    before = _start_peak(plan.device)
    running.run(leaves)
    peak = _peak(plan.device) - before
    held = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return Result(name, one.lacks, peak_mib=peak / _MIB, gradient_mib=held / _MIB)


def _start_peak(device: str) -> int:
    """Forget the largest memory so far; the bytes held now."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak(device: str) -> int:
    return _status("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()


def _status(name: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def as_record(case: Case, results: Sequence[Result]) -> dict[str, object]:
    """A case, its results, and how busy the machine was at their end, for JSON."""
    return {
        "case": asdict(case),
        "load_average": os.getloadavg(),
        "results": [asdict(one) for one in results],
    }
