from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_loss import KeptIds, TokenBatch, log_probs_from_logits
from tests.slime_loss.references import random_batch, without_type_checker


def kept_ids_of(rows: list[list[int]]) -> KeptIds:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    ids = torch.tensor([one for row in rows for one in row], dtype=torch.int64)
    return KeptIds(ids, torch.tensor(offsets))


kept_rows = st.lists(st.lists(st.integers(0, 11), max_size=5, unique=True), max_size=6)


@given(rows=kept_rows, first=st.integers(0, 12), width=st.integers(0, 6))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_the_mask_of_kept_ids_is_the_loop_over_them(
    rows: list[list[int]], first: int, width: int
) -> None:
    mask = kept_ids_of(rows).mask(first, width)
    assert mask.shape == (len(rows), width)
    for row, kept in enumerate(rows):
        for column in range(width):
            assert bool(mask[row, column]) == (not kept or first + column in kept)


@given(rows=kept_rows, data=st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_selected_kept_ids_follow_their_rows(rows: list[list[int]], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=8))
    selected = kept_ids_of(rows).select(torch.tensor(picks, dtype=torch.int64))
    expected = kept_ids_of([rows[pick] if pick >= 0 else [] for pick in picks])
    assert torch.equal(selected.ids, expected.ids)
    assert torch.equal(selected.offsets, expected.offsets)


def test_trained_labels_hide_whatever_a_masked_row_holds() -> None:
    mask = torch.tensor([True, False, True, False])
    batch = TokenBatch(
        labels=torch.tensor([3, 2**62, 0, -7]),
        loss_mask=mask,
        loss_weight=torch.ones(4),
        sample_index=torch.zeros(4, dtype=torch.int64),
    )
    assert batch.trained_labels.tolist() == [3, -100, 0, -100]
    assert batch.labels.tolist() == [3, 2**62, 0, -7]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("labels", torch.zeros(6, dtype=torch.int32), "labels must be torch.int64"),
        ("labels", torch.zeros(2, 3, dtype=torch.int64), "labels must have one dimension"),
        (
            "loss_mask",
            torch.zeros(6),
            "loss_mask must be torch.bool: loss_mask.dtype=torch.float32",
        ),
        ("loss_mask", torch.zeros(5, dtype=torch.bool), "loss_mask.shape=(5,), labels.shape=(6,)"),
        ("loss_weight", torch.zeros(6, dtype=torch.int64), "loss_weight must be floating point"),
        ("sample_index", torch.zeros(6), "sample_index must be torch.int64"),
        ("advantages", torch.zeros(1), "advantages must have the shape of labels"),
        ("old_log_probs", torch.zeros(6, 1), "old_log_probs must have one dimension"),
        ("rollout_log_probs", torch.zeros(7), "rollout_log_probs must have the shape of labels"),
        ("ref_log_probs", torch.zeros(6, device="meta"), "ref_log_probs must be on the device"),
        ("kept_ids", kept_ids_of([[1]] * 5), "kept_ids.num_rows=5, num_rows=6"),
    ],
)
def test_a_wrong_stream_is_refused_by_name(name: str, wrong: object, message: str) -> None:
    _, _, batch = random_batch(0, 6)
    with without_type_checker(), pytest.raises(ValueError, match="must") as error:
        replace(batch, **{name: wrong})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (torch.zeros(2), torch.zeros(1, dtype=torch.int64), "ids must be torch.int64"),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), "rows + 1"),
    ],
)
def test_wrong_kept_ids_are_refused(ids: torch.Tensor, offsets: torch.Tensor, message: str) -> None:
    with without_type_checker(), pytest.raises(ValueError, match="must") as error:
        KeptIds(ids, offsets)
    assert message in str(error.value)


def test_a_row_that_trains_needs_a_label() -> None:
    with pytest.raises(ValueError, match=r"labels must be vocabulary ids .*: labels\[1\]=-100"):
        _ = TokenBatch(
            labels=torch.tensor([3, -100, 0]),
            loss_mask=torch.tensor([True, True, False]),
            loss_weight=torch.ones(3),
            sample_index=torch.zeros(3, dtype=torch.int64),
        ).trained_labels


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 9], [0, 1, 2], "row 1 has 9, vocab_size=9"),
        ([-1, 2], [0, 0, 2], "row 1 has -1"),
        ([1, 2], [1, 2, 2], r"offsets\[0\]=1"),
        ([1, 2], [0, 1, 1], r"offsets\[-1\]=1, ids.shape=\(2,\)"),
        ([1, 2], [0, 3, 2], "never decrease"),
    ],
)
def test_kept_ids_are_checked_by_who_reads_them(
    ids: list[int], offsets: list[int], message: str
) -> None:
    kept = KeptIds(torch.tensor(ids), torch.tensor(offsets))
    with pytest.raises(ValueError, match=message):
        log_probs_from_logits(torch.zeros(2, 9), torch.tensor([0, 1]), keep_mask=kept)
