"""Our reading and writing of safetensors against the safetensors package's own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.rl.hf.files import TensorReader, TensorWriter, plan_layout, read_layout


def some_tensors() -> dict[str, Tensor]:
    return {
        "b.weight": torch.randn(3, 4).bfloat16(),
        "a.weight": torch.randn(5, 2),
        "c.bias": torch.randn(7).half(),
        "d": torch.randn(3, dtype=torch.float64),
    }


def test_a_copy_written_in_another_order_has_the_same_bytes(tmp_path: Path) -> None:
    tensors = some_tensors()
    (tmp_path / "copy").mkdir()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "by": "someone"})
    layout = read_layout(tmp_path)
    with TensorWriter(tmp_path / "copy", layout) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name].double())
    original = (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == original


def test_parts_are_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path, read_layout(tmp_path))
    assert torch.equal(reader.read("b.weight"), tensors["b.weight"])
    assert torch.equal(reader.read("b.weight", 0, 1, 3), tensors["b.weight"][1:3])
    assert torch.equal(reader.read("b.weight", 1, 1, 2), tensors["b.weight"][:, 1:2])
    assert torch.equal(reader.read("c.bias", 0, 2, 2), tensors["c.bias"][2:2])


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (1000, ["model.safetensors"]),
        (40, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (1, [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]),
    ],
)
def test_new_files_are_ordinary_safetensors(tmp_path: Path, limit: int, files: list[str]) -> None:
    tensors = {"y": torch.randn(3, 3), "x": torch.randn(1), "z": torch.randn(2, 5)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = plan_layout(shapes, torch.float32, limit)
    with TensorWriter(tmp_path, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    if layout.index is not None:
        (tmp_path / "model.safetensors.index.json").write_bytes(layout.index)

    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == files
    stored = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert read_layout(tmp_path) == layout
    if len(files) > 1:
        assert layout.index is not None
        index = json.loads(layout.index)
        assert index["metadata"] == {"total_size": 80}
        assert index["weight_map"].keys() == tensors.keys()


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must hold model\.safetensors or model\.safetensors\.i"):
        read_layout(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors must be a readable safetensors file"):
        read_layout(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(some_tensors(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a readable safetensors file"):
        read_layout(tmp_path)


def test_quantised_numbers_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="dtype must be one of F64, F32, F16, BF16: file="):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "a.safetensors"}, "tensor=v, index=None, file=a.safetensors"),
        (
            {"w": "a.safetensors", "v": "a.safetensors", "u": "a.safetensors"},
            "tensor=u, index=a.safetensors, file=None",
        ),
        ({"w": "a.safetensors", "v": "b.safetensors"}, r"b\.safetensors must be a readable"),
    ],
    ids=["tensor not in the index", "tensor not in its file", "file that is not there"],
)
def test_an_index_that_disagrees_with_the_files_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    save_file({"w": torch.zeros(4), "v": torch.zeros(4)}, tmp_path / "a.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        read_layout(tmp_path)
