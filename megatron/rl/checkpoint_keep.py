"""Which checkpoints stay, and how one comes and another goes without a moment of neither."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.checkpoint_files import REPLACED, complete_steps, step_directory, write_tracker
from megatron.rl.checkpoint_manifest import sync

DELETED = ".deleted"
"""End of the name of a checkpoint that is being deleted."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a newer one is complete.

    Args:
        multiples_of: keep the steps that are multiples of this.
        last: keep this many of the newest, the one just written among them.
    """

    multiples_of: int | None
    last: int | None

    def _surplus(self, steps: list[int], newest: int) -> list[int]:
        """Which of the complete steps need not stay; never `newest`, or what is after it."""
        if self.multiples_of is None and self.last is None:
            return []
        earlier = sorted(step for step in steps if step < newest)
        old = earlier[: max(len(earlier) + 1 - (self.last or 1), 0)]
        return [step for step in old if not self.multiples_of or step % self.multiples_of]

    def retire(self, root: Path, newest: int) -> None:
        """Delete the complete checkpoints that need not stay.

        Broken ones are neither counted nor deleted.
        """
        complete = complete_steps(root)
        for step in self._surplus(list(complete), newest) if newest in complete else ():
            delete(complete[step])


def publish(partial: Path, root: Path, step: int) -> Path:
    """Give a checkpoint its name and point the tracker at it.

    One of the same step moves aside first: until it is deleted, one of the two is complete.
    """
    final = step_directory(root, step)
    aside = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    sync(root)
    write_tracker(root, step)
    sync(root)
    if aside.exists():
        delete(aside)
    return final


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint so that a kill on the way leaves none that looks complete."""
    doomed = checkpoint.with_name(f"{checkpoint.name}{DELETED}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(root: Path) -> None:
    """Remove what killed runs have left: half-written and half-deleted checkpoints."""
    for leftover in (*root.glob("iter_*.partial*"), *root.glob(f"iter_*{DELETED}")):
        shutil.rmtree(leftover, ignore_errors=True)
    for aside in root.glob(f"iter_*{REPLACED}"):
        original = aside.with_name(aside.name.removesuffix(REPLACED))
        if original.exists():
            delete(aside)
        else:
            aside.rename(original)
