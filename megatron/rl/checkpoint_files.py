"""Where checkpoints lie: Megatron's directory layout, and which checkpoint is the newest whole one.

DIR/latest_checkpointed_iteration.txt    the newest complete step, written last and atomically
DIR/iter_0000020/                        one step: torch_dist shards, common.pt, config.yaml
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core import dist_checkpointing

from megatron.rl.logging import log_warning

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.yaml"


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message says what does not fit."""


def find_checkpoint(directory: Path) -> Path:
    """The checkpoint that a directory is, or the newest complete one in it.

    Raises:
        CheckpointError: there is none.
    """
    found = newest_checkpoint(directory)
    if found is None:
        raise CheckpointError(f"{directory} holds no complete checkpoint")
    return found


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that a directory is, or the newest complete one in it; None for a new one.

    The tracker says which one is the newest; where that is broken, the newest complete one is
    named and taken.

    Raises:
        CheckpointError: the directory has held checkpoints, and none of them is complete.
    """
    if _is_complete(directory):
        return directory
    step = read_tracker(directory)
    complete = [path for path in sorted(directory.glob("iter_*[0-9]")) if _is_complete(path)]
    if step is None:
        return complete[-1] if complete else None
    named = directory / f"iter_{step:07d}"
    if named in complete:
        return named
    if not complete:
        raise CheckpointError(
            f"{named} is missing or incomplete, and {directory} holds no other checkpoint; "
            "fix: bring it back, or start anew in another directory"
        )
    log_warning(f"checkpoint {named} is missing or incomplete; loading {complete[-1]}")
    return complete[-1]


def read_tracker(root: Path) -> int | None:
    """The step that the tracker of a checkpoint directory names, if it has one.

    Raises:
        CheckpointError: it names no step.
    """
    try:
        text = (root / TRACKER).read_text()
    except FileNotFoundError:
        return None
    if not text.strip().isdigit():
        raise CheckpointError(
            f"{root / TRACKER} must hold the number of a step: {text[:40]!r}; "
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


def _is_complete(path: Path) -> bool:
    return dist_checkpointing.check_is_distributed_checkpoint(str(path))
