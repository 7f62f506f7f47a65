"""Prove examples/slurm on a real Slurm: runs that it stops are the run that nobody stopped.

    python -m tests.slurm.prove            # as root, with slurm-wlm and munge; about ten minutes

Two ranks of a tiny model on CPUs, in a temporary folder; nothing is left running.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.end_to_end.job import ROOT, differences, metrics
from tests.end_to_end.kills import STEPS, run_flags
from tests.megatron.rl.tiny import write_rollouts
from tests.slurm.cluster import Cluster, missing

SLOW_S, LIMITED_S = 2.0, 35.0
"""Seconds a rollout, of six: enough to be hit by a signal, and by a limit of minutes."""
ENDS_WITHIN_S = 600.0
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
SEED = 2
EXIT_TERMINATED = 143


class Proof:
    """Submits the files of examples/slurm and looks at what became of them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        (folder / "tiny.yaml").write_text("device: cpu\n")
        self._flags = [
            *run_flags(write_rollouts(folder / "rollouts.jsonl")),
            "--custom-advantage-function-path=tests.slurm.slow:advantages",
        ]

    def say(self, text: str) -> None:
        """Print without this machine's paths."""
        for line in text.splitlines():
            sys.stdout.write(line.replace(f"{self.folder}/", "") + "\n")
        sys.stdout.flush()

    def submit(
        self, file: str, name: str, *options: str, flags: tuple[str, ...] = (), **variables: str
    ) -> str:
        """The id of a job of one of the files, which trains the tiny model into a folder `name`."""
        own = ["--gres=none", "--cpus-per-task=1", "--nodelist=n2", f"--job-name={name}"]
        options = (*own, *options, f"--output={self.folder}/slurm-%x-%j.out")
        self.say(f"$ sbatch {' '.join(options)} {file} {' '.join(flags)}".rstrip())
        return self.cluster.call(
            "sbatch",
            "--parsable",
            *options,
            f"examples/slurm/{file}",
            *self._flags,
            *flags,
            cwd=ROOT,
            **{
                "RUN": f"{self.folder}/{name}",
                "CONFIG": f"{self.folder}/tiny.yaml",
                "VENV": sys.prefix,
                "RANKS_PER_NODE": "2",
                "OMP_NUM_THREADS": "1",
                "SECONDS_A_ROLLOUT": str(SLOW_S),
            }
            | variables,
        )

    def until_trained(self, run: str, steps: int) -> None:
        """Wait until a run has taken so many steps."""
        self.cluster.until(
            f"{steps} steps of {run}", lambda: len(self.steps(run)) >= steps, ENDS_WITHIN_S
        )

    def steps(self, run: str) -> list[dict]:
        """The steps that a run has logged."""
        return metrics(self.folder / run / "tensorboard")

    def final_state(self, job: str) -> str:
        """The state that a job ends in."""
        states: list[str] = []

        def has_ended() -> bool:
            states.append(self.cluster.state(job))
            return states[-1] in FINAL

        self.cluster.until(f"job {job} ends", has_ended, ENDS_WITHIN_S)
        return states[-1]

    def show(self, name: str, job: str) -> None:
        """Print what the batch script said."""
        self.say((self.folder / f"slurm-{name}-{job}.out").read_text().rstrip())

    def check(self, what: str, found: object, expected: object) -> None:
        """Print one line of the proof.

        Raises:
            AssertionError: it is not so.
        """
        if found != expected:
            raise AssertionError(f"{what}: {found!r}, expected {expected!r}")
        self.say(f"ok  {what}: {found!r}")

    def check_same(self, run: str, job: str) -> None:
        """A run that was requeued, and has ended, is the reference."""
        self.check(f"{run} ends", self.final_state(job), "COMPLETED")
        restarts = int(self.cluster.field(job, "Restarts"))
        self.check(f"{run} was started again ({restarts})", restarts > 0, True)
        name = f"checkpoints/iter_{STEPS:07d}"
        found = differences(self.folder / run / name, self.folder / "reference" / name)
        self.check(f"{run}, tensors unlike the reference's", found, [])
        same = self.steps(run) == self.steps("reference")
        self.check(
            f"{run}, metrics of {len(self.steps(run))} steps are the reference's", same, True
        )


def prove(proof: Proof) -> None:
    """One file after the other; a time limit, which takes minutes, beside them."""
    seed = (f"--seed={SEED}",)
    proof.say("\n# a time limit of four minutes, on n1 meanwhile")
    limited = proof.submit(
        "one_node.sbatch",
        "limited",
        "--time=4",
        "--signal=B:USR1@90",
        "--nodelist=n1",
        flags=seed,
        SECONDS_A_ROLLOUT=str(LIMITED_S),
    )
    proof.say("\n# one node, not stopped: the reference")
    job = proof.submit("one_node.sbatch", "reference", flags=seed)
    proof.check("reference ends", proof.final_state(job), "COMPLETED")
    proof.check("reference steps", len(proof.steps("reference")), STEPS)
    for scenario in (_stopped, _preempted, _seeds, _two_nodes, _node_down, _cancelled, _refused):
        proof.say(f"\n# {scenario.__doc__}")
        scenario(proof)
    proof.say("\n# the time limit")
    proof.check_same("limited", limited)
    proof.show("limited", limited)


