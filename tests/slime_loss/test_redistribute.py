"""Streams move between any two layouts, over any number of ranks, in any dtype, with gradient."""

from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from slime_loss import ContiguousLayout, SequenceLayout, ZigzagLayout, redistribute
from tests.slime_loss.places import Place, Topology
from tests.slime_loss.references import without_type_checker
from tests.slime_loss.simulated_ranks import check_same_collectives, simulate

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
PACKS = [(6, 26), (2,), (1,), (), (1, 1, 1), (9, 2, 30, 5), (16, 8)]
KINDS = list(product((ContiguousLayout, ZigzagLayout), (1, 3)))
"""Layouts, and what their local rows are padded to a multiple of."""

MOVES = list(product(PACKS, KINDS, KINDS, (False, True)))
"""Pack, source, target, and whether a row is a vector."""


def move_everything(place: Place) -> int:
    """Every move in some dtype; how often this rank held no token of a pack that has some."""
    num_empty = 0
    for (lengths, source, target, is_wide), dtype in zip(MOVES, cycle(DTYPES), strict=False):
        layouts = [
            kind(
                lengths,
                cp_rank=place.rank,
                cp_size=place.topology.cp_size,
                pad_to_multiple_of=multiple,
            )
            for kind, multiple in (source, target)
        ]
        numbers = torch.arange(1, 2 * sum(lengths) + 1).view(-1, 2).remainder(7)
        check_move(place, layouts, (numbers if is_wide else numbers[:, 0]).to(dtype))
        num_empty += bool(lengths) and not (layouts[0].token_index >= 0).any()
    return num_empty


def check_move(place: Place, layouts: list[SequenceLayout], stream: Tensor) -> None:
    source, target = layouts
    has_gradient = stream.is_floating_point() or stream.is_complex()
    local = source.shard(stream).requires_grad_(has_gradient)
    moved = redistribute(local, source, target, place.cp_group)
    assert moved.dtype == stream.dtype
    assert moved.requires_grad == has_gradient
    assert torch.equal(moved, target.shard(stream))
    if has_gradient:
        # What comes back at padding rows, be it NaN, must not reach a token.
        (gradient,) = torch.autograd.grad(moved, local, target.shard(2 * stream, fill=torch.nan))
        assert gradient.dtype == stream.dtype
        assert torch.equal(gradient, source.shard(2 * stream))


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_ranks_move_between_any_two_layouts(cp_size: int) -> None:
    topology = Topology(cp_size=cp_size)
    with without_type_checker():
        num_empty, calls = simulate(topology, move_everything)
    check_same_collectives(topology, calls)
    assert (len(calls[0]) > len(MOVES)) == (cp_size > 1)
    assert (max(num_empty) > 0) == (cp_size > 1)


def test_every_dtype_is_moved_between_every_two_layouts() -> None:
    moved = {
        (source, target, dtype)
        for (_, source, target, _), dtype in zip(MOVES, cycle(DTYPES), strict=False)
    }
    assert len(moved) == len(KINDS) ** 2 * len(DTYPES)
