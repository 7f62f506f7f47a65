"""Attention over runs of rows, for every layout and rank, against a dense loop over tokens."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatron.rl.attention import PackedRows, choose_attention, runs_of, sdpa_attention
from megatron.rl.rotary import Rotary
from slime_loss import ContiguousLayout, PaddedLayout, SequenceLayout, ZigzagLayout

PACKS = [[5, 1, 9], [1], [2, 2], [17], [3, 8, 1, 1, 6], []]


def layouts(lengths: list[int], cp_size: int, multiple: int = 1) -> Iterator[list[SequenceLayout]]:
    for kind in (ContiguousLayout, ZigzagLayout):
        yield [
            kind(lengths, cp_rank=rank, cp_size=cp_size, pad_to_multiple_of=multiple)
            for rank in range(cp_size)
        ]
    if cp_size == 1:
        yield [PaddedLayout(lengths, pad_to_multiple_of=multiple)]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> Tensor:
    """Each token, one by one, over the tokens of its sample up to itself."""
    out = torch.zeros_like(query)
    groups = query.shape[1] // key.shape[1]
    start = 0
    for length in lengths:
        for row in range(start, start + length):
            for head in range(query.shape[1]):
                keys = key[start : row + 1, head // groups]
                weights = (keys @ query[row, head] * scale).softmax(0)
                out[row, head] = weights @ value[start : row + 1, head // groups]
        start += length
    return out


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", PACKS)
def test_runs_cover_every_token_once_and_end_at_their_own_row(
    lengths: list[int], cp_size: int
) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for ranks in layouts(lengths, cp_size, multiple=2):
        seen = []
        for layout in ranks:
            order, runs = runs_of(layout)
            pack_rows = layout.token_index[order].tolist()
            assert [row for run in runs for row in range(run.first, run.last)] == list(
                range(len(pack_rows))
            )
            for run in runs:
                rows = pack_rows[run.first : run.last]
                assert rows == list(range(run.keys_end - len(rows), run.keys_end))
                assert run.keys in starts
                assert run.is_whole_sample == (rows[0] == run.keys)
            seen += pack_rows
        assert sorted(seen) == list(range(sum(lengths)))


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [pack for pack in PACKS if pack])
def test_all_ranks_together_are_dense_attention(lengths: list[int], cp_size: int) -> None:
    torch.manual_seed(0)
    total, heads, groups, width = sum(lengths), 4, 2, 6
    query = torch.randn(total, heads, width, dtype=torch.float64, requires_grad=True)
    key = torch.randn(total, groups, width, dtype=torch.float64, requires_grad=True)
    value = torch.randn(total, groups, width, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(total, heads, width, dtype=torch.float64)
    expected = dense_attention(query, key, value, lengths, 0.3)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), (query, key, value))
    for ranks in layouts(lengths, cp_size):
        parts = torch.zeros_like(query)
        for layout in ranks:
            order, runs = runs_of(layout)
            pack_rows = layout.token_index[order]
            if runs:
                attended = sdpa_attention(query[pack_rows], key, value, tuple(runs), 0.3)
                parts = parts.index_put((pack_rows,), attended)
        grads = torch.autograd.grad((parts * upstream).sum(), (query, key, value))
        torch.testing.assert_close(parts, expected, rtol=0, atol=1e-12)
        for got, wanted in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_packed_rows_carry_the_layout_to_core() -> None:
    layout = ContiguousLayout([3, 4], cp_size=2, cp_rank=1)
    tables = Rotary(4).table(torch.arange(layout.num_rows))
    rows = PackedRows.of(layout, "thd", tables, torch.device("cpu"))
    assert rows.qkv_format == "thd"
    assert rows.cu_seqlens_q.tolist() == [0, 3, 7]
    assert rows.layout is layout
    assert rows.cosines.shape == (layout.num_rows, 1, 4)


def test_flash_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_backend flash needs a GPU"):
        choose_attention(AttnBackend.flash)
    assert choose_attention(AttnBackend.auto) is sdpa_attention
