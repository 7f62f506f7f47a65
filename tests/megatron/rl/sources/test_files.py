import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.rl.samples import BadRowsError, RowRules, Sample
from megatron.rl.sources import FileSource, RolloutFiles, check_rollouts

MakeRow = Callable[..., dict[str, Any]]
Write = Callable[..., str]

REAL = Path(__file__).parents[4] / "examples/rollouts/smollm2_chain_sum.jsonl"
RULES = RowRules(vocab_size=49152, need_reward=True, need_group=True, need_rollout_log_probs=True)


@pytest.fixture(scope="module")
def real() -> RolloutFiles:
    return check_rollouts([str(REAL)], RULES)


def groups_of(source: FileSource, k: int) -> list[int]:
    return list(dict.fromkeys(sample.group_index for sample in samples_of(source, k)))


def samples_of(source: FileSource, k: int) -> list[Sample]:
    return source.files.read(source.rollout_rows(k))


def test_the_summary_of_real_rollouts(real: RolloutFiles) -> None:
    summary = real.summary
    assert (summary.num_samples, summary.num_groups) == (119, 15)
    assert summary.group_sizes == {7: 1, 8: 14}
    assert (summary.num_tokens, summary.num_response_tokens) == (9078, 3436)
    assert summary.num_trained_tokens == 3436
    assert summary.statuses == {"completed": 78, "truncated": 41}
    assert (summary.response_length.min, summary.response_length.max) == (2, 48)
    assert summary.response_length.mean == pytest.approx(3436 / 119)
    assert summary.prompt_length.mean == pytest.approx((9078 - 3436) / 119)
    assert summary.reward.mean == pytest.approx(13 / 119)
    assert summary.reward_std == pytest.approx(math.sqrt(13 * 106 / 119 / 118))
    assert summary.equal_reward_groups == pytest.approx(6 / 15)
    assert (summary.num_with_rollout_log_probs, summary.num_masked_samples) == (119, 0)
    assert "119 (78 completed, 41 truncated)" in str(summary)


def test_a_summary_of_many_group_sizes_stays_short(make_row: MakeRow, write: Write) -> None:
    groups = [group for group in range(8) for _ in range(group + 1)] + [8, 9]
    rows = [make_row(i, group_index=group) for i, group in enumerate(groups)]
    summary = check_rollouts([write(rows)], RowRules()).summary
    assert "10 (3 of 1, 1 of 2, 1 of 3, 1 of 4, 1 of 5, and 3 other sizes)" in str(summary)


def test_rows_are_read_in_the_order_asked(real: RolloutFiles) -> None:
    samples = real.read([118, 0, 57, 0])
    assert [sample.index for sample in samples] == [118, 0, 57, 0]
    assert [sample.origin for sample in samples[:2]] == [f"{REAL}:119", f"{REAL}:1"]
    first = samples[1]
    assert first.tokens.dtype == np.int64
    assert first.tokens[:4].tolist() == [1, 9690, 198, 2683]
    assert (first.total_length, first.response_length, first.num_trained_tokens) == (97, 48, 48)
    assert first.rollout_log_probs.dtype == np.float32
    assert first.rollout_log_probs[0] == np.float32(-1.018377)
    assert (first.reward, first.status) == (0.0, "truncated")
    assert real.read([]) == []


def test_another_process_receives_the_index_and_reads(real: RolloutFiles) -> None:
    data = pickle.dumps(real)
    assert len(data) < real.rows.nbytes + 2000
    received = pickle.loads(data)
    np.testing.assert_array_equal(received.rows, real.rows)
    assert received.fingerprint == real.fingerprint
    assert received.read([5])[0].tokens.tolist() == real.read([5])[0].tokens.tolist()


def test_the_fingerprint_is_of_the_rows_and_not_of_the_place(
    make_row: MakeRow, write: Write
) -> None:
    rows = [make_row(0), make_row(1)]
    first = check_rollouts([write(rows, "a.jsonl")], RowRules()).fingerprint
    assert check_rollouts([write(rows, "b.jsonl")], RowRules()).fingerprint == first
    rows[1]["reward"] = 0.5
    assert check_rollouts([write(rows, "a.jsonl")], RowRules()).fingerprint != first


def test_groups_of_two_files_do_not_mix(make_row: MakeRow, write: Write) -> None:
    first = write([make_row(0, group_index=5), make_row(1, group_index=3)], "a.jsonl")
    second = write([make_row(0, group_index=5), make_row(1, group_index=5)], "b.jsonl")
    files = check_rollouts([first, second], RowRules())
    assert [sample.group_index for sample in files.read(range(4))] == [0, 1, 2, 2]
    assert files.largest_group == 2


def test_rows_without_a_group_are_groups_of_their_own(make_row: MakeRow, write: Write) -> None:
    rows = [make_row(0, group_index=None), make_row(1, group_index=4)]
    rows += [make_row(2, group_index=None), make_row(3, group_index=4)]
    files = check_rollouts([write(rows)], RowRules())
    assert files.rows["group"].tolist() == [0, 1, 2, 1]


