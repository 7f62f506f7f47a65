"""Packs of samples for the tests of sharding: made from lengths, masks and a seed, on any rank."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from slime_loss import (
    ContiguousLayout,
    KeptIds,
    SequenceLayout,
    TokenBatch,
    ZigzagLayout,
    loss_weights,
)
from tests.slime_loss.places import ONE_RANK, Topology

VOCAB, PADDED_VOCAB, HIDDEN = 11, 16, 3
LAYOUTS: dict[str, type[ContiguousLayout] | type[ZigzagLayout]] = {
    "contiguous": ContiguousLayout,
    "zigzag": ZigzagLayout,
}


@dataclass(frozen=True)
class Sample:
    """A prompt, and for each response token whether it trains."""

    prompt: int
    mask: tuple[bool, ...]

    @property
    def length(self) -> int:
        return self.prompt + len(self.mask)


def all_train(prompt: int, response: int) -> Sample:
    return Sample(prompt, (True,) * response)


def none_trains(prompt: int, response: int) -> Sample:
    return Sample(prompt, (False,) * response)


@dataclass(frozen=True)
class Case:
    """One run of the head: what, on which pack, cut how.

    Attributes:
        variant: The name of an objective variant.
        samples: The pack.
        topology: The ranks.
        layout: The layout that the head sees; the hidden states come from the other one.
        multiple: Local rows are padded to a multiple of this, times tp_size.
        chunk_rows: Rows projected at a time.
        recompute: Whether the head keeps nothing for the backward.
        frozen: What has no gradient: "", "hidden" or "weight".
        has_kept_ids: Whether the log-probs are renormalised over kept ids.
        aggregation: How tokens are weighted.
        seed: Of all numbers.
    """

    variant: str
    samples: tuple[Sample, ...]
    topology: Topology = ONE_RANK
    layout: str = "contiguous"
    multiple: int = 1
    chunk_rows: int | None = None
    recompute: bool = False
    frozen: str = ""
    has_kept_ids: bool = False
    aggregation: str = "token_mean"
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sample.length for sample in self.samples)

    def head_layout(self, cp_rank: int) -> SequenceLayout:
        """The layout that the head sees."""
        return LAYOUTS[self.layout](
            self.lengths,
            cp_rank=cp_rank,
            cp_size=self.topology.cp_size,
            pad_to_multiple_of=self.multiple * self.topology.tp_size,
        )

    def outer_layout(self, cp_rank: int) -> SequenceLayout:
        """The other kind of layout, in which hidden states come and log-probs go."""
        (other,) = LAYOUTS.keys() - {self.layout}
        return LAYOUTS[other](self.lengths, cp_rank=cp_rank, cp_size=self.topology.cp_size)

    @property
    def unsharded(self) -> "Case":
        """The same on one rank, without padding and in one chunk."""
        return replace(self, topology=ONE_RANK, layout="contiguous", multiple=1, chunk_rows=None)


@dataclass(frozen=True)
class Pack:
    """The numbers of a case: hidden states, the head's weight and every stream of the pack."""

    hidden: Tensor
    weight: Tensor
    batch: TokenBatch

    def local(self, layout: SequenceLayout, omits: tuple[str, ...]) -> TokenBatch:
        """A rank's rows of the streams, but for those to be omitted."""
        fills = {"labels": -100, "sample_index": -1}
        streams = {
            name: layout.shard(stream, fill=fills.get(name, 0))
            for name, stream in vars(self.batch).items()
            if isinstance(stream, Tensor) and name not in omits and name != "num_trained_tokens"
        }
        kept = self.batch.kept_ids
        return TokenBatch(
            **streams,
            num_trained_tokens=self.batch.num_trained_tokens,
            kept_ids=None if kept is None else kept.select(layout.token_index),
        )


@lru_cache(maxsize=1)
def make_pack(samples: tuple[Sample, ...], seed: int, aggregation: str, has_kept_ids: bool) -> Pack:
    """The same numbers on every rank that asks."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(sample.length for sample in samples)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def log_probs() -> Tensor:
        return 0.3 * normal(num_rows) - math.log(VOCAB)

    loss_mask = torch.tensor(
        [flag for one in samples for flag in [*[False] * (one.prompt - 1), *one.mask, False]],
        dtype=torch.bool,
    )
    lengths = torch.tensor([sample.length for sample in samples], dtype=torch.int64)
    labels = torch.randint(0, VOCAB, (num_rows,), generator=generator)
    labels[lengths.cumsum(0) - 1] = -100
    sample_index = torch.arange(len(samples)).repeat_interleave(lengths)
    # A sample's advantage, but for a little of each token's own: opsm reads its sign.
    advantages = normal(len(samples))[sample_index] + 0.01 * normal(num_rows)
    batch = TokenBatch(
        labels=labels,
        loss_mask=loss_mask,
        loss_weight=loss_weights(
            loss_mask,
            sample_index,
            aggregation=aggregation,
            rollout_index=torch.arange(len(samples)) // 2,
            group_index=torch.arange(len(samples)) % 2,
            constant=8.0 if aggregation == "constant" else None,
        ),
        sample_index=sample_index,
        advantages=advantages,
        old_log_probs=log_probs(),
        rollout_log_probs=log_probs(),
        ref_log_probs=log_probs(),
        values=normal(num_rows),
        returns=normal(num_rows),
        num_trained_tokens=torch.tensor([sum(one.mask) for one in samples], dtype=torch.int64),
        kept_ids=_kept_ids(num_rows, generator) if has_kept_ids else None,
    )
    return Pack(normal(num_rows, HIDDEN), 0.5 * normal(PADDED_VOCAB, HIDDEN), batch)


def _kept_ids(num_rows: int, generator: torch.Generator) -> KeptIds:
    is_kept = torch.rand(num_rows, VOCAB, generator=generator) < 0.6
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), is_kept.sum(1).cumsum(0)])
    return KeptIds(is_kept.nonzero()[:, 1].contiguous(), offsets)
