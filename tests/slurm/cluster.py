"""A Slurm of one machine in a temporary folder, started and ended by a program that may be root."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
CPUS_PER_NODE = 2
START_S, END_S = 60.0, 30.0
GRACE_S = 60

CONFIGURATION = """\
ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=requeue_delay=1,bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
InactiveLimit=0
MinJobAge=7200
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={grace} State=UP
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF State=UP
"""


def missing() -> str | None:
    """Why a Slurm cannot be started here, with the fix; None where it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        names = ", ".join(absent)
        return f"Slurm must be installed: {names} not found; fix: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "Slurm's daemons must be started by root: run this in a container or as root"
    return None


class Cluster:
    """Two nodes of two CPUs on this machine; its daemons, jobs and their processes end with it.

    Args:
        folder: empty, and short enough that a socket's path fits into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        } | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end)
            self._start()
            stack.pop_all()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._end()

    def call(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """What a command of Slurm's prints.

        Raises:
            RuntimeError: it failed, with what it said.
        """
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment | variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """A job's state in one word: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """One field of what `scontrol show job` says."""
        said = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in said.split())[name]

    def until(self, what: str, condition: Callable[[], bool], timeout: float) -> None:
        """Return as soon as the condition holds.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout:.0f} s: {what}")
            time.sleep(0.1)

    def _start(self) -> None:
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        conf = self.folder / "slurm.conf"
        conf.write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname(),
                ports=_free_ports(3),
                cpus=CPUS_PER_NODE,
                grace=GRACE_S,
            )
        )
        names = {"socket": "socket"} | {
            f"{name}-file": name for name in ("key", "pid", "log", "seed")
        }
        files = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._daemon("munged", "--foreground", "--force", *files)
        self.until("munged listens", (self.folder / "munge.socket").exists, START_S)
        self._daemon("slurmctld", "-D", "-c", "-f", str(conf))
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-f", str(conf), "-N", node)
        self.until("both nodes are idle", self._are_idle, START_S)

    def _are_idle(self) -> bool:
        try:
            return self.call("sinfo", "--noheader", "--Node", "--format=%T", "--partition=low") == (
                "idle\nidle"
            )
        except RuntimeError:  # slurmctld does not answer yet
            return False

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.said").open("a") as said:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=said, stderr=said)
            )

    def _end(self) -> None:
        """End the jobs, then the daemons, then by force whatever was started by them."""
        try:
            self.call("scancel", "--user=root")
            self.until("the queue is empty", lambda: not self.call("squeue", "--noheader"), END_S)
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"ended by force: {error}\n")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(END_S / 3)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        left = self.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(left, END_S)
        if alive:
            raise RuntimeError(f"cannot be ended: {alive}")

    def processes(self) -> list[psutil.Process]:
        """All that descends from the daemons, by the variable that they hand down."""
        sign = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = []
        for process in psutil.process_iter():
            try:  # read here: slurmstepd writes its title over the first of its variables
                variables = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue
            if sign in variables.split(b"\0"):
                found.append(process)
        return found


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
