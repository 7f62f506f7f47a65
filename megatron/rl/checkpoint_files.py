"""Where checkpoints lie: Megatron's directory layout, and which checkpoint is the newest whole one.

DIR/latest_checkpointed_iteration.txt    the newest complete step, written last and atomically
DIR/iter_0000020/                        one step: torch_dist shards, common.pt, config.yaml, and
                                         files.json, which says what belongs to it
"""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path

from megatron.rl.checkpoint_manifest import CheckpointError, damage, is_checkpoint
from megatron.rl.logging import log_warning

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.yaml"
REPLACED = ".replaced"
"""End of the name of a checkpoint while another one of the same step takes its place."""
FIX = "fix: bring one back, or start anew in another directory"
"""What to do where no checkpoint of a directory is whole."""


def find_checkpoint(directory: Path) -> Path:
    """The checkpoint that a directory is, or the newest complete one in it.

    Raises:
        CheckpointError: there is none.
    """
    found = usable_checkpoints(directory)
    if not found:
        raise CheckpointError(
            f"{directory} holds no complete checkpoint; fix: name a run's --save directory"
        )
    return found[0]


def usable_checkpoints(directory: Path) -> list[Path]:
    """The checkpoint that a directory is, or the complete ones in it, the one to load first.

    That is the one of the tracker. Where it is broken, a warning names it and what is broken in it,
    and the newest complete one that is not newer than the tracker says comes first.

    Raises:
        CheckpointError: the directory is, or has held, checkpoints, and none is complete.
    """
    if is_checkpoint(directory):
        if (complaint := damage(directory)) is not None:
            raise CheckpointError(f"{directory} holds no complete checkpoint: {complaint}; {FIX}")
        return [directory]
    named, complaint = _named_by_tracker(directory)
    steps = steps_in(directory)
    order = sorted(steps, key=lambda step: _order(step, named))
    broken = {step: damage(steps[step]) for step in order}
    usable = [step for step in order if broken[step] is None]
    complaints = [] if complaint is None else [complaint]
    if named is not None and named not in steps:
        complaints.append(f"{step_directory(directory, named)} is missing")
    worse = takewhile(lambda step: broken[step] is not None, order)
    complaints += [f"{steps[step]} is broken: {broken[step]}" for step in worse]
    if not usable and complaints:
        raise CheckpointError(
            f"{directory} holds no complete checkpoint: {'; '.join(complaints)}; {FIX}"
        )
    if complaints:
        log_warning(f"{'; '.join(complaints)}; loading {steps[usable[0]]}")
    return [steps[step] for step in usable]


def holds_checkpoint(directory: Path) -> bool:
    """Whether a directory is a checkpoint or has one in it, whole or broken."""
    try:
        return is_checkpoint(directory) or bool(steps_in(directory))
    except CheckpointError:
        return False


def _order(step: int, named: int | None) -> tuple[bool, bool, int]:
    """Sorts the tracker's step first, then those before it, the newest first."""
    return step != named, named is not None and step > named, -step


def steps_in(directory: Path) -> dict[int, Path]:
    """Every directory of a step, complete or not.

    A checkpoint that was being replaced when its run was killed still counts.
    """
    try:
        entries = sorted(directory.iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from None
    found: dict[int, Path] = {}
    for entry in entries:  # iter_N sorts before iter_N.replaced
        match = re.fullmatch(rf"iter_(\d{{1,12}})({re.escape(REPLACED)})?", entry.name)
        if match:
            found.setdefault(int(match[1]), entry)
    return found


def complete_steps(directory: Path) -> dict[int, Path]:
    """The steps whose checkpoints are complete, with their directories."""
    return {step: path for step, path in steps_in(directory).items() if damage(path) is None}


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"iter_{step:07d}"


def read_tracker(root: Path) -> int | None:
    """The step that the tracker of a checkpoint directory names, if it has one.

    Raises:
        CheckpointError: it names no step.
    """
    path = root / TRACKER
    try:
        with path.open("rb") as file:
            text = file.read(64)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not re.fullmatch(rb"\s*\d{1,12}\s*", text):
        raise CheckpointError(
            f"{path} must hold the number of a step: {text[:40]!r}; "
            "fix: write the number of the newest iter_ directory into it"
        )
    return int(text)


def write_tracker(root: Path, step: int) -> None:
    """Point the tracker at a complete checkpoint, atomically and durably."""
    temporary = root / f"{TRACKER}.partial"
    with temporary.open("w") as file:
        file.write(str(step))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / TRACKER)


def _named_by_tracker(directory: Path) -> tuple[int | None, str | None]:
    try:
        return read_tracker(directory), None
    except CheckpointError as error:
        return None, str(error)
