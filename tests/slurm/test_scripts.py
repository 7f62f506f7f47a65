"""The files of examples/slurm without a Slurm: what they start, and when they start it again."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron.rl.arguments import resolve
from megatron.rl.flags.generate import all_flags
from tests.test_repository import QWEN3_8B

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "slurm"
JOBS = ("one_node", "many_nodes", "seeds")
SAVED, REFUSED, STUCK = 75, 2, 4

SRUN = """\
#!/bin/bash
# Ends like torchrun: with 1, and the code of a worker in its report.
printf '%s\\0' "$@" >"$RECORD/srun"
for word; do [[ $word == --output=* ]] && log=${word#--output=}; done
end() {
    ((CODE)) && printf '  exitcode  : %s (pid: 7)\\n' "$CODE" >"${log/\\%n/0}"
    exit $((CODE != 0))
}
trap 'printf "saved\\n" >"$RECORD/signal"; end' USR1
touch "$RECORD/started"
while [[ -n ${UNTIL_SIGNAL:-} ]]; do sleep 0.02; done
end
"""
SCONTROL = """\
#!/bin/bash
printf '%s ' "$@" >"$RECORD/scontrol"
"""


@dataclass(frozen=True)
class Done:
    """What a batch script did: its code and words, those of srun, and what scontrol was asked."""

    code: int
    said: str
    srun: list[str]
    scontrol: str

    @property
    def options(self) -> list[str]:
        """Options of srun, before the command that it starts."""
        return self.srun[: self.srun.index("bash")]

    @property
    def command(self) -> list[str]:
        """What the shell of each node becomes."""
        return self.srun[self.srun.index("bash") + 4 :]


class Submitted:
    """A batch script as Slurm starts it, beside an srun and scontrol that note their words."""

    def __init__(self, folder: Path, file: str, *flags: str, code: int, **variables: str) -> None:
        self._folder = folder
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "activate": ""}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(stat.S_IRWXU)
        environment = {n: v for n, v in os.environ.items() if not n.startswith("SLURM")}
        environment |= {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "RECORD": str(folder),
            "CODE": str(code),
            "RUN": str(folder / "run"),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NAME": "first",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_GPUS_ON_NODE": "8",
            "CONTAINER": "none",
            "VENV": str(folder),
        }
        self.process = subprocess.Popen(
            ["bash", str(FOLDER / f"{file}.sbatch"), *flags],
            cwd=ROOT,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_started(self) -> None:
        """Wait for its step."""
        deadline = time.monotonic() + 30
        while not (self._folder / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait(self) -> Done:
        """What it did in all."""
        said, _ = self.process.communicate(timeout=60)
        words = self._read("srun").split("\0")[:-1]
        return Done(self.process.returncode, said, words, self._read("scontrol").strip())

    def _read(self, name: str) -> str:
        path = self._folder / name
        return path.read_text() if path.exists() else ""


def submit(folder: Path, file: str, *flags: str, code: int = 0, **variables: str) -> Done:
    return Submitted(folder, file, *flags, code=code, **variables).wait()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.s*")), ids=lambda path: path.name)
def test_bash_can_read_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("file", JOBS)
def test_starts_torchrun_with_flags_that_exist(tmp_path: Path, file: str) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"} if file == "seeds" else {}
    done = submit(
        tmp_path, file, "--lr=2e-6", SLURM_JOB_NUM_NODES="4", SLURM_CPUS_PER_TASK="6", **variables
    )
    assert done.code == 0, done.said
    assert {"--nodes=4", "--ntasks=4", "--cpus-per-task=6"} <= set(done.options)
    assert done.command[0] == "torchrun"
    parsed = get_args_parser().parse_args(done.command[1:])
    assert (parsed.nnodes, parsed.nproc_per_node) == ("4", "8")
    assert parsed.training_script == "pretrain_rl.py"
    assert (ROOT / "pretrain_rl.py").exists()
    known = {name for flag in all_flags().values() for name in flag.names} | {"--config"}
    used = {word.partition("=")[0] for word in parsed.training_script_args if word[:2] == "--"}
    assert {"--save", "--load", "--tensorboard-dir", "--lr"} <= used <= known
    assert ("--seed" in used) == (file == "seeds")


def test_seeds_have_a_folder_each(tmp_path: Path) -> None:
    done = submit(tmp_path, "seeds", SLURM_ARRAY_JOB_ID="15", SLURM_ARRAY_TASK_ID="3")
    assert done.command[done.command.index("--seed") + 1] == "3"
    assert done.command[done.command.index("--save") + 1] == f"{tmp_path}/run/seed3/checkpoints"


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_configuration_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    (tmp_path / "models/Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    (tmp_path / "rollouts").mkdir()
    rows = ROOT / "examples/rollouts/smollm2_chain_sum.jsonl"
    (tmp_path / "rollouts" / rows.name).symlink_to(rows)
    monkeypatch.chdir(tmp_path)
    flags = ["--config", str(FOLDER / "qwen3_8b.yaml"), "--save=a", "--load=a"]
    config = resolve([*flags, "--tensorboard-dir=b"], 8 * nodes, has_driver=True)
    assert config.layout.data_parallel == 2 * nodes


def test_a_saved_job_goes_back_into_the_queue(tmp_path: Path) -> None:
    done = submit(tmp_path, "one_node", code=SAVED)
    assert (done.code, done.scontrol) == (SAVED, "requeue 17")


def test_of_an_array_only_the_task_that_saved_goes_back(tmp_path: Path) -> None:
    """The last task has the id of the array, by which scontrol would requeue all of them."""
    variables = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "4"}
    assert submit(tmp_path, "seeds", code=SAVED, **variables).scontrol == "requeue 17_4"


@pytest.mark.parametrize("code", [0, REFUSED, STUCK])
def test_what_ended_otherwise_does_not(tmp_path: Path, code: int) -> None:
    done = submit(tmp_path, "one_node", code=code)
    assert (done.code, done.scontrol) == (int(code != 0), "")
    assert (f"codes of workers: {code}" in done.said) == (code != 0)


def test_other_codes_start_it_again_where_they_are_named(tmp_path: Path) -> None:
    done = submit(tmp_path, "one_node", code=STUCK, REQUEUE_AFTER="75 4")
    assert (done.code, done.scontrol) == (STUCK, "requeue 17")


def test_the_number_of_starts_has_a_bound(tmp_path: Path) -> None:
    variables = {"MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}
    done = submit(tmp_path, "one_node", code=SAVED, **variables)
    assert (done.code, done.scontrol) == (SAVED, "")
    assert "MAX_REQUEUES=3" in done.said


def test_the_signal_reaches_the_step_and_its_end_is_awaited(tmp_path: Path) -> None:
    job = Submitted(tmp_path, "one_node", code=SAVED, UNTIL_SIGNAL="yes")
    job.until_started()
    job.process.send_signal(signal.SIGUSR1)
    done = job.wait()
    assert (tmp_path / "signal").read_text() == "saved\n"
    assert (done.code, done.scontrol) == (SAVED, "requeue 17")


def test_the_command_ignores_what_the_ranks_handle(tmp_path: Path) -> None:
    """As a program of Python sees it that the shell of a node has become."""
    ignored = (
        "import signal as s; print(*(s.getsignal(n) is s.SIG_IGN for n in (s.SIGUSR1, s.SIGTERM)))"
    )
    words = submit(tmp_path, "one_node").srun
    shell = words[words.index("bash") :][:4]
    done = subprocess.run(
        [*shell, sys.executable, "-c", ignored], check=True, capture_output=True, text=True
    )
    assert done.stdout == "True True\n"


def test_containers(tmp_path: Path) -> None:
    (tmp_path / "pyxis").mkdir()
    (tmp_path / "apptainer").mkdir()
    image = {"IMAGE": "train.img", "MOUNTS": "/data:/data"}
    done = submit(tmp_path / "pyxis", "one_node", CONTAINER="pyxis", **image)
    assert {"--container-image=train.img", "--container-mounts=/data:/data"} <= set(done.options)
    assert done.command[0] == "torchrun"
    done = submit(tmp_path / "apptainer", "one_node", CONTAINER="apptainer", **image)
    inside, torchrun = done.command.index("train.img"), done.command.index("torchrun")
    assert done.command[:2] == ["apptainer", "exec"]
    assert torchrun == inside + 1
    done_without = subprocess.run(
        ["bash", str(FOLDER / "one_node.sbatch")],
        cwd=ROOT,
        env=os.environ | {"CONTAINER": "docker", "RUN": str(tmp_path), "SLURM_JOB_ID": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done_without.returncode == 2
    assert "CONTAINER must be none, pyxis or apptainer: CONTAINER=docker" in done_without.stderr


def test_the_page_names_every_parameter() -> None:
    scripts = "".join(path.read_text() for path in FOLDER.glob("*.s*"))
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    parameters = set(re.findall(r"\$\{([A-Z_]+):[-?]", scripts)) - {"SLURM_GPUS_ON_NODE"}
    parameters = {name for name in parameters if not name.startswith("SLURM_")}
    assert parameters - set(re.findall(r"`([A-Z_]+)`", page)) == set()
