"""Safetensors files: where each tensor lies, reading parts of them, writing them in any order.

The format is 8 bytes of header length, a JSON header with dtype, shape and offsets of every tensor,
and the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies.

    Args:
        file: name of the file in its directory.
        dtype: of the stored numbers.
        shape: of the whole tensor.
        start: offset of its first byte in the file.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Every file of a checkpoint, without the tensors' contents.

    Args:
        headers: the bytes in front of the tensors, by file name.
        slots: every tensor, by its name.
        index: content of the index file; None for a checkpoint of one file.
    """

    headers: dict[str, bytes]
    slots: dict[str, Slot]
    index: bytes | None


def read_layout(directory: Path) -> Layout:
    """The files of a checkpoint.

    Raises:
        ValueError: there are no safetensors, a file is missing or broken, or index and files
            disagree.
    """
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        if not (directory / SINGLE_FILE).exists():
            raise ValueError(f"{directory} must hold {SINGLE_FILE} or {INDEX_FILE}")
        header, slots = _read_header(directory / SINGLE_FILE)
        return Layout({SINGLE_FILE: header}, slots, None)
    index = index_path.read_bytes()
    file_of = json.loads(index)["weight_map"]
    layout = Layout({}, {}, index)
    for file in sorted(set(file_of.values())):
        layout.headers[file], slots = _read_header(directory / file)
        layout.slots.update(slots)
    for name in file_of.keys() | layout.slots.keys():
        found = layout.slots[name].file if name in layout.slots else None
        if found != file_of.get(name):
            raise ValueError(
                f"{index_path} must name the file of every tensor: tensor={name}, "
                f"index={file_of.get(name)}, file={found}"
            )
    return layout


def plan_layout(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> Layout:
    """The files of a new checkpoint.

    Args:
        shapes: of all tensors, by name, in the order in which they shall lie.
        dtype: of all tensors.
        limit: bytes of tensors a file may hold; a larger tensor has a file of its own.
    """
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = total = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + num_bytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += num_bytes
        total += num_bytes
    count = len(shards)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    layout = Layout({}, {}, None)
    for file, shard in zip([SINGLE_FILE] if count == 1 else files, shards, strict=True):
        layout.headers[file] = _make_header(shard, dtype)
        layout.slots.update(_parse_header(file, layout.headers[file]))
    if count == 1:
        return layout
    file_of = {name: slot.file for name, slot in layout.slots.items()}
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    return Layout(layout.headers, layout.slots, json.dumps(index, indent=2).encode() + b"\n")


class TensorReader:
    """Reads parts of tensors; a file is opened when its first tensor is asked for."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self.slots = layout.slots
        self._directory = directory
        self._files: dict[str, safe_open] = {}

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """A tensor, or its entries `start:stop` along one dimension."""
        file = self.slots[name].file
        if file not in self._files:
            self._files[file] = safe_open(self._directory / file, framework="pt")
        stored = self._files[file].get_slice(name)
        return stored[:] if dim is None else stored[(slice(None),) * dim + (slice(start, stop),)]


class TensorWriter:
    """Writes the tensors of a checkpoint in any order, into files of their final size."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._slots = layout.slots
        self._left = set(layout.slots)
        self._files: dict[str, BinaryIO] = {}
        for file, header in layout.headers.items():
            self._files[file] = (directory / file).open("wb")
            self._files[file].write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Store a tensor in its dtype; every tensor exactly once."""
        slot = self._slots[name]
        assert tuple(tensor.shape) == slot.shape, (name, tensor.shape, slot.shape)
        self._left.remove(name)
        file = self._files[slot.file]
        file.seek(slot.start)
        data = tensor.detach().to(device="cpu", dtype=slot.dtype).contiguous()
        file.write(data.flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert kind is not None or not self._left, self._left
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _read_header(path: Path) -> tuple[bytes, dict[str, Slot]]:
    try:
        with safe_open(path, framework="pt"):  # checks the whole header and the file's size
            pass
        with path.open("rb") as file:
            size = file.read(8)
            header = size + file.read(int.from_bytes(size, "little"))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} must be a readable safetensors file: {error}") from error
    return header, _parse_header(path.name, header)


def _parse_header(file: str, header: bytes) -> dict[str, Slot]:
    entries: dict[str, Any] = json.loads(header[8:])
    entries.pop("__metadata__", None)
    slots = {}
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(DTYPES)}: file={file}, tensor={name}, "
                f"dtype={entry['dtype']}"
            )
        start = len(header) + entry["data_offsets"][0]
        slots[name] = Slot(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    return slots


def _make_header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    code = {kind: code for code, kind in DTYPES.items()}[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
