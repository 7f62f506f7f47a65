"""Files that change, that are huge, or that stand for more than they hold; names almost right."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import ReadOptions, RolloutFiles, check_rollouts, parquet
from megatron.rl.sources.names import near_misses
from megatron.rl.sources.row import FIELDS
from megatron.rl.sources.values import MAX_TEXT_CHARS, free_text, shown
from tests.megatron.rl.sources.hostile_rows import GOOD, line_with

RULES = RowRules()
ROW = line_with() + b"\n"


def error_of(path: Path, rules: RowRules = RULES) -> str:
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([str(path)], rules)
    return str(caught.value)


CHANGES: dict[str, Callable[[Path], object]] = {
    "grows": lambda path: path.write_bytes(path.read_bytes() + ROW),
    "shrinks": lambda path: os.truncate(path, 40),
    "empties": lambda path: os.truncate(path, 0),
    "is replaced by one of its size": lambda path: path.write_bytes(
        path.read_bytes().replace(b"[1, 5, 7, 11, 13]", b"[1, 5, 9, 11, 13]")
    ),
    "is moved away": lambda path: path.rename(path.with_suffix(".old")),
    "becomes a folder": lambda path: (path.unlink(), path.mkdir()),
    "becomes a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "becomes a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_checked_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(line_with(index=str(i)) + b"\n" for i in range(3000)))
    os.utime(path, (0, 0))  # clocks of files are coarse: what is written now has another time
    changed = False

    def once(done: int, total: int) -> None:
        nonlocal changed
        if not changed:
            changed = True
            CHANGES[change](path)

    with pytest.raises(BadRowsError, match="file must not change while it is read: file=changed"):
        check_rollouts([str(path)], RULES, progress=once)


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"grows"}))
def test_a_file_that_changes_after_the_check_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROW)
    files = check_rollouts([str(path)], RULES)
    assert files.read([0])[0].index == 1
    CHANGES[change](path)
    with pytest.raises(BadRowsError, match="file must be the file that was checked"):
        files.read([0])


IN_LITTLE_MEMORY = """
import resource, sys
from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import ReadOptions, check_rollouts

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    check_rollouts(sys.argv[1:], RowRules(), ReadOptions(num_workers=1))
except BadRowsError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_line_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROW + b'{"tokens": [1, 2')
    os.truncate(path, 1 << 30)  # a hole: a gigabyte of NUL that takes no disk
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert f"1 error(s):\n  {path}:2: line must be at most 67108864 bytes long" in done.stdout
    kibibytes = int(done.stdout.splitlines()[-1])
    assert kibibytes < 512 << 10


def test_a_group_of_rows_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    rows = [GOOD | {"index": i} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)
    assert len(check_rollouts([str(path)], RULES)) == 100
    monkeypatch.setattr(parquet, "MAX_GROUP_VALUES", 499)
    message = "must have at most 499 values of a column in a row group: file=500"
    assert message in error_of(path)
    monkeypatch.setattr(parquet, "MAX_ROW_ITEMS", 4)
    assert "must have at most 4 items a row in column tokens: file=5 items" in error_of(path)


