"""The step guard: ranks compare what they are about to do, and errors name where they happened.

Before every step all ranks compare a small digest: a difference is an error, not a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import yaml
from torch.distributed.checkpoint import CheckpointException

from megatron.rl.checkpoint_manifest import CheckpointError
from megatron.rl.signs import brief
from megatron.rl.watch import Watch

if TYPE_CHECKING:
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
        samples: checksum of the rollout's samples and of where each is trained.
        skipped_steps: so far.
    """

    step: int
    rollout: int
    num_micro_batches: int
    samples: int
    skipped_steps: int


def agree_on_flags(written: str) -> None:
    """Compare the flags of all ranks, which decide whom each rank talks to and about what.

    Args:
        written: this rank's resolved flags, as YAML; one all-gather of its checksum over the whole
            job, and of the text where checksums differ.

    Raises:
        StepError: naming each flag that differs, with its values and their ranks.
    """
    checksums = [0] * dist.get_world_size()
    dist.all_gather_object(checksums, zlib.crc32(written.encode()))
    if len(set(checksums)) == 1:
        return
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, written)
    everyones = [yaml.safe_load(text) for text in texts]
    values = {name: [str(flags[name]) for flags in everyones] for name in everyones[0]}
    differences = "; ".join(
        f"--{name.replace('_', '-')}: {_in_groups(of_ranks)}"
        for name, of_ranks in values.items()
        if len(set(of_ranks)) > 1
    )
    raise StepError(
        f"all ranks must have the same flags; {differences}; fix: start every rank with the same "
        "command line, --config file and --hf-checkpoint"
    )


def agree(digest: StepDigest, stop: int, ids: Sequence[int], grid: Grid) -> int:
    """Compare the digest over all ranks and share the wish to stop.

    Args:
        digest: this rank's.
        stop: this rank's reason to stop, 0 for none.
        ids: the step's samples as this rank knows them, for the message.
        grid: this rank; one all-gather of a few int64 over the whole job.

    Returns:
        The largest reason to stop of any rank.

    Raises:
        StepError: naming the fields that differ and the ranks that differ from rank 0, with the
            samples of both.
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
        everyones: list[str] = [""] * len(stops)
        dist.all_gather_object(everyones, brief(ids))
        raise StepError(
            f"ranks are about to take different steps (step {digest.step}); "
            + "; ".join(differences)
            + f"; samples {_in_groups(everyones)}"
        )
    return max(stops)


def largest(stop: int, grid: Grid) -> int:
    """The largest reason to stop of any rank; one all-reduce over the whole job."""
    shared = torch.tensor([stop], device=grid.device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def _in_groups(texts: Sequence[str]) -> str:
    """Each text once, with the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on rank {brief(ranks)[1:-1]}" for text, ranks in groups.items())


@contextmanager
def phase(
    name: str,
    step: int,
    watch: Watch,
    samples: str = "",
    *,
    lets_pass: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Tell the other ranks where this one is; name rank, step, phase and samples in any error.

    Args:
        name: what is done.
        step: optimizer step, from 1; 0 before the first.
        watch: of this rank.
        samples: ids of the samples it is done with.
        lets_pass: errors that are left as they are.

    Raises:
        StepError: for any other error of the block.
    """
    watch.enter(step, name, samples)
    place = watch.place
    try:
        yield
    except lets_pass:
        raise
    except StepError as error:  # every rank has it
        raise type(error)(watch.once(str(error), place)) from error.__cause__
    except CheckpointError as error:  # so it has this one
        raise StepError(watch.once(f"{place}: {error}", place)) from None
    except (Exception, CheckpointException) as error:  # torch's own error is no Exception
        raise StepError(watch.explain(place, error)) from error