def _stopped(proof: Proof) -> None:
    """one node, stopped by hand"""
    job = proof.submit("one_node.sbatch", "stopped", flags=(f"--seed={SEED}",))
    proof.until_trained("stopped", 4)
    _signal(proof, job)
    proof.check_same("stopped", job)
    proof.show("stopped", job)


def _signal(proof: Proof, job: str) -> None:
    proof.say(f"$ scancel --batch --signal=USR1 {job}")
    proof.cluster.call("scancel", "--batch", "--signal=USR1", job)


def _preempted(proof: Proof) -> None:
    """one node, preempted by a job of a partition of higher priority"""
    job = proof.submit("one_node.sbatch", "preempted", flags=(f"--seed={SEED}",))
    proof.until_trained("preempted", 4)
    options = ("--partition=high", "--nodelist=n2", "--exclusive", "--wrap=sleep 1")
    proof.say(f"$ sbatch {' '.join(options)}")
    other = proof.cluster.call("sbatch", "--parsable", "--output=/dev/null", *options)
    proof.check("the other ends", proof.final_state(other), "COMPLETED")
    proof.check_same("preempted", job)
    proof.show("preempted", job)


def _seeds(proof: Proof) -> None:
    """an array of two seeds, the second stopped by hand"""
    array = proof.submit("seeds.sbatch", "seeds", f"--array=1-{SEED}")
    proof.until_trained(f"seeds/seed{SEED}", 4)
    _signal(proof, f"{array}_{SEED}")
    proof.check_same(f"seeds/seed{SEED}", f"{array}_{SEED}")
    proof.check("seed1 ends", proof.final_state(f"{array}_1"), "COMPLETED")
    proof.check("seed1 restarts", proof.cluster.field(f"{array}_1", "Restarts"), "0")
    same = proof.steps("seeds/seed1") == proof.steps("reference")
    proof.check("another seed is the same run", same, False)
    proof.show("seeds", proof.cluster.field(f"{array}_{SEED}", "JobId"))


TWO_NODES = ("--nodes=2", "--nodelist=n1,n2", "--oversubscribe")


def _two_nodes(proof: Proof) -> None:
    """two nodes of one rank each, stopped by hand"""
    job = _submit_two(proof, "two_nodes")
    proof.until_trained("two_nodes", 4)
    _signal(proof, job)
    proof.check_same("two_nodes", job)
    proof.show("two_nodes", job)


def _submit_two(proof: Proof, name: str) -> str:
    return proof.submit(
        "many_nodes.sbatch", name, *TWO_NODES, flags=(f"--seed={SEED}",), RANKS_PER_NODE="1"
    )


def _node_down(proof: Proof) -> None:
    """two nodes, one of them set down"""
    job = _submit_two(proof, "node_down")
    proof.until_trained("node_down", 7)
    command = ("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
    proof.say(f"$ {' '.join(command)}")
    proof.cluster.call(*command)  # its daemon lives and brings it back
    proof.check_same("node_down", job)
    proof.show("node_down", job)


def _cancelled(proof: Proof) -> None:
    """a job that its user cancels"""
    job = proof.submit("one_node.sbatch", "cancelled")
    proof.until_trained("cancelled", 4)
    proof.cluster.call("scancel", job)
    _check_not_again(proof, "cancelled", job, "CANCELLED")


def _refused(proof: Proof) -> None:
    """a job whose flags are refused"""
    job = proof.submit("one_node.sbatch", "refused", flags=("--context-parallel-size=3",))
    _check_not_again(proof, "refused", job, "FAILED")


def _check_not_again(proof: Proof, name: str, job: str, state: str) -> None:
    proof.check(f"{name} ends", proof.final_state(job), state)
    time.sleep(3)
    proof.check("and is not started again", proof.cluster.state(job), state)
    proof.check(f"{name} restarts", proof.cluster.field(job, "Restarts"), "0")
    proof.show(name, job)


def main() -> None:
    """Prove it all, or end with 1 and what is not so."""
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    # An exception, so that a program that is told to end takes its Slurm along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, Cluster(Path(name)) as cluster:
        proof = Proof(cluster, Path(name))
        try:
            prove(proof)
        except (AssertionError, RuntimeError, TimeoutError) as error:
            for log in sorted([*Path(name).glob("*.out"), *Path(name).glob("**/logs/*.log")]):
                proof.say(f"==> {log}\n{log.read_text()[-2000:]}")
            sys.exit(f"not so: {error}")


if __name__ == "__main__":
    main()
