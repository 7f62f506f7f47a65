"""What goes wrong on one rank of a job: each fault replaces functions of the program."""

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import pretrain_rl
from megatron.rl import build, checkpoint_write, initialize, trainer
from megatron.rl.sources import RolloutRows
from megatron.rl.step import Trainee
from megatron.rl.stopping import Stop
from megatron.rl.trainer import Trainer

FAULT_STEP = 4
"""The first step of the second rollout of three steps each."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        plant: replaces functions, in the process of the rank.
        rank: the rank at fault.
        holds: whether that rank never ends by itself.
        everywhere: whether it is planted on every rank.
    """

    plant: Callable[[], None]
    rank: int = 1
    holds: bool = False
    everywhere: bool = False

    def is_at(self, rank: int) -> bool:
        """Whether it is planted on a rank."""
        return self.everywhere or rank == self.rank


def stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(1000)


def fill_the_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def nan_weight(trainee: Trainee) -> None:
    """One weight of this rank is no number."""
    weights = dict(trainee.chunks[0].named_parameters())
    weights["module.decoder.layers.2.mlp.linear_fc1.weight"].data.view(-1)[7] = float("nan")


def in_training(harm: Callable[[Trainee], None]) -> Callable[[], None]:
    """Harm at the beginning of the fault's step."""

    def plant() -> None:
        before, steps = Trainee.step, []

        def step(self: Trainee, micro_batches: Any) -> Any:
            steps.append(1)
            if len(steps) == FAULT_STEP:
                harm(self)
            return before(self, micro_batches)

        Trainee.step = step

    return plant


def before_call(
    owner: ModuleType | type, name: str, harm: Callable[[], None]
) -> Callable[[], None]:
    """Harm before a function that a module, or a class, of the program has under a name."""

    def plant() -> None:
        before = getattr(owner, name)

        def harmed(*args: Any, **kwargs: Any) -> Any:
            harm()
            return before(*args, **kwargs)

        setattr(owner, name, harmed)

    return plant


def in_reading(change: Callable[[RolloutRows], RolloutRows]) -> Callable[[], None]:
    """Change the second rollout as the trainer reads it."""

    def plant() -> None:
        before = trainer.read_rollout

        def read(number: int, found: RolloutRows, *others: Any) -> Any:
            return before(number, change(found) if number == 1 else found, *others)

        trainer.read_rollout = read

    return plant


def asleep(found: RolloutRows) -> RolloutRows:
    sleep()
    return found


def other_order(found: RolloutRows) -> RolloutRows:
    """The same prompts from the last to the first."""
    return replace(found, places=found.places[::-1])


def other_token(found: RolloutRows) -> RolloutRows:
    """A file whose rows have the same ids and lengths and one other token."""
    files, read = found.files, found.files.read
    files.rows["checksum"] += 1

    def unlike_the_file(positions: Any) -> Any:
        files.rows["checksum"] -= 1
        try:
            return read(positions)
        finally:
            files.rows["checksum"] += 1

    files.read = unlike_the_file
    return found


def skipped_collective() -> None:
    """Go into the fault's step without asking whether the others do."""
    before = Trainer._agree

    def agree(self: Trainer, rollout: Any, step: Any) -> Stop:
        if self.progress.step + 1 == FAULT_STEP:
            return Stop.NONE
        return before(self, rollout, step)

    Trainer._agree = agree


def waits_that_never_raise() -> None:
    """Collectives without a bound, as NCCL's are to the thread that waits, and a rank asleep."""
    initialize._group_timeout = lambda *_: timedelta(hours=1)
    if os.environ["RANK"] == "1":
        in_reading(asleep)()


FAULTS = {
    "none": Fault(lambda: None),
    "stopped": Fault(in_training(stop), holds=True),
    "killed": Fault(in_training(kill)),
    "asleep in reading": Fault(in_reading(asleep), holds=True),
    "rank 0 stopped": Fault(in_training(stop), rank=0, holds=True),
    "rank 0 killed": Fault(in_training(kill), rank=0),
    "other order": Fault(in_reading(other_order)),
    "other token": Fault(in_reading(other_token)),
    "collective skipped": Fault(skipped_collective),
    "nan weight": Fault(in_training(nan_weight)),
    "killed at start-up": Fault(before_call(pretrain_rl, "parse_config", kill)),
    "killed in old log-probs": Fault(before_call(trainer, "old_outputs_of", kill)),
    "stopped in advantages": Fault(before_call(trainer, "compute", stop), holds=True),
    "killed in loading": Fault(before_call(build, "restore", kill)),
    "disk full": Fault(before_call(checkpoint_write, "mark", fill_the_disk)),
    "never raises": Fault(waits_that_never_raise, holds=True, everywhere=True),
}
