"""Every layout over every cp_size in one process; real ranks for what communicates."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from slime_loss.layout import (
    ContiguousLayout,
    PaddedLayout,
    SequenceLayout,
    ZigzagLayout,
    redistribute,
)
from tests.slime_loss.references import without_type_checker
from tests.spawn import World

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
]
PACKS = [[6, 26], [2], [1], [], [1, 1, 1], [9, 2, 30, 5], [16, 8]]

packs = st.lists(st.integers(1, 37), max_size=5)
cp_sizes = st.integers(1, 8)
multiples = st.sampled_from([1, 2, 3, 8])


def round_up(value: int, multiple: int) -> int:
    while value % multiple:
        value += 1
    return value


def contiguous_rows(lengths: list[int], rank: int, cp_size: int, multiple: int) -> list[int]:
    pack = list(range(sum(lengths))) or [-1]
    while len(pack) % (cp_size * multiple):
        pack.append(-1)
    num_rows = len(pack) // cp_size
    return pack[rank * num_rows : (rank + 1) * num_rows]


def zigzag_rows(lengths: list[int], rank: int, cp_size: int, multiple: int) -> list[int]:
    local: list[int] = []
    start = 0
    for length in lengths:
        rows = list(range(start, start + length))
        start += length
        while len(rows) % (2 * cp_size):
            rows.append(-1)
        width = len(rows) // (2 * cp_size)
        for chunk in (rank, 2 * cp_size - 1 - rank):
            local += rows[chunk * width : (chunk + 1) * width]
    local = local or [-1]
    while len(local) % multiple:
        local.append(-1)
    return local


def padded_rows(lengths: list[int], multiple: int) -> list[int]:
    lengths = lengths or [0]
    seq_length = round_up(max(max(lengths), 1), multiple)
    return [
        sum(lengths[:sample]) + position if position < length else -1
        for position in range(seq_length)
        for sample, length in enumerate(lengths)
    ]


def layouts_of_all_ranks(kind: type, lengths: list[int], cp_size: int) -> list[SequenceLayout]:
    if kind is PaddedLayout:
        return [PaddedLayout(lengths, pad_to_multiple_of=3)]
    return [
        kind(lengths, cp_rank=rank, cp_size=cp_size, pad_to_multiple_of=3)
        for rank in range(cp_size)
    ]


@given(lengths=packs, cp_size=cp_sizes, multiple=multiples)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_each_rank_holds_the_rows_the_definition_gives(
    lengths: list[int], cp_size: int, multiple: int
) -> None:
    for kind, rows in ((ContiguousLayout, contiguous_rows), (ZigzagLayout, zigzag_rows)):
        for rank in range(cp_size):
            layout = kind(lengths, cp_rank=rank, cp_size=cp_size, pad_to_multiple_of=multiple)
            assert layout.token_index.tolist() == rows(lengths, rank, cp_size, multiple)
            assert layout.token_index.dtype == torch.int64
            assert layout.num_rows == len(layout.token_index)
            assert layout.pack_rows == sum(lengths)
    padded = PaddedLayout(lengths, pad_to_multiple_of=multiple)
    assert padded.token_index.tolist() == padded_rows(lengths, multiple)


@pytest.mark.parametrize("kind", [ContiguousLayout, ZigzagLayout, PaddedLayout])
@given(lengths=packs, cp_size=cp_sizes)
@settings(derandomize=True, max_examples=40, deadline=None)
def test_every_row_has_one_owner_and_ranks_are_equally_long(
    kind: type, lengths: list[int], cp_size: int
) -> None:
    ranks = layouts_of_all_ranks(kind, lengths, cp_size)
    held = [row for layout in ranks for row in layout.token_index.tolist() if row >= 0]
    assert sorted(held) == list(range(sum(lengths)))
    assert len({layout.num_rows for layout in ranks}) == 1
    assert ranks[0].num_rows >= 3
    assert ranks[0].num_rows % 3 == 0


@pytest.mark.parametrize("kind", [ContiguousLayout, ZigzagLayout, PaddedLayout])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", PACKS)
def test_what_is_cut_joins_again_in_any_dtype(
    kind: type, dtype: torch.dtype, lengths: list[int]
) -> None:
    stream = torch.arange(3 * sum(lengths)).view(-1, 3).remainder(7).to(dtype)
    for cp_size in range(1, 9):
        ranks = layouts_of_all_ranks(kind, lengths, cp_size)
        for rows in (stream, stream[:, 0]):
            locals_ = [layout.shard(rows, fill=1) for layout in ranks]
            for layout, local in zip(ranks, locals_, strict=True):
                assert local.dtype == dtype
                for row, value in zip(layout.token_index.tolist(), local, strict=True):
                    assert torch.equal(value, rows[row] if row >= 0 else torch.ones_like(value))
            joined = ranks[0].join(torch.cat(locals_))
            assert joined.dtype == dtype
            assert torch.equal(joined, rows)


@pytest.mark.parametrize("kind", [ContiguousLayout, ZigzagLayout, PaddedLayout])
@pytest.mark.parametrize("lengths", PACKS)
def test_the_gradient_goes_to_the_row_it_came_from(kind: type, lengths: list[int]) -> None:
    for cp_size in range(1, 9):
        stream = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        ranks = layouts_of_all_ranks(kind, lengths, cp_size)
        locals_ = [layout.shard(stream) for layout in ranks]
        assert all(local.requires_grad for local in locals_)
        weights = [torch.arange(layout.num_rows) + 100.0 * layout.cp_rank for layout in ranks]
        loss = sum(
            # What stands on a padding row, be it NaN, must not reach the pack.
            (local * torch.where(layout.token_index >= 0, weight, torch.nan)).sum()
            for layout, local, weight in zip(ranks, locals_, weights, strict=True)
        )
        loss.backward()
        expected = torch.zeros(sum(lengths), dtype=torch.float64)
        for layout, weight in zip(ranks, weights, strict=True):
            for row, value in zip(layout.token_index.tolist(), weight, strict=True):
                if row >= 0:
                    expected[row] = value
        assert torch.equal(stream.grad, expected)

        rows = torch.zeros(cp_size * ranks[0].num_rows, dtype=torch.float64, requires_grad=True)
        if kind is not PaddedLayout or cp_size == 1:
            ranks[0].join(rows).backward(torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64))
            index = torch.cat([layout.token_index for layout in ranks])
            assert torch.equal(rows.grad, (index + 1).double())


def test_boundaries_are_what_attention_needs() -> None:
    contiguous = ContiguousLayout([6, 26], cp_rank=1, cp_size=2, pad_to_multiple_of=5)
    zigzag = ZigzagLayout([6, 26, 8], cp_rank=1, cp_size=2)
    assert contiguous.cu_seqlens.tolist() == [0, 6, 32]
    assert zigzag.cu_seqlens.tolist() == [0, 8, 36, 44]
    assert PaddedLayout([3, 1]).cu_seqlens.tolist() == [0, 3, 4]
    assert ContiguousLayout([]).cu_seqlens.tolist() == [0]
    assert {layout.cu_seqlens.dtype for layout in (contiguous, zigzag)} == {torch.int32}


def test_padded_rows_are_those_of_a_reshaped_batch() -> None:
    layout = PaddedLayout([3, 5], pad_to_multiple_of=2)
    assert (layout.batch_size, layout.seq_length, layout.num_rows) == (2, 6, 12)
    pack = torch.tensor([10, 11, 12, 20, 21, 22, 23, 24])
    batch = torch.tensor([[10, 11, 12, 0, 0, 0], [20, 21, 22, 23, 24, 0]])
    assert torch.equal(layout.shard(pack).view(6, 2), batch.t())


def test_a_sample_shorter_than_two_chunks_a_rank_still_gives_every_rank_rows() -> None:
    ranks = [ZigzagLayout([2], cp_rank=rank, cp_size=8) for rank in range(8)]
    assert [layout.num_rows for layout in ranks] == [2] * 8
    assert [layout.token_index.tolist() for layout in ranks[:3]] == [[0, -1], [1, -1], [-1, -1]]


@given(lengths=packs, cp_size=cp_sizes, data=st.data())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_one_process_redistributes_between_any_two(
    lengths: list[int], cp_size: int, data: st.DataObject
) -> None:
    kinds = [ContiguousLayout, ZigzagLayout] + ([PaddedLayout] if cp_size == 1 else [])
    source = layouts_of_all_ranks(data.draw(st.sampled_from(kinds)), lengths, cp_size)
    target = layouts_of_all_ranks(data.draw(st.sampled_from(kinds)), lengths, cp_size)
    stream = torch.randn(sum(lengths), dtype=torch.float64)
    rows = torch.cat([layout.shard(stream, fill=torch.nan) for layout in source])
    for layout in target:
        assert torch.equal(layout.shard(source[0].join(rows)), layout.shard(stream))
    if cp_size == 1:
        moved = redistribute(rows, source[0], target[0], None)
        assert torch.equal(moved, target[0].shard(stream))


WRONG: list[tuple[str, Callable[[], object]]] = [
    (r"cp_size must be >= 1: cp_size=0", lambda: ContiguousLayout([1], cp_size=0)),
    (
        r"cp_rank must be in .*: cp_rank=2, cp_size=2",
        lambda: ZigzagLayout([1], cp_rank=2, cp_size=2),
    ),
    (r"pad_to_multiple_of must be >= 1", lambda: PaddedLayout([1], pad_to_multiple_of=0)),
    (r"total_lengths must be >= 1: total_lengths\[1\]=0", lambda: PaddedLayout([1, 0])),
    (
        r"stream must have pack_rows rows: stream.shape=\(3,\), pack_rows=4, cp_rank=1",
        lambda: ContiguousLayout([4], cp_rank=1, cp_size=2).shard(torch.zeros(3)),
    ),
    (
        r"local must have num_rows rows: local.shape=\(3,\), num_rows=2, cp_rank=0",
        lambda: ContiguousLayout([4], cp_size=2).gather(torch.zeros(3), None),
    ),
    (
        r"cp_group must have cp_size ranks, .*: group size=1, rank=0, cp_size=2, cp_rank=0",
        lambda: ContiguousLayout([4], cp_size=2).gather(torch.zeros(2), None),
    ),
    (
        r"source and target must have the same total_lengths: .*=\(4,\), .*=\(3,\)",
        lambda: redistribute(torch.zeros(4), ContiguousLayout([4]), ContiguousLayout([3]), None),
    ),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[message[:30] for message, _ in WRONG])
def test_what_cannot_be_is_refused_by_name_rule_and_value(
    message: str, call: Callable[[], object]
) -> None:
    with without_type_checker(), pytest.raises(ValueError, match=message):
        call()


def move_on_ranks(rank: int, lengths: list[int], dtype: torch.dtype) -> None:
    """Gather and redistribute every pair of layouts; values and, for floats, gradients."""
    size, group = dist.get_world_size(), dist.group.WORLD
    stream = torch.arange(2 * sum(lengths)).view(-1, 2).remainder(11).to(dtype)
    cut = [kind(lengths, cp_rank=rank, cp_size=size) for kind in (ContiguousLayout, ZigzagLayout)]
    for source in cut:
        for target in cut:
            local = source.shard(stream).requires_grad_(dtype.is_floating_point)
            gathered, moved = (
                source.gather(local, group),
                redistribute(local, source, target, group),
            )
            assert gathered.dtype == moved.dtype == dtype
            assert torch.equal(gathered, stream)
            assert torch.equal(moved, target.shard(stream))
            if dtype.is_floating_point:
                check_gradients(rank, source, target, local, gathered, moved)


def check_gradients(
    rank: int,
    source: SequenceLayout,
    target: SequenceLayout,
    local: Tensor,
    gathered: Tensor,
    moved: Tensor,
) -> None:
    size, own = dist.get_world_size(), source.token_index >= 0
    rows = torch.arange(source.pack_rows).remainder(5).to(local.dtype).unsqueeze(1)
    # Rank r uses its copy with weight r + 1: the owner gets the sum of all.
    (grad,) = torch.autograd.grad(gathered, local, (rank + 1) * rows.expand_as(gathered))
    assert grad.dtype == local.dtype
    expected = size * (size + 1) // 2 * source.shard(rows).expand_as(local)
    assert torch.equal(grad, expected)
    upstream = torch.where(target.token_index >= 0, 1.0, torch.nan)[:, None] * torch.ones(1, 2)
    (grad,) = torch.autograd.grad(
        moved, local, upstream.to(local.dtype) * target.shard(rows, fill=1)
    )
    assert torch.equal(grad, torch.where(own[:, None], source.shard(rows).expand_as(grad), 0))


def move_all_on_ranks(rank: int, packs: list[list[int]], dtypes: list[torch.dtype]) -> None:
    for lengths in packs:
        for dtype in dtypes:
            move_on_ranks(rank, lengths, dtype)


def wrong_group_on_ranks(rank: int) -> str:
    layout = ContiguousLayout([4], cp_rank=1 - rank, cp_size=2)
    with pytest.raises(ValueError, match="cp_group must have cp_size ranks") as caught:
        layout.gather(torch.zeros(2), dist.group.WORLD)
    return str(caught.value)


def test_two_ranks_gather_and_redistribute_any_dtype(two_ranks: World) -> None:
    two_ranks.run(move_all_on_ranks, [[6, 26], [1], []], DTYPES)
    assert "rank=1, cp_size=2, cp_rank=0" in two_ranks.run(wrong_group_on_ranks)[1]


def test_four_ranks_gather_and_redistribute_uneven_packs(four_ranks: World) -> None:
    four_ranks.run(move_all_on_ranks, [[2], [9, 2, 30, 5]], [torch.bool, torch.bfloat16])