def test_rollouts_are_numbered_as_groups_are(make_row: MakeRow, write: Write) -> None:
    rows = [make_row(i, rollout_index=r) for i, r in enumerate([9, None, 9, 4])]
    first, second = write(rows, "a.jsonl"), write([make_row(0, rollout_index=9)], "b.jsonl")
    files = check_rollouts([first, second], RowRules())
    assert [sample.rollout_index for sample in files.read(range(5))] == [0, 1, 0, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:1],
        lambda lines: [lines[0], b"{" + lines[1][1:-1]],
        lambda lines: [lines[0], lines[1].replace(b"[1, 5", b"[1,55")],
        lambda lines: [lines[0], lines[1].replace(b'length": 2', b'length": 1')],
    ],
    ids=["shorter", "broken", "against a rule", "another length"],
)
def test_a_file_that_changed_is_refused(
    change: Callable[[list[bytes]], list[bytes]], make_row: MakeRow, write: Write
) -> None:
    rows = [make_row(i, loss_mask=None, rollout_log_probs=None) for i in range(2)]
    path = Path(write(rows))
    files = check_rollouts([str(path)], RowRules(vocab_size=50))
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    assert files.read([0])[0].index == 0
    with pytest.raises(BadRowsError, match=f"{path}:2: file must be the file that was checked"):
        files.read([1])
    path.unlink()
    with pytest.raises(BadRowsError, match=f"{path}: file must be the file that was checked") as e:
        files.read([0])
    assert "(file must be readable: file=" in str(e.value)


@pytest.mark.parametrize("name", ["rollout_log_probs", "ref_log_probs", "values"])
def test_another_number_of_a_token_is_another_file(
    name: str, make_row: MakeRow, write: Write
) -> None:
    row = make_row(0)
    row[name] = [-0.5] * row["response_length"]
    files = check_rollouts([write([row])], RowRules())
    assert len(files.read([0])) == 1
    row[name][-1] = -0.25
    write([row])
    with pytest.raises(BadRowsError, match="other numbers per token"):
        files.read([0])


def test_an_epoch_holds_every_group_once_and_the_remainder_is_kept(real: RolloutFiles) -> None:
    source = FileSource(real, rollout_batch_size=4, num_epochs=2, seed=7)
    assert (source.rollouts_per_epoch, source.num_rollouts) == (4, 8)
    rollouts = [samples_of(source, k) for k in range(8)]
    assert [len(rollout) for rollout in rollouts] == list(source.rollout_sizes())
    for epoch in (0, 1):
        samples = [sample for rollout in rollouts[4 * epoch : 4 * epoch + 4] for sample in rollout]
        assert sorted(sample.index for sample in samples) == list(range(119))
    assert [len(groups_of(source, k)) for k in range(8)] == [4, 4, 4, 3] * 2
    whole = Counter(real.rows["group"].tolist())
    for rollout in rollouts:
        for group, size in Counter(sample.group_index for sample in rollout).items():
            assert size == whole[group]


def test_the_order_is_a_function_of_seed_and_epoch(real: RolloutFiles) -> None:
    def order(seed: int, **options: Any) -> list[list[int]]:
        source = FileSource(real, rollout_batch_size=15, num_epochs=3, seed=seed, **options)
        return [groups_of(source, k) for k in (2, 0, 1)]

    assert order(7) == order(7)
    third, first, second = order(7)
    assert len({tuple(first), tuple(second), tuple(third), tuple(order(8)[1])}) == 4
    # Pinned: a run resumed under another numpy must go on in the same order.
    assert first == [6, 3, 12, 11, 4, 10, 13, 9, 14, 0, 2, 8, 7, 5, 1]
    assert order(7, shuffle=False) == [list(range(15))] * 3


def test_a_rollout_is_cut_without_reading_it(real: RolloutFiles) -> None:
    source = FileSource(real, rollout_batch_size=4, seed=7)
    rows = source.rollout_rows(3)
    assert [sample.index for sample in samples_of(source, 3)] == real.rows["index"][rows].tolist()
    with pytest.raises(ValueError, match=r"k must be in \[0, 4\): k=4"):
        source.rollout_rows(4)


def test_the_description_tells_how_rollouts_are_cut(real: RolloutFiles) -> None:
    source = FileSource(real, rollout_batch_size=4, num_epochs=2, n_samples_per_prompt=8)
    lines = source.describe().splitlines()
    assert lines[-2:] == [
        "epochs            2 of 4 rollouts, 4 groups each (the last one 3)",
        "other sizes       1 groups have not 8 samples",
    ]
    assert FileSource(real).describe().splitlines()[-1].endswith("1 of 1 rollouts, 15 groups each")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_batch_size": 0}, "rollout_batch_size must be positive: rollout_batch_size=0"),
        ({"num_epochs": 0}, "num_epochs must be positive: num_epochs=0"),
        ({"seed": -1}, "seed must not be negative: seed=-1"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    options: dict[str, Any], message: str, real: RolloutFiles
) -> None:
    with pytest.raises(ValueError, match=message):
        FileSource(real, **options)
