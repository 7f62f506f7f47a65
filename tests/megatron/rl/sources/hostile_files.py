"""Files that no run may train on: each is written into a folder; its error names file and field."""

import bz2
import gzip
import lzma
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.megatron.rl.sources.hostile_rows import GOOD, line_with

WriteFile = Callable[[Path], Path]
"""Writes into a folder and returns what to give as `--rollout-data`."""

ROW = line_with() + b"\n"


def _bytes(name: str, content: bytes) -> WriteFile:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "rows.jsonl")
    return folder / "rows.jsonl"


def _link(name: str, target: str) -> WriteFile:
    def write(folder: Path) -> Path:
        (folder / name).symlink_to(target)
        return folder / name

    return write


def _folder(name: str) -> WriteFile:
    def write(folder: Path) -> Path:
        (folder / name).mkdir()
        return folder / name

    return write


def _links_that_loop(folder: Path) -> Path:
    """Two links to the folder itself: a walk that follows them has 2 ** 40 ways to go."""
    (folder / "a").symlink_to(".")
    (folder / "b").symlink_to(".")
    return folder / "**" / "*.jsonl"


FILES: dict[str, tuple[WriteFile, str]] = {
    "empty": (_bytes("rows.jsonl", b""), "file"),
    "blank": (_bytes("rows.jsonl", b"\n\r\n  \n\t\n"), "file"),
    "one byte": (_bytes("rows.jsonl", b"{"), "line"),
    "a byte order mark alone": (_bytes("rows.jsonl", b"\xef\xbb\xbf"), "line"),
    "old Macintosh line ends": (_bytes("rows.jsonl", ROW[:-1] + b"\r" + ROW[:-1]), "line"),
    "one JSON array": (_bytes("rows.json", b"[\n" + ROW + b"]\n"), "line"),
    "gzip": (_bytes("rows.jsonl.gz", gzip.compress(ROW)), "file"),
    "gzip under another name": (_bytes("rows.jsonl", gzip.compress(ROW)), "file"),
    "bzip2": (_bytes("rows.jsonl", bz2.compress(ROW)), "file"),
    "xz": (_bytes("rows.jsonl", lzma.compress(ROW)), "file"),
    "zip": (_bytes("rows.jsonl", b"PK\x03\x04" + bytes(40)), "line"),
    "another suffix": (_bytes("rows.txt", ROW), "file"),
    "no suffix": (_bytes("rows", ROW), "file"),
    "a program": (_bytes("rows.jsonl", b"\x7fELF\x02\x01\x01" + bytes(99)), "line"),
    "Parquet under another name": (_bytes("rows.jsonl", b"PAR1" + bytes(99) + b"PAR1"), "line"),
    "a pipe": (_fifo, "file"),
    "a device": (_link("rows.jsonl", "/dev/zero"), "file"),
    "a link to itself": (_link("rows.jsonl", "rows.jsonl"), "file"),
    "a link to nothing": (_link("rows.jsonl", "none.jsonl"), "file"),
    "an empty folder": (_folder("rows"), "file"),
    "a folder with the name of a file": (_folder("rows.jsonl"), "file"),
    "missing": (lambda folder: folder / "none.jsonl", "file"),
    "missing, with a line end in its name": (lambda folder: folder / "a\nb.jsonl", "file"),
    "missing, with a terminal's command": (lambda folder: folder / "\x1b[2J.jsonl", "file"),
    "missing, with bytes for a name": (lambda folder: folder / os.fsdecode(b"\xff.jsonl"), "file"),
    "a name with NUL": (lambda folder: folder / "a\0b.jsonl", "file"),
    "a name that is too long": (lambda folder: folder / ("x" * 300 + ".jsonl"), "file"),
    "a path that is too long": (lambda folder: folder / ("x/" * 3000 + ".jsonl"), "file"),
    "below a file": (lambda folder: _bytes("a.jsonl", ROW)(folder) / "b.jsonl", "file"),
    "a pattern for nothing": (lambda folder: folder / "*.jsonl", "file"),
    "a pattern through links that loop": (_links_that_loop, "file"),
}


