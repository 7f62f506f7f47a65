import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import ReadOptions, check_rollouts
from megatron.rl.sources.cache import UnitCache

MakeRow = Callable[..., dict[str, Any]]
Write = Callable[..., str]
WriteParquet = Callable[..., str]

RULES = RowRules(vocab_size=50, need_reward=True, need_group=True)


@pytest.fixture
def write_parquet(tmp_path: Path) -> WriteParquet:
    def write_table(rows: list[dict[str, Any]], **options: Any) -> str:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
        return str(path)

    return write_table


def test_the_same_rows_give_the_same_samples(
    make_row: MakeRow, write: Write, write_parquet: WriteParquet
) -> None:
    rows = [
        make_row(i, group_index=i // 3, tokens=[i % 50, 2, 3, 4], prompt=f"p{i}", reward=i / 8)
        for i in range(40)
    ]
    for row in rows:
        row |= {"values": [0.5, float(row["index"])], "rollout_index": row["index"] // 2}
    rows[7]["loss_mask"] = rows[7]["rollout_log_probs"] = rows[7]["values"] = None
    jsonl = check_rollouts([write(rows)], RULES)
    parquet = check_rollouts([write_parquet(rows, row_group_size=16)], RULES)
    for name in set(jsonl.rows.dtype.names) - {"place"}:
        np.testing.assert_array_equal(parquet.rows[name], jsonl.rows[name], name)
    order = np.random.default_rng(0).permutation(40)
    for ours, theirs in zip(parquet.read(order), jsonl.read(order), strict=True):
        assert ours.origin.endswith(f"rows.parquet:{ours.index + 1}")
        assert (ours.index, ours.prompt, ours.reward) == (
            theirs.index,
            theirs.prompt,
            theirs.reward,
        )
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
        for name in ("rollout_log_probs", "values"):
            stream, expected = getattr(ours, name), getattr(theirs, name)
            assert (stream is None) == (expected is None) == (ours.index == 7)
            if stream is not None:
                np.testing.assert_array_equal(stream, expected)


def test_bad_rows_are_named_by_their_number(make_row: MakeRow, write_parquet: WriteParquet) -> None:
    rows = [make_row(i) for i in range(6)]
    rows[2]["tokens"] = [1, 50, 3]
    rows[3]["rollout_log_probs"] = [-1.0, float("nan")]
    rows[4]["tokens"] = [1, None, 3]
    path = write_parquet(rows, row_group_size=2)
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([path], RULES)
    found = [(error.line, error.field, error.value) for error in caught.value.errors]
    assert found == [
        (3, "tokens[1]", "50"),
        (4, "rollout_log_probs[1]", "nan"),
        (5, "tokens[1]", "None"),
    ]


def test_skipped_records_are_written_aside(
    make_row: MakeRow, write_parquet: WriteParquet, tmp_path: Path
) -> None:
    bad = make_row(1, tokens=[1, 50, 3], prompt="why")
    path = write_parquet([make_row(0, prompt="so"), bad])
    options = ReadOptions(bad_rows="skip", bad_rows_path=str(tmp_path / "bad.jsonl"))
    assert len(check_rollouts([path], RULES, options)) == 1
    [line] = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert json.loads(json.loads(line)["row"]) == bad


def test_a_struct_of_rewards_is_read_by_key(make_row: MakeRow, write_parquet: WriteParquet) -> None:
    path = write_parquet([make_row(i, reward={"score": i * 0.5}) for i in range(3)])
    files = check_rollouts([path], RowRules(reward_key="score"))
    assert files.rows["reward"].tolist() == [0.0, 0.5, 1.0]


def test_lists_of_any_width_are_read(make_row: MakeRow, tmp_path: Path) -> None:
    table = pa.table(
        {
            "tokens": pa.array([[1, 2, 3], [4, 5]], pa.large_list(pa.uint16())),
            "response_length": pa.array([1, 1], pa.int8()),
            "loss_mask": pa.array([[True], [False]], pa.list_(pa.bool_())),
            "rollout_log_probs": pa.array([[-0.5], [-2.0]], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table.slice(0), tmp_path / "rows.parquet")
    files = check_rollouts([str(tmp_path / "rows.parquet")], RowRules())
    assert files.rows["num_trained_tokens"].tolist() == [1, 0]
    assert files.read([1])[0].tokens.tolist() == [4, 5]
    assert files.read([0])[0].rollout_log_probs.tolist() == [-0.5]


def test_each_row_group_is_decoded_once_while_it_fits(
    make_row: MakeRow, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet([make_row(i) for i in range(100)], row_group_size=10)
    files = check_rollouts([path], RULES)
    decoded = []
    read = pq.ParquetFile.read_row_group

    def counted(file: pq.ParquetFile, group: int, **options: Any) -> pa.Table:
        decoded.append(group)
        return read(file, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    for row in np.random.default_rng(0).permutation(100):
        assert files.read([row])[0].index == row
    assert sorted(decoded) == list(range(10))


def test_the_cache_keeps_within_its_budget() -> None:
    cache = UnitCache(budget=10)
    loaded = []

    def load(key: str) -> Callable[[], str]:
        def loading() -> str:
            loaded.append(key)
            return key * 4

        return loading

    for key in ["a", "b", "a", "c", "a", "b"]:  # "b" gives way to "c": "a" was used later
        assert cache.get(key, load(key), len) == key * 4
        assert cache.num_bytes <= 10
    assert loaded == ["a", "b", "c", "b"]
    assert cache.get("big", lambda: "x" * 50, len) == "x" * 50
    assert cache.num_bytes == 50


def test_what_is_no_parquet_file_is_refused(
    make_row: MakeRow, write_parquet: WriteParquet, tmp_path: Path
) -> None:
    whole = Path(write_parquet([make_row(i) for i in range(50)])).read_bytes()
    damaged = bytearray(whole)
    damaged[20:60] = bytes(40)
    contents = {"cut": whole[:-20], "text": b"{}\n", "damaged": bytes(damaged)}
    for name, content in contents.items():
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        with pytest.raises(BadRowsError) as caught:
            check_rollouts([str(path)], RULES)
        [error] = caught.value.errors
        assert (error.file, error.line) == (str(path), 0)
        assert error.rule == "must be a whole Parquet file"


def test_other_columns_and_no_rows_are_refused(write_parquet: WriteParquet) -> None:
    with pytest.raises(BadRowsError, match="must have a column that is read"):
        check_rollouts([write_parquet([{"text": "a"}])], RULES)
    with pytest.raises(BadRowsError, match=r"1 error\(s\):\n.*must be given \(or prompt_ids"):
        check_rollouts([write_parquet([{"reward": 1.0}])], RULES)
    empty = pa.schema({"tokens": pa.list_(pa.int64()), "response_length": pa.int64()})
    path = write_parquet([{"tokens": [1, 2], "response_length": 1}])
    pq.write_table(empty.empty_table(), path)
    with pytest.raises(BadRowsError, match="must hold rows: file=blank"):
        check_rollouts([path], RULES)
