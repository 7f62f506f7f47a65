"""Kill a run at random moments and resume it, again and again; in the end it must be the same run.

    python -m tests.end_to_end.kills --kills 50 --seed 1 --json kills.json

Ranks fork from a process that has imported everything; kills under torchrun are in test_resume.
A chain is one run in one layout, saving at once or in the background. It is killed a few times, in
any phase, any rank or the launcher, and resumed each time; then it is compared with the run of the
same layout that nobody stopped: weights, optimizer, generators, position, schedule, metrics.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from megatron.rl.checkpoint_files import find_checkpoint, read_tracker, steps_in
from megatron.rl.checkpoint_manifest import damage, garbled
from tests.end_to_end.forked import ForkedJob
from tests.end_to_end.job import Job, differences, metrics, run
from tests.megatron.rl import checkpoints
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, write_rollouts

STEPS, SAVE_INTERVAL = 18, 2
LAYOUTS = {
    **{name: flags for name, flags in checkpoints.LAYOUTS.items() if not name.startswith("tp2 d")},
    "ep2": [*checkpoints.EXPERTS, "--expert-model-parallel-size=2"],
}
PHASES = ("starting", "training", "saving", "saving")
SIGNALS = ("KILL", "KILL", "TERM", "USR1", "STOP+KILL")
VICTIMS = ("rank 0", "rank 1", "launcher")
END_S = 240.0
"""Seconds that a job may take to end after a kill, and to start before it is called stuck."""


@dataclass(frozen=True)
class Kill:
    """One kill: when, whom, how, and what became of the job.

    Args:
        phase: one of `PHASES`.
        at: seconds after the start, or the step after which it comes.
        delay: seconds after that moment.
        signal: one of `SIGNALS`.
        victim: one of `VICTIMS`.
    """

    phase: str
    at: float
    delay: float
    signal: str
    victim: str


@dataclass(frozen=True)
class Chain:
    """One run in one layout with its kills.

    Args:
        layout: a key of `LAYOUTS`.
        in_background: whether it saves so.
        kills: those that hit a living job.
        resumed_at: last saved step before each resumption; None: none was saved yet.
        failures: what was wrong, empty where nothing was.
    """

    layout: str
    in_background: bool
    kills: list[Kill] = field(default_factory=list)
    resumed_at: list[int | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run_flags(rollouts: Path) -> list[str]:
    """Rollouts of 8 samples in steps of 3, 3 and 2: saves fall within rollouts and between."""
    return [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        f"--rollout-data={rollouts}",
        "--num-epochs=3",
        "--rollout-batch-size=2",
        "--global-batch-size=3",
        "--micro-batch-size=2",
        "--lr-decay-style=cosine",
        "--lr-warmup-iters=2",
        f"--save-interval={SAVE_INTERVAL}",
        "--distributed-timeout-minutes=3",
    ]


def places(folder: Path) -> list[str]:
    """Where a run saves, resumes and reports."""
    return [f"--save={folder}/save", f"--load={folder}/save", f"--tensorboard-dir={folder}/tb"]


def compare(folder: Path, reference: Path) -> list[str]:
    """How two finished runs differ, in everything but the clock."""
    name = f"save/iter_{STEPS:07d}"
    found = differences(folder / name, reference / name)
    if metrics(folder / "tb") != metrics(reference / "tb"):
        found.append("metrics.jsonl differs")
    return found


def draw_kill(draw: random.Random, done: int) -> Kill:
    """A moment, a victim and a way for a run that resumes after `done` steps."""
    phase = draw.choice(PHASES)
    if phase == "starting":
        at = draw.uniform(0.0, 3.0)
    else:
        at = draw.randint(done, max(done, min(done + 6, STEPS - 3)))
    how = draw.choice(SIGNALS)
    victim = draw.choice(VICTIMS if how in ("KILL", "TERM") else VICTIMS[:2])
    return Kill(phase, at, draw.uniform(0.0, 0.15), how, victim)


def run_chain(chain: Chain, argv: list[str], folder: Path, draw: random.Random, kills: int) -> None:
    """Start, kill and resume until there were `kills` kills or the run is through, then let it."""
    flags = [*argv, *places(folder), "--save-keep-last=3", *LAYOUTS[chain.layout]]
    flags += ["--async-save"] if chain.in_background else []
    while len(chain.kills) < kills and not chain.failures:
        kill = draw_kill(draw, _saved(folder) or 0)
        job = ForkedJob(flags, ranks=2, log=folder / f"log{len(chain.kills)}")
        if not _carry_out(kill, job, folder):
            code = job.wait(END_S)
            if code != 0:
                chain.failures.append(f"the run failed by itself:\n{job.said[-3000:]}")
            break
        chain.kills.append(kill)
        chain.failures.extend(_after_kill(job, folder))
        chain.resumed_at.append(_saved(folder))
        say(
            f"  {chain.layout}{' async' * chain.in_background}: {kill.phase} {kill.at:.3g} + "
            f"{kill.delay:.3f} s: {kill.signal} to {kill.victim}; saved step "
            f"{chain.resumed_at[-1]}{'; FAILED' * bool(chain.failures)}"
        )
    if not chain.failures:
        code, said = run(flags, ranks=2, log=folder / "log-last", timeout=2 * END_S, kind=ForkedJob)
        if code != 0:
            chain.failures.append(f"the last resumption ended with {code}:\n{said[-3000:]}")


def _carry_out(kill: Kill, job: Job, folder: Path) -> bool:
    """Wait for the moment and kill; False where the job was done before."""
    started = time.monotonic()
    while not _is_moment(kill, time.monotonic() - started, folder):
        if job.has_ended or time.monotonic() - started > END_S:
            return False
        time.sleep(0.002)
    time.sleep(kill.delay)
    if kill.victim == "launcher":
        target = job.launcher
    else:
        with suppress(psutil.Error):
            job.until(lambda: len(job.workers()) == 2 or job.has_ended, END_S)
        workers = job.workers() if not job.has_ended else []
        if len(workers) != 2:
            return False
        target = workers[int(kill.victim[-1])]
    family = [*target.children(recursive=True), target] if kill.victim == "launcher" else [target]
    with suppress(psutil.NoSuchProcess):
        for name in kill.signal.split("+"):
            target.send_signal(getattr(signal, f"SIG{name}"))
            time.sleep(0.3 if "+" in kill.signal else 0.0)
    if kill.victim == "launcher" and kill.signal == "KILL":
        _end(family)  # as the machine that dies with it would
    return True


def _is_moment(kill: Kill, seconds: float, folder: Path) -> bool:
    if kill.phase == "starting":
        return seconds >= kill.at
    if kill.phase == "training":
        return len(metrics(folder / "tb")) > kill.at
    partial = [int(path.name[5:12]) for path in (folder / "save").glob("iter_*.partial-*")]
    return any(step > kill.at for step in partial)


def _after_kill(job: Job, folder: Path) -> list[str]:
    """What is wrong once the job has ended: it hangs, or a checkpoint is neither whole nor gone."""
    try:
        job.wait(END_S)
    except AssertionError as error:
        return [f"the job did not end after the kill: {error}"]
    found = [
        f"{path.name} is broken: {complaint}"
        for path in steps_in(folder / "save").values()
        if (complaint := damage(path) or garbled(path))
    ]
    saved = _saved(folder)
    if saved is not None and find_checkpoint(folder / "save").name != f"iter_{saved:07d}":
        found.append(f"the tracker names step {saved}, which is not there")
    return found


def _saved(folder: Path) -> int | None:
    return read_tracker(folder / "save")


def _end(family: Sequence[psutil.Process]) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=END_S)


def run_all(
    kills: int, seed: int, folder: Path, layouts: Sequence[str], minutes: float
) -> Iterator[Chain]:
    """Chains of 2 to 5 kills in turn over layouts and ways to save, until the kills are done."""
    draw = random.Random(seed)
    argv = run_flags(write_rollouts(folder / "rollouts.jsonl"))
    deadline = time.monotonic() + 60 * minutes
    cells = itertools.cycle(itertools.product((True, False), layouts))
    done = 0
    for number, (in_background, layout) in enumerate(cells):
        if done >= kills or time.monotonic() > deadline:
            return
        reference = folder / f"reference-{layout.replace(' ', '-')}"
        chain = Chain(layout, in_background)
        if not reference.exists():
            reference.mkdir()
            flags = [*argv, *places(reference), *LAYOUTS[layout]]
            code, said = run(
                flags, ranks=2, log=reference / "log", timeout=2 * END_S, kind=ForkedJob
            )
            if code != 0:
                chain.failures.append(f"the run that nobody stops ended with {code}:\n{said}")
        own = folder / f"chain{number}"
        own.mkdir()
        if not chain.failures:
            run_chain(chain, argv, own, draw, min(draw.randint(2, 5), kills - done))
        if not chain.failures:
            chain.failures.extend(compare(own, reference))
        done += len(chain.kills)
        say(
            f"{done} of {kills} kills; {layout}{' async' * in_background}: "
            + ("DIFFERS" if chain.failures else f"the same run after {len(chain.kills)}")
        )
        if not chain.failures:
            shutil.rmtree(own)
        yield chain


def say(line: str) -> None:
    """To the terminal, at once."""
    print(line, flush=True)  # noqa: T201


def summary(chains: Sequence[Chain], seconds: float) -> dict[str, object]:
    """What was done and found, for people and for --json."""
    kills = [kill for chain in chains for kill in chain.kills]
    return {
        "kills": len(kills),
        "chains": len(chains),
        "failed_chains": sum(bool(chain.failures) for chain in chains),
        "by_phase": dict(Counter(kill.phase for kill in kills)),
        "by_signal": dict(Counter(f"{kill.signal} {kill.victim}" for kill in kills)),
        "by_layout": dict(Counter(c.layout for c in chains for _ in c.kills)),
        "in_background": sum(len(chain.kills) for chain in chains if chain.in_background),
        "seconds": round(seconds),
    }


def main() -> int:
    """Parse, kill, report; 1 where a run was not the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="start no chain after this")
    parser.add_argument("--folder", type=Path, help="keep what failed here")
    parser.add_argument("--json", type=Path, help="write summary and chains here")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=arguments.folder))
    started = time.monotonic()
    chains = list(
        run_all(arguments.kills, arguments.seed, folder, arguments.layouts, arguments.minutes)
    )
    found = summary(chains, time.monotonic() - started)
    say(json.dumps(found))
    if arguments.json:
        report = {**found, "detail": [asdict(chain) for chain in chains]}
        arguments.json.write_text(json.dumps(report, indent=1))
    failures = [failure for chain in chains for failure in chain.failures]
    say("\n".join(failures))
    if not failures:
        shutil.rmtree(folder)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
