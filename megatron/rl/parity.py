"""One optimizer step as numbers that know no layout, to compare two launches of the same run.

Each rank gives its parts of the gradients under the names of a checkpoint, which are the same for
every layout; `assemble` puts the parts of all ranks together and `compare` holds two steps side by
side.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from torch import Tensor

from megatron.rl.build import build_trainee
from megatron.rl.checkpoint_model import OUTPUT_LAYER
from megatron.rl.computed import compute, micro_batch_of, needs_pass, old_outputs_of
from megatron.rl.config import RunConfig
from megatron.rl.data import open_files
from megatron.rl.initialize import Grid
from megatron.rl.model import RLModel, unwrap
from megatron.rl.rollout import read_rollout
from megatron.rl.step import Trainee

PARITY = {"clip_grad": 0.0, "hidden_dropout": 0.0, "dry_run": True}
"""Flags of every such step, laid over the run's: gradients as they are, no dropout, whose draws
depend on the layout, and no file is written."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of one gradient.

    Args:
        name: of the parameter, as in a checkpoint; stacked layers and experts by index.
        shape: of the whole parameter.
        where: which part of it this is.
        gradient: the part; None on a rank that holds a copy of what another rank gives.
        sums: of its entries and of their squares, to compare copies by.
    """

    name: str
    shape: tuple[int, ...]
    where: tuple[tuple[int, int], ...]
    gradient: Tensor | None
    sums: tuple[float, float]


@dataclass(frozen=True)
class RankStep:
    """One rank's share of a step.

    Args:
        samples: checksum of the step's samples, in their order, as the row index has them.
        scalars: loss, metrics and gradient norm.
        parts: of the gradients.
    """

    samples: int
    scalars: Mapping[str, float]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Step:
    """A whole step.

    Args:
        samples: as of `RankStep`.
        scalars: loss, metrics and gradient norm.
        gradients: of every parameter, whole.
        spread: how far ranks differ that should hold the same, by entry, relative.
    """

    samples: int
    scalars: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    spread: Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """One entry of two steps, compared.

    Args:
        name: of the metric, or of the parameter.
        kind: "scalar" or "gradient".
        first: its value, or the largest entry of the gradient, in the first step.
        second: the same in the second step; None where a step has no such entry.
        relative: the difference relative to the larger of the two; of a gradient the largest
            difference of an entry relative to the largest entry. Infinite where a step lacks it.
        spread: the largest difference of ranks that should hold the same, in either step.
    """

    name: str
    kind: str
    first: float | None
    second: float | None
    relative: float
    spread: float

    @property
    def worst(self) -> float:
        """The larger one of both differences."""
        return max(self.relative, self.spread)


def first_step(config: RunConfig, grid: Grid) -> RankStep:
    """Take the first step of a run under the flags of `PARITY`.

    Communicates over every group.

    Raises:
        ValueError: the gradient would be clipped, there are no rollout files, or the step is not
            finite.
    """
    if config.optimizer.clip_grad:
        raise ValueError(f"clip_grad must be 0: clip_grad={config.optimizer.clip_grad}")
    if not config.data.rollout_data:
        raise ValueError("rollout_data must be given, to have the same samples: rollout_data=()")
    trainee = build_trainee(config, grid)
    fill_initial_weights(config, trainee)
    rollout = read_rollout(0, open_files(config).rollout(0, 0), config, grid.dp_rank)
    old_outputs = old_outputs_of(rollout, trainee) if needs_pass(rollout, config) else {}
    computed = compute(rollout, old_outputs, config, grid)
    step = rollout.steps[0]
    packs = step.micro_batches[grid.dp_rank]
    result = trainee.step([micro_batch_of(rollout, step, p, computed, trainee) for p in packs])
    if not result.updated:
        raise ValueError(f"the first step is not finite: {result.culprit}")
    return RankStep(
        samples=zlib.crc32(rollout.rows[list(step.positions)].tobytes()),
        scalars={**result.metrics, "grad_norm": result.grad_norm},
        parts=tuple(gradient_parts(config, trainee)),
    )


@torch.no_grad()
def fill_initial_weights(config: RunConfig, trainee: Trainee) -> None:
    """Draw weights by name where the run would draw them at random.

    Core's own draws depend on the layout. The value head of a critic, which starts at zero, is
    drawn as well: zero would teach the layers nothing.
    """
    drawn = config.checkpoint.pretrained_checkpoint is None and config.model.hf_checkpoint is None
    for chunk in trainee.chunks:
        for shard in _shards(unwrap(chunk)):
            if drawn or (config.is_critic and shard.key == OUTPUT_LAYER):
                _draw(shard, config)
    trainee.optimizer.reload_model_params()


def _draw(shard: ShardedTensor, config: RunConfig) -> None:
    name, shape, where = _place(shard, config.model.vocab_size)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    whole *= config.transformer.init_method_std
    if "norm" in name and name.split("[")[0].endswith("weight"):
        whole += 1
    own = shard.data.view(shard.data.shape[-len(shape) :])
    own.zero_()  # rows of the vocabulary's padding
    part = whole[_slices(where)]
    own[tuple(slice(0, size) for size in part.shape)].copy_(part)


def gradient_parts(config: RunConfig, trainee: Trainee) -> Iterator[Part]:
    """This rank's parts of the gradients of a step that was taken.

    Communicates over the data-parallel groups, where a distributed optimizer divides gradients.
    """
    for chunk in trainee.chunks:
        if config.ddp.use_distributed_optimizer:
            _gather_buckets(chunk)
        with _gradients_as_weights(chunk) as gradients:
            storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
            shards = [
                shard
                for shard in _shards(unwrap(chunk))
                if shard.data.untyped_storage().data_ptr() in storages  # buffers are no parameters
            ]
            held = sum(gradient.numel() for gradient in gradients)
            given = sum(shard.data.numel() for shard in shards)
            assert held == given, f"{held} entries of gradients, {given} under names"
            yield from (_part(shard, config.model.vocab_size) for shard in shards)


def _gather_buckets(chunk: torch.nn.Module) -> None:
    """Give each rank the sums of all ranks: after a reduce-scatter it holds its own slice alone."""
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


@contextmanager
def _gradients_as_weights(chunk: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Let every parameter hold its gradient, which core then cuts as it cuts weights."""
    trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    weights = [parameter.data for parameter in trained]
    for parameter in trained:
        parameter.data = parameter.main_grad
    try:
        yield [parameter.main_grad for parameter in trained]
    finally:
        for parameter, weight in zip(trained, weights, strict=True):
            parameter.data = weight