def _parquet(content: Callable[[bytes], bytes] = lambda whole: whole, **columns: Any) -> WriteFile:
    """One good row, with columns replaced (None: left out) and the file's bytes changed."""

    def write(folder: Path) -> Path:
        good = {name: pa.array([value]) for name, value in GOOD.items()}
        table = pa.table({k: v for k, v in (good | columns).items() if v is not None})
        pq.write_table(table, folder / "rows.parquet")
        (folder / "rows.parquet").write_bytes(content((folder / "rows.parquet").read_bytes()))
        return folder / "rows.parquet"

    return write


def _no_utf8(kind: pa.DataType) -> pa.Array:
    width = np.int32 if kind == pa.string() else np.int64
    buffers = [None, pa.py_buffer(np.array([0, 2], width)), pa.py_buffer(b"\xff\xfe")]
    return pa.Array.from_buffers(kind, 1, buffers)


def _columns_twice(folder: Path) -> Path:
    columns = [pa.array([value]) for value in GOOD.values()]
    table = pa.Table.from_arrays([*columns, pa.array([[2, 3, 4]])], names=[*GOOD, "tokens"])
    pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def _of(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array([values], pa.list_(kind))


PARQUET: dict[str, tuple[WriteFile, str]] = {
    "tokens of floats": (_parquet(tokens=_of([1.0, 2.0, 3.0], pa.float64())), "tokens"),
    "tokens of NaN": (_parquet(tokens=_of([float("nan")] * 3, pa.float32())), "tokens"),
    "tokens of text": (_parquet(tokens=_of(["1", "2", "3"], pa.string())), "tokens"),
    "tokens of booleans": (_parquet(tokens=_of([True, False], pa.bool_())), "tokens"),
    "tokens of decimals": (_parquet(tokens=_of([1, 2, 3], pa.decimal128(5))), "tokens"),
    "tokens of days": (_parquet(tokens=_of([1, 2, 3], pa.date32())), "tokens"),
    "tokens of nanoseconds": (_parquet(tokens=_of([1, 2, 3], pa.timestamp("ns"))), "file"),
    "tokens of milliseconds": (_parquet(tokens=_of([1, 2, 3], pa.timestamp("ms"))), "tokens"),
    "tokens of durations": (_parquet(tokens=_of([1, 2, 3], pa.duration("ns"))), "file"),
    "tokens of bytes": (_parquet(tokens=_of([b"1", b"2"], pa.binary())), "tokens"),
    "tokens of uint64": (_parquet(tokens=_of([2**64 - 1, 1, 2], pa.uint64())), "tokens"),
    "negative tokens": (_parquet(tokens=_of([1, -2, 3, 4, 5], pa.int8())), "tokens"),
    "nested tokens": (_parquet(tokens=pa.array([[[1], [2]]])), "tokens"),
    "a map of tokens": (
        _parquet(tokens=pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64()))),
        "tokens",
    ),
    "a struct of tokens": (_parquet(tokens=pa.array([{"a": 1}])), "tokens"),
    "text for tokens": (_parquet(tokens=pa.array(["[1, 2, 3]"])), "tokens"),
    "a number for tokens": (_parquet(tokens=pa.array([3])), "tokens"),
    "null tokens": (_parquet(tokens=pa.array([None], pa.list_(pa.int64()))), "tokens"),
    "null among tokens": (_parquet(tokens=pa.array([[1, None, 3, 4, 5]])), "tokens"),
    "nulls for tokens": (_parquet(tokens=pa.nulls(1)), "tokens"),
    "null in the mask": (_parquet(loss_mask=pa.array([[1, None]])), "loss_mask"),
    "null response_length": (_parquet(response_length=pa.nulls(1)), "response_length"),
    "response_length of floats": (_parquet(response_length=pa.array([2.0])), "response_length"),
    "log-probs of text": (_parquet(rollout_log_probs=pa.array([["a"]])), "rollout_log_probs"),
    "log-probs of NaN": (
        _parquet(rollout_log_probs=_of([float("nan"), -1.0], pa.float32())),
        "rollout_log_probs",
    ),
    "log-probs of infinity": (
        _parquet(rollout_log_probs=_of([-1.0, float("-inf")], pa.float16())),
        "rollout_log_probs",
    ),
    "reward of text": (_parquet(reward=pa.array(["1.0"])), "reward"),
    "reward of times": (_parquet(reward=pa.array([10**18], pa.timestamp("ns"))), "reward"),
    "reward beyond every year": (_parquet(reward=pa.array([10**16], pa.timestamp("ms"))), "file"),
    "reward in a list": (_parquet(reward=pa.array([[1.0]])), "reward"),
    "reward in a struct": (_parquet(reward=pa.array([{"score": 1.0}])), "reward"),
    "group of text": (_parquet(group_index=pa.array(["a"])), "group_index"),
    "status of bytes": (_parquet(status=pa.array([b"completed"])), "status"),
    "status that is no UTF-8": (_parquet(status=_no_utf8(pa.string())), "file"),
    "prompt that is no UTF-8": (_parquet(prompt=_no_utf8(pa.string())), "file"),
    "response that is no UTF-8": (_parquet(response=_no_utf8(pa.large_string())), "file"),
    "no column of a row": (
        _parquet(**dict.fromkeys(GOOD), text=pa.array(["a"])),
        "file",
    ),
    "no tokens": (_parquet(tokens=None), "tokens"),
    "no rows": (_parquet(**{name: pa.array([], pa.int64()) for name in GOOD}), "file"),
    "a column twice": (_columns_twice, "file"),
    "cut at its end": (_parquet(lambda whole: whole[:-5]), "file"),
    "cut in its footer": (_parquet(lambda whole: whole[: len(whole) - 200] + whole[-8:]), "file"),
    "cut to its magic": (_parquet(lambda whole: whole[:4]), "file"),
    "a footer of another length": (
        _parquet(lambda whole: whole[:-8] + b"\xff\xff\xff\x7fPAR1"),
        "file",
    ),
    "zeros for data": (_parquet(lambda whole: whole[:4] + bytes(400) + whole[404:]), "file"),
    "text": (_parquet(lambda _: ROW), "file"),
    "gzip": (_parquet(gzip.compress), "file"),
}


