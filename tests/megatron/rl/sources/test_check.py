import gzip
import json
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.rl.samples import BadRowsError, RowError, RowRules
from megatron.rl.sources import ReadOptions, check_rollouts, jsonl, row
from megatron.rl.sources.formats import Part
from megatron.rl.sources.jsonl import JsonlRows

MakeRow = Callable[..., dict[str, Any]]
Write = Callable[..., str]

RULES = RowRules(vocab_size=50)
SKIP = ReadOptions(bad_rows="skip")


def errors_of(paths: Sequence[str], options: ReadOptions | None = None) -> list[RowError]:
    with pytest.raises(BadRowsError) as caught:
        check_rollouts(paths, RULES, options)
    return caught.value.errors


@pytest.mark.parametrize("num_workers", [1, 3])
def test_parts_and_workers_change_nothing(
    num_workers: int, make_row: MakeRow, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [make_row(i, group_index=i // 4, tokens=[1] * (3 + i % 7)) for i in range(200)]
    lines[50:50] = [b"", b"  "]
    lines[120:120] = [b"{", make_row(999, tokens=[50, 1, 1])]
    path = write(lines)
    whole = check_rollouts([path], RULES, ReadOptions(bad_rows="skip", num_workers=1))
    monkeypatch.setattr(jsonl, "PART_BYTES", 700)
    options = ReadOptions(bad_rows="skip", num_workers=num_workers)
    cut = check_rollouts([path], RULES, options)
    np.testing.assert_array_equal(cut.rows, whole.rows)
    assert cut.rows["line"][[49, 50, 199]].tolist() == [50, 53, 204]
    errors = errors_of([path], options=ReadOptions(num_workers=num_workers))
    assert [(error.line, error.field) for error in errors] == [(121, "line"), (122, "tokens[0]")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.binary(max_size=9).map(lambda x: x.replace(b"\n", b".")), max_size=20),
    size=st.integers(1, 12),
    ends=st.booleans(),
)
def test_every_line_belongs_to_one_part(
    lines: list[bytes], size: int, ends: bool, tmp_path: Path
) -> None:
    content = b"\n".join(lines) + (b"\n" if ends else b"")
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    starts = range(0, len(content), size)
    parts = [Part(i, min(i + size, len(content)), 0) for i in starts]
    found = [item for part in parts for item in JsonlRows(str(path)).scan(part)]
    expected, place = [], 0
    for line in _lines(content):
        expected.append((place, line if line.strip() else None))
        place += len(line)
    assert found == expected


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def test_a_line_without_end_is_refused_and_passed_over(
    make_row: MakeRow, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "MAX_ROW_BYTES", 300)
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 300)
    monkeypatch.setattr(jsonl, "PART_BYTES", 1000)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    path = write([make_row(0), b"x" * 5000, make_row(1)])
    [error] = errors_of([path])
    assert (error.line, error.field, error.rule) == (2, "line", "must be at most 300 bytes long")
    files = check_rollouts([path], RULES, SKIP)
    assert files.rows["line"].tolist() == [1, 3]


def test_a_file_is_what_its_name_says(make_row: MakeRow, write: Write, tmp_path: Path) -> None:
    good = write([make_row()])
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "zipped.jsonl").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_bytes(b"\n\n")
    (tmp_path / "rows.csv").write_bytes(b"1,2")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with socket.socket(socket.AF_UNIX) as unix:
        os.chdir(tmp_path)
        unix.bind("s.jsonl")
    expected = {
        "pipe.jsonl": "must be a regular file: file=a pipe, socket or device",
        "folder.jsonl": "must lead to files that end in",
        "zipped.jsonl": "must not be compressed: file=gzip",
        "empty.jsonl": "must hold rows: file=empty",
        "blank.jsonl": "must hold rows: file=blank",
        "rows.csv": "must end in .jsonl, .ndjson, .json, .parquet, .pt: file=rows.csv",
        "loop.jsonl": "must be readable: file=Too many levels of symbolic links",
        "s.jsonl": "must be a regular file: file=a pipe, socket or device",
        "missing.jsonl": "must be readable: file=No such file or directory",
        "*.none": "must lead to files that end in",
    }
    for name, rule in expected.items():
        [error] = errors_of([good, str(tmp_path / name)], options=SKIP)
        assert (error.line, error.field) == (0, "file")
        assert str(error).startswith(f"{tmp_path / name}: file {rule}")
        assert error.fix


