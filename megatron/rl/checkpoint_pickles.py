"""No checkpoint runs code: what is unpickled from one is held to a list of harmless names.

megatron-core reads `.metadata` with pickle, and objects inside of the shards with
`torch.load(weights_only=False)`; either runs whatever the file says.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron.rl.checkpoint_manifest import CheckpointError

METADATA = ".metadata"
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORCE_NOT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_HARMLESS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}
"""What torch's description of the shards is made of, and dtypes: data, and nothing that acts."""


def check_metadata(directory: Path) -> None:
    """Read torch's description of the shards with nothing but harmless names.

    Raises:
        CheckpointError: it names something else, or is no pickle.
    """
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            content = _Harmless(file).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path} cannot be read: {cause(error)}") from None
    if not isinstance(content, Metadata):
        raise CheckpointError(f"{path} must be torch's Metadata: {type(content).__name__}")


@contextmanager
def plain_values_only() -> Iterator[None]:
    """Hold every `torch.load` of the block, core's too, to tensors and plain values.

    Tensors are read in the dtype of the file: a mode that changes dtypes, as --fp64 is, rests.
    """
    environment = os.environ  # noqa: TID251 - torch's only switch for calls that say otherwise
    before = {name: environment.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    environment[_FORCE] = "1"
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        del environment[_FORCE]
        environment.update({name: value for name, value in before.items() if value is not None})


def cause(error: BaseException) -> str:
    """What went wrong on reading a checkpoint, without the traces and the advice of torch."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {cause(e)}" for rank, (e, _) in error.failures.items())
    if isinstance(error, pickle.UnpicklingError):
        asked = re.search(r"GLOBAL (\S+)", str(error))
        return (
            "it must hold plain values only (it is a pickle, which could run code)"
            f"{f': it names {asked[1]}' if asked else ''}; fix: use a checkpoint that this trainer "
            "wrote"
        )
    return f"{type(error).__name__}: {error}"


class _Harmless(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in _HARMLESS.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch":
            value = getattr(torch, global_name, None)
            if isinstance(value, torch.dtype | torch.layout):
                return value
        raise pickle.UnpicklingError(f"GLOBAL {module_name}.{global_name}")  # as torch says it
