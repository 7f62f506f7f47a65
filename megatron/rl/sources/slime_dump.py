"""slime's debug dumps, `--save-debug-rollout-data`: {"rollout_id": int, "samples": [dict]}.

They are pickles, and a pickle can run any code of its writer's choice while it is read. So they are
opened with torch's restricted unpickler, which builds tensors, numpy arrays and plain values only;
everything else needs `--trust-pickle`. A small file may stand for a lot of data, so its size limits
what is unpacked and read. A place is the position in `samples`.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import Part
from megatron.rl.sources.row import FIELDS, FREE_FIELDS, BadFileError, Row, row_from_record
from megatron.rl.sources.values import shown, size_of

BYTES_PER_ITEM = 40
"""What a Python number in a list takes, reference included; only the cache's budget uses it."""
MAX_TIMES_STORED = 64
"""How often a stored number may be used: samples may share a list; a stride of 0 never ends."""


@dataclass(frozen=True)
class _Dump:
    """What is kept of a dump: the fields a row has, and the names of all fields."""

    samples: list[Any]
    names: set[Any]


class SlimeDump:
    """One dump, which is one rollout: read whole, because a pickle has no smaller unit."""

    def __init__(self, path: str, cache: UnitCache, *, trust_pickle: bool) -> None:
        self._path = path
        self._cache = cache
        self._trust_pickle = trust_pickle

    def parts(self) -> list[Part]:
        """The dump; how many samples it has is not known before it is read."""
        return [Part(0, 1, os.path.getsize(self._path))]

    def scan(self, part: Part) -> Iterator[tuple[int, Any]]:
        """(position, sample) of every sample."""
        yield from enumerate(self._dump().samples, part.start)

    def decode(self, raw: object) -> Row:
        """Convert one sample's dict."""
        return row_from_record(raw)

    def read(self, places: Sequence[int]) -> list[Any]:
        """The samples at these positions."""
        samples = self._dump().samples
        return [samples[place] for place in places]

    def names(self) -> set[Any]:
        """The keys of all samples."""
        return self._dump().names

    def _dump(self) -> "_Dump":
        return self._cache.get(self._path, self._load, _num_bytes)

    def _load(self) -> "_Dump":
        dump = self._unpickle()
        samples = dump.get("samples") if isinstance(dump, Mapping) else None
        if not isinstance(samples, list):
            rule = 'must be a slime dump, {"rollout_id", "samples": [dict]}'
            raise BadFileError(
                rule, type(dump).__name__, "give the file --save-debug-rollout-data made"
            )
        names = set().union(*(sample for sample in samples if isinstance(sample, Mapping)))
        samples = [_known(sample) for sample in samples]
        num_items, stored = _num_items(samples), os.path.getsize(self._path)
        if num_items > MAX_TIMES_STORED * stored:
            rule = f"must hold at most {MAX_TIMES_STORED} numbers a byte, {stored} bytes here"
            fix = "write clones of tensors that were expanded"
            raise BadFileError(rule, f"{num_items} numbers", fix)
        return _Dump(samples, names)

    def _unpickle(self) -> Any:
        import torch  # seconds, so not before a dump is read

        self._check_unpacked_size()
        try:
            with torch.serialization.safe_globals(_numpy_globals()):
                return torch.load(
                    self._path, map_location="cpu", weights_only=not self._trust_pickle
                )
        except pickle.UnpicklingError as error:
            raise BadFileError(
                "must hold plain values only (it is a pickle, which could run code)",
                _cause(error),
                "write the samples as JSONL, or pass --trust-pickle if you trust its writer",
            ) from None
        except Exception as error:  # a pickle's own code may raise anything
            fix = "write the dump again with torch.save"
            raise BadFileError("must be readable by torch.load", _cause(error), fix) from None

    def _check_unpacked_size(self) -> None:
        """torch.save stores without compression; a compressed file can unpack without bound."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return  # of the older format, or damaged: torch.load says so
        if unpacked > os.path.getsize(self._path):
            rule = "must be stored without compression, as torch.save writes it"
            raise BadFileError(rule, f"{unpacked} bytes unpacked", "write it with torch.save")


def _known(sample: object) -> object:
    """The fields a row has: images, routing tables and the like are not kept in memory."""
    if not isinstance(sample, Mapping):
        return shown(sample)  # to be refused; None would stand for a blank line
    return {name: sample[name] for name in FIELDS if name in sample}


def _num_bytes(dump: "_Dump") -> int:
    return BYTES_PER_ITEM * _num_items(dump.samples)


def _num_items(samples: list[Any]) -> int:
    """Items of the fields that are trained."""
    rows = (sample for sample in samples if isinstance(sample, Mapping))
    return sum(size_of(row[name]) for row in rows for name in row if name not in FREE_FIELDS)


def _numpy_globals() -> list[Any]:
    """What numpy's arrays and numbers are rebuilt with; it creates data and runs nothing else."""
    scalar_types = (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8)
    scalar_types += (np.uint8, np.uint16, np.uint32, np.uint64, np.bool_)
    rebuild = np._core.multiarray
    named = [
        (getattr(rebuild, function), f"numpy.{package}.multiarray.{function}")
        for package in ("core", "_core")
        for function in ("_reconstruct", "scalar")
    ]
    return [*named, np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in scalar_types)]


def _cause(error: Exception) -> str:
    """What the pickle asks for, where torch says so on one of its many lines; else the first."""
    text = str(error).strip() or type(error).__name__
    asked = re.search(r"GLOBAL (\S+)", text) or re.search(r"WeightsUnpickler error: (.+)", text)
    return asked[1] if asked else text.splitlines()[0]