def test_paths_are_files_globs_and_folders(make_row: MakeRow, write: Write, tmp_path: Path) -> None:
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    names = ["rollout_10.jsonl", "rollout_2.jsonl", "sub/a[1].jsonl", "sub/.hidden/b.jsonl"]
    paths = [write([make_row()], name) for name in names]
    (tmp_path / "README.md").write_text("not rows")
    in_folder = [paths[1], paths[0], paths[2]]
    assert list(check_rollouts([str(tmp_path)], RULES).paths) == in_folder
    assert list(check_rollouts([f"{tmp_path}/rollout_*"], RULES).paths) == in_folder[:2]
    assert list(check_rollouts([f"{tmp_path}/**/*.jsonl"], RULES).paths) == in_folder
    assert list(check_rollouts([paths[2], paths[0]], RULES).paths) == [paths[2], paths[0]]
    twice = [paths[0], f"{tmp_path}/sub/../rollout_10.jsonl"]
    assert list(check_rollouts(twice, RULES).paths) == paths[:1]


def test_an_index_is_unique_in_its_file(make_row: MakeRow, write: Write) -> None:
    first = write([make_row(7), make_row(8), make_row(7), make_row(7)], "a.jsonl")
    second = write([make_row(7)], "b.jsonl")
    errors = errors_of([second, first])
    assert [(error.file, error.line, error.value) for error in errors] == [
        (first, 3, "7"),
        (first, 4, "7"),
    ]
    assert errors[0].rule == "must be unique in its file (line 1 has it)"
    files = check_rollouts([second, first], RULES, SKIP)
    assert files.rows["line"].tolist() == [1, 1, 2]
    assert files.num_bad_rows == 2


def test_rows_without_an_index_are_numbered(make_row: MakeRow, write: Write) -> None:
    rows = [make_row(None), b"", make_row(None)]
    assert check_rollouts([write(rows)], RULES).rows["index"].tolist() == [0, 2]


def test_skipped_rows_are_written_aside(make_row: MakeRow, write: Write, tmp_path: Path) -> None:
    bad = make_row(1, tokens=[1, 2, 77])
    path = write([make_row(0), bad, b"\xff{", make_row(0)])
    aside = tmp_path / "run" / "bad_rows.jsonl"
    options = ReadOptions(bad_rows="skip", bad_rows_path=str(aside))
    files = check_rollouts([path], RULES, options)
    assert (len(files), files.num_bad_rows) == (1, 3)
    entries = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [(e["file"], e["line"], e["field"]) for e in entries] == [
        (path, 2, "tokens[2]"),
        (path, 3, "line"),
        (path, 4, "index"),
    ]
    assert entries[0]["rule"] == "must be less than vocab_size=50"
    assert entries[0]["value"] == "77"
    assert json.loads(entries[0]["row"]) == bad
    assert entries[1]["row"] == "\ufffd{"
    assert os.listdir(aside.parent) == ["bad_rows.jsonl"]


def test_nothing_is_written_where_nothing_is_trained(
    make_row: MakeRow, write: Write, tmp_path: Path
) -> None:
    aside = tmp_path / "run" / "bad_rows.jsonl"
    skip = ReadOptions(bad_rows="skip", bad_rows_path=str(aside))
    refuse = ReadOptions(bad_rows="error", bad_rows_path=str(aside))
    bad = write([make_row(tokens=[1, 2, 77])])
    assert errors_of([bad], options=skip)[0].line == 1  # no row is left
    assert errors_of([bad], options=refuse)[0].line == 1
    assert not aside.parent.exists() or not os.listdir(aside.parent)
    check_rollouts([write([make_row()])], RULES, skip)
    assert not aside.exists()


def test_all_errors_are_counted_and_the_first_are_kept(write: Write) -> None:
    path = write([b"{}"] * 3000)
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([path], RULES, ReadOptions(keep_errors=30))
    assert [error.line for error in caught.value.errors] == list(range(1, 31))
    assert caught.value.num_errors == 3000
    assert str(caught.value).endswith("... and 2980 more")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.errors, again.num_errors) == (caught.value.errors, 3000)


def test_a_file_that_grows_while_it_is_checked_is_refused(make_row: MakeRow, write: Write) -> None:
    path = write([make_row(i) for i in range(3000)])

    def append(done: int, total: int) -> None:
        with open(path, "ab") as file:
            file.write(b"{}\n")

    with pytest.raises(BadRowsError, match="must not change while it is read: file=changed"):
        check_rollouts([path], RULES, progress=append)


def test_progress_is_told_and_log_files_stay_clean(
    make_row: MakeRow, write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write([make_row(i) for i in range(3000)])
    told = []
    check_rollouts([path], RULES, progress=lambda done, total: told.append((done, total)))
    size = os.path.getsize(path)
    assert told[-1] == (size, size)
    assert len(told) > 2
    assert told == sorted(told)
    check_rollouts([path], RULES)
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_dies_is_named(
    make_row: MakeRow, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.rl.sources.scan._WORKER", "raise SystemExit(3)")
    path = write([make_row(i) for i in range(9)])
    monkeypatch.setattr(jsonl, "PART_BYTES", 500)
    error = errors_of([path], options=ReadOptions(num_workers=2))[0]
    assert (error.file, error.line, error.rule) == (path, 0, "must be readable to its end")
    assert error.value == "exit code 3 of its reader"
