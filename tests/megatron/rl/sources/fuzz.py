"""Damages valid files at random, and says whether a reader took one for what it is not.

A damaged file is refused with named errors, or its rows are what a plain reading of it gives.
"""

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron.rl.samples import BadRowsError, RowRules, Sample
from megatron.rl.sources import check_rollouts
from megatron.rl.sources.row import FIELDS

RULES = RowRules(vocab_size=50, need_reward=True, need_group=True)
SWAPS = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b'"1"',
    b"[]",
    b"{}",
    b"1.5",
    b"9" * 30,
    b"\x00",
)


def valid_rows() -> list[dict[str, Any]]:
    """A few rows with every kind of field."""
    return [
        {
            "index": index,
            "group_index": index // 2,
            "tokens": [1 + index, 5, 7, 11, 13],
            "response_length": 2,
            "loss_mask": [1, index % 2],
            "rollout_log_probs": [-0.5, -1.25 - index],
            "reward": index / 4,
            "status": "completed",
            "prompt": f"p\u00e9 {index}",
        }
        for index in range(5)
    ]


def jsonl_bytes() -> bytes:
    """The rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in valid_rows())


def parquet_bytes() -> bytes:
    """The rows as Parquet, in two row groups."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(valid_rows()), sink, row_group_size=3)
    return sink.getvalue()


def dump_bytes() -> bytes:
    """The rows as a dump, some of their numbers as tensors."""
    rows = valid_rows()
    rows[1]["tokens"] = torch.tensor(rows[1]["tokens"])
    rows[2]["rollout_log_probs"] = np.array(rows[2]["rollout_log_probs"], np.float32)
    sink = io.BytesIO()
    torch.save({"rollout_id": 0, "samples": rows}, sink)
    return sink.getvalue()


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content after one to four random changes."""
    for _ in range(draw.randint(1, 4)):
        content = draw.choice(CHANGES)(content, draw)
    return content


def _span(content: bytes, draw: random.Random, longest: int = 40) -> tuple[int, int]:
    start = draw.randrange(len(content) + 1)
    return start, min(len(content), start + draw.randint(0, longest))


def _flip(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(max(len(content), 1))
    bit = bytes([content[start] ^ (1 << draw.randrange(8))]) if content else b""
    return content[:start] + bit + content[start + 1 :]


def _cut(content: bytes, draw: random.Random) -> bytes:
    start, stop = _span(content, draw)
    return content[:start] + content[stop:]


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _splice(content: bytes, draw: random.Random) -> bytes:
    start, stop = _span(content, draw)
    to, _ = _span(content, draw)
    return content[:to] + content[start:stop] + content[to:]


def _overwrite(content: bytes, draw: random.Random) -> bytes:
    start, stop = _span(content, draw, 8)
    return content[:start] + draw.randbytes(stop - start) + content[stop:]


def _swap(content: bytes, draw: random.Random) -> bytes:
    """Put another JSON value where one may begin."""
    starts = [i + 2 for i in range(len(content) - 2) if content[i : i + 2] in (b": ", b", ")]
    if not starts:
        return content
    start = draw.choice(starts)
    stop = min(
        (i for i in (content.find(c, start) for c in (b",", b"]", b"}")) if i >= 0), default=start
    )
    return content[:start] + draw.choice(SWAPS) + content[stop:]


Change = Callable[[bytes, random.Random], bytes]
CHANGES: tuple[Change, ...] = (_flip, _cut, _truncate, _splice, _overwrite, _swap)


def outcome(path: Path) -> str:
    """`refused` or `accepted`.

    Raises:
        AssertionError: An error lacks its name, or an accepted row is not what the file holds.
    """
    try:
        files = check_rollouts([str(path)], RULES)
        samples = files.read(range(len(files)))
    except BadRowsError as error:
        _check_names(error, path)
        return "refused"
    rows = PLAIN_READERS[path.suffix](path)
    for sample, row in zip(samples, rows, strict=True):
        _compare(sample, row)
    return "accepted"


def _check_names(error: BadRowsError, path: Path) -> None:
    assert error.errors
    for entry in error.errors:
        assert entry.file == str(path)
        assert all((entry.field, entry.rule, entry.fix)), entry
        assert str(entry).isprintable()
        assert len(entry.value) <= 80


def _compare(sample: Sample, row: dict[str, Any]) -> None:
    tokens = row.get("tokens")
    if tokens is None:
        tokens = [*row["prompt_ids"], *row["response_ids"]]
    assert sample.tokens.tolist() == list(tokens)
    assert all(type(token) is int for token in tokens)
    length = row.get("response_length")
    assert length is None or (sample.response_length == length and type(length) is int)
    mask = row.get("loss_mask")
    assert sample.loss_mask.tolist() == [bool(x) for x in mask or [1] * sample.response_length]
    log_probs = row.get("rollout_log_probs")
    if log_probs is None:
        assert sample.rollout_log_probs is None
    else:
        np.testing.assert_array_equal(sample.rollout_log_probs, np.array(log_probs, np.float32))
    assert sample.reward == float(row["reward"])
    assert math.isfinite(sample.reward)
    assert sample.status == (row.get("status") or "completed")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    lines = (line.strip().removeprefix(b"\xef\xbb\xbf") for line in path.read_bytes().split(b"\n"))
    return [json.loads(line.decode(), parse_constant=_refuse) for line in lines if line]


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name in FIELDS]
        return file.read(columns=columns).to_pylist()


def _read_dump(path: Path) -> list[dict[str, Any]]:
    array = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.float32))]
    with torch.serialization.safe_globals(array):
        samples = torch.load(path, map_location="cpu", weights_only=True)["samples"]
    return [
        {k: v.tolist() if hasattr(v, "tolist") else v for k, v in sample.items()}
        for sample in samples
    ]


PLAIN_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".pt": _read_dump}