class Made:
    """A class that only the writer of a dump has."""


class Code:
    """What a pickle runs while it is read: it makes the folder `ran`."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder / "ran")

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


def _dump(make: Callable[[Path], object]) -> WriteFile:
    def write(folder: Path) -> Path:
        torch.save(make(folder), folder / "rollout_0.pt")
        return folder / "rollout_0.pt"

    return write


def _sample(**changes: Any) -> WriteFile:
    return _dump(lambda _: {"rollout_id": 0, "samples": [GOOD | changes]})


def _pickle(make: Callable[[Path], object]) -> WriteFile:
    def write(folder: Path) -> Path:
        (folder / "rollout_0.pt").write_bytes(pickle.dumps(make(folder)))
        return folder / "rollout_0.pt"

    return write


def _changed(change: Callable[[bytes], bytes]) -> WriteFile:
    def write(folder: Path) -> Path:
        path = _sample()(folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def _compressed(folder: Path) -> Path:
    """A hundred megabytes of zeros in a hundred kilobytes."""
    path = _sample(padding=torch.zeros(25 << 20))(folder)
    with zipfile.ZipFile(path) as stored:
        entries = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def _itself() -> list[Any]:
    item: list[Any] = []
    item.append(item)
    return item


def _doubled(times: int = 60) -> list[Any]:
    """A list that is short in a pickle and has 2 ** times items to whoever prints it."""
    item: list[Any] = ["x"]
    for _ in range(times):
        item = [item, item]
    return item


_IDS = torch.tensor([1, 5, 7, 11, 13])
DUMPS: dict[str, tuple[WriteFile, str]] = {
    "code beside the samples": (_dump(lambda at: {"samples": [GOOD], "x": Code(at)}), "file"),
    "code in a sample": (_dump(lambda at: {"samples": [GOOD | {"metadata": Code(at)}]}), "file"),
    "code for a dump": (_dump(Code), "file"),
    "code in a bare pickle": (_pickle(Code), "file"),
    "a class": (_dump(lambda _: {"samples": [GOOD], "x": Made()}), "file"),
    "a function": (_dump(lambda _: {"samples": [GOOD], "x": os.system}), "file"),
    "an array of objects": (_sample(tokens=np.array([1, None], object)), "file"),
    "a bare pickle": (_pickle(lambda _: {"samples": [GOOD]}), "file"),
    "a tensor": (_dump(lambda _: torch.ones(3)), "file"),
    "a list": (_dump(lambda _: [GOOD]), "file"),
    "no samples": (_dump(lambda _: {"rollout_id": 0}), "file"),
    "samples in a dict": (_dump(lambda _: {"samples": {"0": GOOD}}), "file"),
    "zero samples": (_dump(lambda _: {"samples": []}), "file"),
    "a sample of text": (_dump(lambda _: {"samples": ["tokens"]}), "line"),
    "a sample of None": (_dump(lambda _: {"samples": [None]}), "line"),
    "a sample of samples": (_dump(lambda _: {"samples": [[GOOD]]}), "line"),
    "cut at its end": (_changed(lambda whole: whole[:-200]), "file"),
    "cut in half": (_changed(lambda whole: whole[: len(whole) // 2]), "file"),
    "text": (_changed(lambda _: ROW), "file"),
    "zeros": (_changed(lambda _: bytes(400)), "file"),
    "an empty archive": (_changed(lambda _: b"PK\x05\x06" + bytes(18)), "file"),
    "compressed": (_compressed, "file"),
    "tokens of one number for ever": (_sample(tokens=torch.zeros(1).expand(10**12)), "file"),
    "tokens of halves": (_sample(tokens=_IDS / 2), "tokens"),
    "tokens of booleans": (_sample(tokens=_IDS > 5), "tokens"),
    "tokens of complex numbers": (_sample(tokens=_IDS * 1j), "tokens"),
    "tokens of two dimensions": (_sample(tokens=_IDS[None]), "tokens"),
    "tokens of no dimension": (_sample(tokens=torch.tensor(5)), "tokens"),
    "tokens beyond the vocabulary": (_sample(tokens=_IDS * 100), "tokens"),
    "negative tokens": (_sample(tokens=-_IDS), "tokens"),
    "sparse tokens": (_sample(tokens=_IDS.to_sparse()), "tokens"),
    "tokens without memory": (_sample(tokens=_IDS.to("meta")), "tokens"),
    "tokens in a set": (_sample(tokens={1, 5, 7, 11, 13}), "tokens"),
    "tokens of bytes": (_sample(tokens=b"\x01\x05\x07\x0b\x0d"), "tokens"),
    "tokens of tensors": (_sample(tokens=[_IDS, _IDS]), "tokens"),
    "tokens of a type": (_sample(tokens=torch.int64), "tokens"),
    "tokens within themselves": (_sample(tokens=_itself()), "tokens"),
    "tokens doubled 60 times": (_sample(tokens=_doubled()), "tokens"),
    "an index doubled 60 times": (_sample(index=_doubled()), "index"),
    "a reward doubled 60 times": (_sample(reward={"score": _doubled()}), "reward"),
    "a reward within itself": (_sample(reward={"score": _itself()}), "reward"),
    "a reward of numbers for names": (_sample(reward={1: 2.0}), "reward"),
    "a reward of two numbers": (_sample(reward=torch.ones(2)), "reward"),
    "a reward that is not finite": (_sample(reward=torch.tensor(float("inf"))), "reward"),
    "a mask of halves": (_sample(loss_mask=torch.tensor([0.5, 1.0])), "loss_mask"),
    "a status of a device": (_sample(status=torch.device("cpu")), "status"),
}