def test_samples_may_share_their_numbers(tmp_path: Path) -> None:
    ids = torch.arange(1, 6)
    samples = [GOOD | {"index": i, "tokens": ids, "loss_mask": GOOD["loss_mask"]} for i in range(9)]
    torch.save({"samples": samples}, tmp_path / "rollout_0.pt")
    files = check_rollouts([str(tmp_path / "rollout_0.pt")], RULES)
    for sample in files.read(range(9)):
        np.testing.assert_array_equal(sample.tokens, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("field", ["response_length", "reward", "group_index", "index"])
def test_a_number_may_be_a_tensor_of_no_dimension(field: str, tmp_path: Path) -> None:
    samples = [GOOD | {field: torch.tensor(GOOD[field])}, GOOD | {"index": np.array(7)}]
    torch.save({"samples": samples}, tmp_path / "rollout_0.pt")
    files = check_rollouts([str(tmp_path / "rollout_0.pt")], RULES)
    assert files.rows["index"].tolist() == [1, 7]
    assert files.rows["reward"].tolist() == [1.0, 1.0]


def _within_itself() -> list[Any]:
    item: list[Any] = []
    item.append(item)
    return item


def _doubled() -> list[Any]:
    item: list[Any] = ["x"]
    for _ in range(60):
        item = [item, item]
    return item


@pytest.mark.parametrize(
    "value", [_within_itself(), _doubled(), {(1, 2): 3}, {1, 2}, {b"a": 1}, [2.5] * 10**6, 1j]
)
def test_a_free_field_of_anything_is_text_of_bounded_length(value: object, tmp_path: Path) -> None:
    torch.save({"samples": [GOOD | {"prompt": value}]}, tmp_path / "rollout_0.pt")
    [sample] = check_rollouts([str(tmp_path / "rollout_0.pt")], RULES).read([0])
    assert sample.prompt == free_text(value)
    assert 0 < len(sample.prompt) < MAX_TEXT_CHARS + 100
    assert len(shown(value)) <= 80


def test_a_deep_free_field_is_read_or_refused(tmp_path: Path) -> None:
    """JSON's reader goes deeper than its writer: what is accepted must be shown all the same."""
    path = tmp_path / "rows.jsonl"
    limit = sys.getrecursionlimit()
    for depth in range(limit - 400, limit + 100, 20):
        path.write_bytes(line_with(prompt="[" * depth + "]" * depth))
        files = check_rollouts_or_error(path)
        if isinstance(files, BadRowsError):
            assert "line must be one whole JSON object" in str(files)
        else:
            assert files.read([0])[0].prompt.startswith("[[[")


def check_rollouts_or_error(path: Path) -> RolloutFiles | BadRowsError:
    try:
        return check_rollouts([str(path)], RULES)
    except BadRowsError as error:
        return error


def test_a_skipped_sample_of_anything_is_written_aside(tmp_path: Path) -> None:
    bad = GOOD | {"index": 2, "reward": "high", "prompt": {(1, 2): _doubled()}}
    torch.save({"samples": [GOOD, bad]}, tmp_path / "rollout_0.pt")
    options = ReadOptions(bad_rows="skip", bad_rows_path=str(tmp_path / "aside.jsonl"))
    assert len(check_rollouts([str(tmp_path / "rollout_0.pt")], RULES, options)) == 1
    assert (tmp_path / "aside.jsonl").read_text().count("\n") == 1


def test_a_pattern_finds_what_links_lead_to_once(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "other" / ".hidden").mkdir(parents=True)
    (tmp_path / "data" / "linked").symlink_to("../other")
    (tmp_path / "other" / "back").symlink_to("../data")
    for name in ("data/sub/a.jsonl", "other/b.jsonl", "other/.hidden/c.jsonl"):
        (tmp_path / name).write_bytes(ROW)
    for pattern in ("data/**/*.jsonl", "data/**", "d*/**/[ab].jsonl", "data/**/**/*.jsonl"):
        found = check_rollouts([f"{tmp_path}/{pattern}"], RULES).paths
        assert [Path(path).name for path in found] == ["b.jsonl", "a.jsonl"], pattern


MISSPELT = {
    "rollout_logprobs": "rollout_log_probs",
    "lossmask": "loss_mask",
    "lossMask": "loss_mask",
    "group_idx": "group_index",
    "group_id": "group_index",
    "rewards": "reward",
    "respones_length": "response_length",
    "Index": "index",
    "value": "values",
    "logprobs": "rollout_log_probs",
    "log_probs": "rollout_log_probs",
    "mask": "loss_mask",
}
OTHERS = (
    "metadata",
    "teacher_log_probs",
    "weight_versions",
    "session_id",
    "raw_reward",
    "n" * 99,
    7,
)


def test_a_name_that_is_almost_a_fields_is_found() -> None:
    for name, meant in MISSPELT.items():
        assert near_misses([name]) == {name: meant}
        assert near_misses([name, meant]) == {}
    assert near_misses([*OTHERS, *FIELDS]) == near_misses(OTHERS) == {}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "pt"])
def test_a_misspelt_field_is_warned_of_once_a_file(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [GOOD | {"index": i} for i in range(3)]
    for row in rows:
        row["rollout_logprobs"] = row.pop("rollout_log_probs")
        row |= {"lossmask": row.pop("loss_mask"), "metadata": 1}
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        torch.save({"samples": rows}, path)
    check_rollouts([str(path)], RULES)
    expected = [
        f"{path}: field lossmask is not read; did you mean loss_mask?",
        f"{path}: field rollout_logprobs is not read; did you mean rollout_log_probs?",
    ]
    assert caplog.messages == expected
