"""Weights of a live model into a Hugging Face directory; whole, or not at all.

With a source directory the output has its files, names, dtypes and metadata: a model that was not
trained comes out bit for bit as it came in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.rl.hf.architectures import architecture_from_hf, config_from_architecture
from megatron.rl.hf.files import (
    INDEX_FILE,
    Layout,
    TensorReader,
    TensorWriter,
    plan_layout,
    read_layout,
)
from megatron.rl.hf.gather import ModelTensors, WriterGroups
from megatron.rl.hf.load import check_tensors, is_carried, is_tied_copy
from megatron.rl.hf.mapping import EMBEDDING, WeightTable
from megatron.rl.logging import progress

CONFIG_FILE = "config.json"
MAX_SHARD_BYTES = 5 * 10**9
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Plan:
    """What the output directory will hold.

    Args:
        architecture: of the model (see `megatron.rl.hf.architectures`).
        layout: where every tensor goes.
        source: directory whose other files are copied; None: a new model.
        config: config.json where it is not the source's.
    """

    architecture: Mapping[str, Any]
    layout: Layout
    source: Path | None = None
    config: Mapping[str, Any] | None = None


def export_hf_weights(
    model_chunks: Sequence[nn.Module],
    source_directory: Path,
    output_directory: Path,
    *,
    tp_group: ProcessGroup | None = None,
    pp_group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    show_progress: bool = False,
) -> None:
    """Write a model in the form of the directory that it was loaded from.

    Every rank of one replica of the model calls it: the tensor and pipeline parallel ranks, of one
    data and context parallel rank. The first rank of both groups reads and writes the files.
    Communicates over both groups. Needs memory for one parameter.

    Args:
        model_chunks: this rank's GPTModels, wrapped or not.
        source_directory: decides files, names, dtypes, configuration and tokenizer.
        output_directory: must not exist yet; appears under this name when it is complete.
        tp_group: tensor parallel group; None: one rank.
        pp_group: pipeline group; None: one stage.
        dtype: of all tensors; None: the source's, to which weights trained in fp32 are rounded.
        show_progress: draw a progress bar on the writer.

    Raises:
        ValueError: source and model do not fit, or the output exists; on every rank.
        OSError: files cannot be written; on every rank.
    """

    def plan() -> Plan:
        source = Path(source_directory)
        architecture = architecture_from_hf(source)
        layout = read_layout(source)
        check_tensors(source, WeightTable.of(architecture), layout.slots)
        if dtype is None:
            return Plan(architecture, layout, source=source)
        shapes = {name: slot.shape for name, slot in layout.slots.items()}
        config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = str(dtype).removeprefix("torch.")
        layout = plan_layout(shapes, dtype, MAX_SHARD_BYTES)
        return Plan(architecture, layout, source=source, config=config)

    groups = WriterGroups(tp_group, pp_group)
    _export(model_chunks, plan, Path(output_directory), groups, show_progress)


def export_new_hf_weights(
    model_chunks: Sequence[nn.Module],
    architecture: Mapping[str, Any],
    output_directory: Path,
    *,
    tp_group: ProcessGroup | None = None,
    pp_group: ProcessGroup | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    show_progress: bool = False,
) -> None:
    """Write a model that was never a Hugging Face one: config.json and safetensors, no tokenizer.

    Called, and failing, like `export_hf_weights`.

    Args:
        model_chunks: this rank's GPTModels, wrapped or not.
        architecture: values by field name, as `architecture_of` returns them.
        output_directory: must not exist yet; appears under this name when it is complete.
        tp_group: tensor parallel group; None: one rank.
        pp_group: pipeline group; None: one stage.
        max_shard_bytes: tensors a file may hold, in bytes; a larger tensor gets its own file.
        show_progress: draw a progress bar on the writer.

    Raises:
        ValueError: no Llama, Qwen2 or Qwen3 has this architecture, or it is not the model's.
        OSError: files cannot be written.
    """

    def plan() -> Plan:
        dtype = next(model_chunks[0].parameters()).dtype
        config = config_from_architecture(architecture)
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        table = WeightTable.of(architecture)
        shapes = table.tensors(range(table.num_layers), first=True, last=True)
        layout = plan_layout(shapes, dtype, max_shard_bytes)
        return Plan(architecture, layout, config=config)

    groups = WriterGroups(tp_group, pp_group)
    _export(model_chunks, plan, Path(output_directory), groups, show_progress)


def _export(
    model_chunks: Sequence[nn.Module],
    make_plan: Callable[[], Plan],
    output: Path,
    groups: WriterGroups,
    show_progress: bool,
) -> None:
    def checked_plan() -> Plan:
        if output.exists():
            raise ValueError(f"output_directory must not exist yet: output_directory={output}")
        return make_plan()

    plan = groups.from_writer(checked_plan)
    tensors = ModelTensors(model_chunks, plan.architecture, plan.layout.slots, groups)
    if not groups.is_writer:
        for _ in tensors:
            pass
    groups.from_writer(lambda: _write_directory(plan, output, tensors, show_progress))


def _write_directory(plan: Plan, output: Path, tensors: ModelTensors, show_progress: bool) -> None:
    arriving = iter(tensors)
    num_tensors = len(plan.layout.slots)
    try:
        with (
            _appearing_whole(output) as partial,
            TensorWriter(partial, plan.layout) as writer,
            progress(
                desc="writing weights", total=num_tensors, unit="tensor", is_writer=show_progress
            ) as bar,
        ):
            _write_small_files(plan, partial)
            _write_carried(plan, writer)
            for name, tensor in arriving:
                for copy in (name, *_tied_copies(plan, name)):
                    writer.write(copy, tensor)
                    bar.update()
    except OSError:
        for _ in arriving:  # the other ranks are still sending
            pass
        raise


def _write_small_files(plan: Plan, directory: Path) -> None:
    """Everything but the tensors: configuration, tokenizer, licence, index, ..."""
    if plan.config is not None:
        text = json.dumps(plan.config, indent=2) + "\n"
        (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    if plan.layout.index is not None:
        (directory / INDEX_FILE).write_bytes(plan.layout.index)
    if plan.source is None:
        return
    for path in sorted(plan.source.iterdir()):
        is_weights = path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
        is_written = plan.config is not None and path.name == CONFIG_FILE
        if path.is_file() and not (is_weights or is_written or path.name.startswith(".")):
            shutil.copyfile(path, directory / path.name)


def _write_carried(plan: Plan, writer: TensorWriter) -> None:
    """Tensors of the source that no parameter is made of."""
    if plan.source is None:
        return
    table = WeightTable.of(plan.architecture)
    reader = TensorReader(plan.source, read_layout(plan.source))
    for name in plan.layout.slots:
        if is_carried(name, table) and not is_tied_copy(name, table):
            writer.write(name, reader.read(name))


def _tied_copies(plan: Plan, name: str) -> list[str]:
    """Under which other names a tensor is stored."""
    if name != EMBEDDING.tensors[0].name:
        return []
    table = WeightTable.of(plan.architecture)
    return [copy for copy in plan.layout.slots if is_tied_copy(copy, table)]


@contextmanager
def _appearing_whole(directory: Path) -> Generator[Path]:
    """A directory to fill, which gets its name when it is full, and is gone if it cannot be."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