def _shards(model: RLModel) -> Iterator[ShardedTensor]:
    state = model.sharded_state_dict()
    apply_factories(state)
    yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _part(shard: ShardedTensor, vocab_size: int) -> Part:
    name, shape, where = _place(shard, vocab_size)
    gradient = shard.data.detach().reshape(shard.data.shape[-len(shape) :])
    gradient = gradient[tuple(slice(0, last - first) for first, last in where)]
    precise = gradient.double()
    is_given = is_main_replica(shard.replica_id)
    return Part(
        name=name,
        shape=shape,
        where=where,
        gradient=gradient.cpu().clone() if is_given else None,
        sums=(float(precise.sum()), float(precise.square().sum())),
    )


def _place(
    shard: ShardedTensor, vocab_size: int
) -> tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Name, shape of the whole, and the part of it that the shard is; without padded vocabulary."""
    stacked = shard.prepend_axis_num
    index = shard.global_offset[:stacked]
    name = shard.key + (f"[{', '.join(map(str, index))}]" if stacked else "")
    shape = list(shard.global_shape[stacked:])
    if shard.allow_shape_mismatch:  # as core marks what is padded
        shape[0] = min(shape[0], vocab_size)
    first = shard.global_offset[stacked:]
    sizes = shard.data.shape[-len(shape) :]
    where = tuple(
        (min(begin, size), min(begin + length, size))
        for begin, length, size in zip(first, sizes, shape, strict=True)
    )
    return name, tuple(shape), where


def _slices(where: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in where)


def assemble(ranks: Sequence[RankStep]) -> Step:
    """Put the parts of all ranks together.

    Raises:
        ValueError: ranks trained other samples, or a parameter is not covered.
    """
    if len({rank.samples for rank in ranks}) > 1:
        raise ValueError("ranks took different samples")
    spread = {
        name: max(_relative(rank.scalars[name], value) for rank in ranks)
        for name, value in ranks[0].scalars.items()
    }
    gradients: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    sums: dict[tuple, tuple[int, float, float]] = {}
    for part in (part for rank in ranks for part in rank.parts):
        size = math.prod(last - first for first, last in part.where)
        first_sums = sums.setdefault((part.name, part.where), (size, *part.sums))
        distance = _distance(first_sums, part.sums)
        spread[part.name] = max(spread.get(part.name, 0.0), distance)
        if part.gradient is not None:
            whole = gradients.setdefault(part.name, part.gradient.new_zeros(part.shape))
            whole[_slices(part.where)] = part.gradient
            missing[part.name] = missing.get(part.name, whole.numel()) - size
    uncovered = [name for name, count in missing.items() if count]
    uncovered += [name for name, _ in sums if name not in gradients]
    if uncovered:
        raise ValueError(f"every gradient must be given once: {uncovered[0]} is not")
    return Step(ranks[0].samples, ranks[0].scalars, gradients, spread)


def _distance(first: tuple[int, float, float], second: tuple[float, float]) -> float:
    """How far two copies differ, as seen in their sums, relative to their norm."""
    size, total, squares = first
    norm = math.sqrt(max(squares, second[1]))
    if norm == 0.0:
        return 0.0
    apart = abs(total - second[0]) / math.sqrt(max(size, 1))
    return max(apart, abs(math.sqrt(squares) - math.sqrt(second[1]))) / norm


def _relative(first: float, second: float) -> float:
    scale = max(abs(first), abs(second))
    return abs(first - second) / scale if scale else 0.0


def compare(first: Step, second: Step) -> list[Difference]:
    """Every entry of two steps, the most different first.

    Raises:
        ValueError: the steps trained different samples.
    """
    if first.samples != second.samples:
        raise ValueError(
            "both launches must train the same samples: flags of data, batches, seed and shuffle "
            "must agree"
        )
    found = [
        _compared(name, first, second) for name in dict.fromkeys((*first.scalars, *second.scalars))
    ]
    found += [
        _compared_gradient(name, first, second)
        for name in dict.fromkeys((*first.gradients, *second.gradients))
    ]
    return sorted(found, key=lambda difference: -difference.worst)


def _compared(name: str, first: Step, second: Step) -> Difference:
    values = first.scalars.get(name), second.scalars.get(name)
    relative = math.inf if None in values else _relative(*values)
    return Difference(name, "scalar", *values, relative, _spread(name, first, second))


def _compared_gradient(name: str, first: Step, second: Step) -> Difference:
    gradients = first.gradients.get(name), second.gradients.get(name)
    largest = [None if g is None else float(g.abs().max()) for g in gradients]
    relative = math.inf
    if None not in largest and gradients[0].shape == gradients[1].shape:
        apart = float((gradients[0].double() - gradients[1].double()).abs().max())
        relative = apart / max(largest) if max(largest) else 0.0
    return Difference(name, "gradient", *largest, relative, _spread(name, first, second))


def _spread(name: str, *steps: Step) -> float:
    return max(step.spread.get(name, 0.0) for step in steps)
