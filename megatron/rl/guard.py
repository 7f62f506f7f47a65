"""The step guard: ranks compare what they are about to do, and errors name where they happened.

Before every step all ranks compare a small digest: a difference is an error, not a hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron.rl.initialize import Grid


class StepError(Exception):
    """A step failed; the message says where."""


class SkippedStepsError(StepError):
    """More steps were skipped than --max-skipped-steps allows."""


@dataclass(frozen=True)
class StepDigest:
    """What every rank must agree on before a step; one int64 a field.

    Args:
        step: optimizer step about to be taken, from 1.
        rollout: rollout the step belongs to.
        num_micro_batches: of every data-parallel rank.
        samples: checksum of ids, tokens and placement of the step's samples.
        skipped_steps: so far.
        configuration: checksum of the resolved flags.
    """

    step: int
    rollout: int
    num_micro_batches: int
    samples: int
    skipped_steps: int
    configuration: int


def agree(digest: StepDigest, stop: int, grid: Grid) -> int:
    """Compare the digest over all ranks and share the wish to stop.

    Args:
        digest: this rank's.
        stop: this rank's reason to stop, 0 for none.
        grid: this rank; one all-gather of a few int64 over the whole job.

    Returns:
        The largest reason to stop of any rank.

    Raises:
        StepError: naming the fields that differ and the ranks that differ from rank 0.
    """
    names = [field.name for field in fields(digest)]
    mine = torch.tensor([*(getattr(digest, name) for name in names), stop], device=grid.device)
    everyone = mine.new_empty(grid.world.world_size, mine.numel())
    dist.all_gather_into_tensor(everyone.flatten(), mine)
    *columns, stops = everyone.cpu().T.tolist()
    differences = [
        f"{name}: "
        + ", ".join(f"rank {rank} has {value}" for rank, value in strangers)
        + f", rank 0 has {column[0]}"
        for name, column in zip(names, columns, strict=True)
        if (strangers := [(r, value) for r, value in enumerate(column) if value != column[0]])
    ]
    if differences:
        raise StepError(
            f"ranks are about to take different steps (step {digest.step}); "
            + "; ".join(differences)
        )
    return max(stops)


@contextmanager
def phase(name: str, step: int, grid: Grid, samples: str = "") -> Iterator[None]:
    """Name the rank, step, phase and samples in any error of the block."""
    try:
        yield
    except StepError:
        raise
    except (Exception, CheckpointException) as error:  # torch's own error is no Exception
        where = f"rank {grid.world.rank}, step {step}, {name}"
        about = f" (samples {samples})" if samples else ""
        raise StepError(f"{where}{about}: {type(error).__name__}: {error}") from error
