"""Live models on four ranks: transformers' logits, mbridge's parameters, and what came in."""

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron.rl.hf import (
    architecture_from_hf,
    export_hf_weights,
    export_new_hf_weights,
    load_hf_weights,
)
from megatron.rl.hf.files import TensorWriter
from tests.megatron.rl.hf.conftest import MODELS
from tests.megatron.rl.hf.ranks import (
    PADDED_VOCAB,
    Topology,
    build,
    build_and_load,
    enter,
    numbers_read,
    oracle,
    whole_logits,
)
from tests.spawn import World

# the models have two query groups: with tp=4, two ranks share each
TOPOLOGIES = [
    Topology(tp=4),
    Topology(tp=2, pp=2),
    Topology(pp=4),
    Topology(pp=2, vpp=2),
]


def logits_on_rank(
    rank: int, topology: Topology, directory: Path, ids: Tensor, fused: bool
) -> Tensor:
    place = enter(topology)
    (model,), _ = build_and_load(place, directory, fused=fused)
    return whole_logits(place, model, ids)


@pytest.mark.parametrize(
    ("topology", "fused"),
    [(Topology(), False), (Topology(), True), (Topology(tp=4), False)],
    ids=["core's layers", "transformer-engine's names", "tp4"],
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    world: World, hf_models: Path, name: str, topology: Topology, fused: bool
) -> None:
    ids, expected, rounding = torch.load(hf_models / f"{name}.pt")
    for logits in world.run(logits_on_rank, topology, hf_models / name, ids, fused):
        error = (logits[..., :50] - expected).abs().max().item()
        assert error < 3 * rounding, (error, rounding)
        assert torch.equal(logits[..., 50:], torch.zeros(2, 24, PADDED_VOCAB - 50))


def compare_with_mbridge_on_rank(rank: int, topology: Topology, directory: Path) -> int:
    place = enter(topology)
    ours, _ = build_and_load(place, directory)
    for chunk, expected in zip(ours, oracle(place, directory), strict=True):
        parameters = dict(chunk.named_parameters())
        assert parameters.keys() == dict(expected.named_parameters()).keys()
        for name, parameter in expected.named_parameters():
            assert torch.equal(parameters[name], parameter), name
    return sum(1 for chunk in ours for _ in chunk.parameters())


# mbridge knows no bias but that of query, key and value
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama_bias"])
def test_parameters_are_those_of_mbridge(
    world: World, hf_models: Path, name: str, topology: Topology
) -> None:
    assert min(world.run(compare_with_mbridge_on_rank, topology, hf_models / name)) > 0


def round_trip_on_rank(
    rank: int, topology: Topology, source: Path, output: Path, fused: bool
) -> None:
    place = enter(topology)
    chunks, _ = build_and_load(place, source, fused=fused)
    if place.is_first_replica:
        groups = place.groups
        export_hf_weights(chunks, source, output, tp_group=groups.tp, pp_group=groups.pp)


def assert_same_directory(output: Path, source: Path) -> None:
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in output.iterdir()) == names
    same, different, failed = filecmp.cmpfiles(output, source, names, shallow=False)
    assert (sorted(same), different, failed) == (names, [], [])


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_was_not_trained_comes_out_byte_for_byte(
    world: World, hf_models: Path, tmp_path: Path, name: str, topology: Topology
) -> None:
    output = tmp_path / "out"
    world.run(round_trip_on_rank, topology, hf_models / name, output, False)
    assert_same_directory(output, hf_models / name)
    assert list(tmp_path.iterdir()) == [output]


def test_transformer_engines_names_come_out_byte_for_byte(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    world.run(round_trip_on_rank, Topology(tp=2, pp=2), hf_models / "qwen3", output, True)
    assert_same_directory(output, hf_models / "qwen3")


def train_and_export_on_rank(rank: int, topology: Topology, source: Path, output: Path) -> None:
    place = enter(topology)
    chunks, _ = build_and_load(place, source)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(-2)
    if place.is_first_replica:
        groups = place.groups
        export_hf_weights(chunks, source, output, tp_group=groups.tp, pp_group=groups.pp)


def test_what_was_trained_is_written_not_what_was_read(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    source, output = hf_models / "llama_tied", tmp_path / "out"
    world.run(train_and_export_on_rank, Topology(tp=2, pp=2), source, output)
    before = load_file(source / "model.safetensors")
    after = load_file(output / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], -2 * before[name]) for name in before)


def export_new_on_rank(rank: int, topology: Topology, source: Path, output: Path) -> None:
    place = enter(topology)
    chunks, architecture = build_and_load(place, source)
    if place.is_first_replica:
        groups = place.groups
        export_new_hf_weights(
            chunks,
            architecture,
            output,
            tp_group=groups.tp,
            pp_group=groups.pp,
            max_shard_bytes=20_000,
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_source_is_one_that_transformers_loads(
    world: World, hf_models: Path, tmp_path: Path, name: str
) -> None:
    output = tmp_path / "out"
    world.run(export_new_on_rank, Topology(tp=2, pp=2), hf_models / name, output)
    assert max(path.stat().st_size for path in output.glob("*.safetensors")) < 23_000
    assert json.loads((output / "config.json").read_text())["torch_dtype"] == "float32"
    expected = AutoModelForCausalLM.from_pretrained(hf_models / name, dtype=torch.float32)
    written, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(report.values()), report
    assert type(written) is type(expected)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(written(ids).logits, expected(ids).logits)


def wrapped_round_trip_on_rank(rank: int, source: Path, output: Path) -> list[torch.dtype]:
    place = enter(Topology(tp=2, pp=2))
    (model,) = build(place, architecture_from_hf(source), dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), Float16Module(model.config, model)
    )
    load_hf_weights([wrapped], source, tp_group=place.groups.tp)
    groups = place.groups
    export_hf_weights([wrapped], source, output, tp_group=groups.tp, pp_group=groups.pp)
    return [parameter.dtype for parameter in model.parameters()]


def test_wrapped_16_bit_parameters_are_filled_in_place(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    dtypes = world.run(wrapped_round_trip_on_rank, hf_models / "llama", output)
    assert {dtype for on_rank in dtypes for dtype in on_rank} == {torch.bfloat16}
    assert_same_directory(output, hf_models / "llama")


def numbers_read_on_rank(rank: int, directory: Path) -> tuple[int, int]:
    return numbers_read(enter(Topology(tp=2, pp=2)), directory)


def test_a_rank_reads_what_it_holds_and_no_more(world: World, hf_models: Path) -> None:
    answers = world.run(numbers_read_on_rank, hf_models / "llama")
    # rank 1 of tp holds the 14 padded rows of the embedding, or of the output layer, of 32 each
    padding = [0, 14 * 32, 0, 14 * 32]
    assert [held - read for read, held in answers] == padding


def error_of_load_on_rank(rank: int, directory: Path, built: dict[str, Any], vocab: int) -> str:
    place = enter(Topology())
    architecture = architecture_from_hf(directory)
    chunks = build(place, architecture | built, padded_vocab=vocab)
    try:
        load_hf_weights(chunks, directory, tp_group=place.groups.tp)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("built", "vocab", "message"),
    [
        ({"num_layers": 3}, 64, "num_layers must be the same in model and checkpoint: model=3, "),
        (
            {"num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 8},
            64,
            "num_attention_heads must be the same in model and checkpoint: model=4, checkpoint=8",
        ),
        (
            {"untie_embeddings_and_output_weights": False},
            64,
            "untie_embeddings_and_output_weights must be the same in model and checkpoint",
        ),
        (
            {"qk_layernorm": True},
            64,
            "a parameter must have a Hugging Face counterpart: "
            "parameter=decoder.layers.0.self_attention.q_layernorm.weight",
        ),
        ({}, 48, "the padded vocabulary must hold model.embed_tokens.weight: rows=50"),
    ],
    ids=["layers", "heads", "tied", "norms", "vocabulary"],
)
def test_a_model_that_is_built_otherwise_is_refused(
    world: World, hf_models: Path, built: dict[str, Any], vocab: int, message: str
) -> None:
    for answer in world.run(error_of_load_on_rank, hf_models / "llama", built, vocab):
        assert answer.startswith(message), answer


def test_a_model_that_lacks_a_parameter_is_refused(world: World, hf_models: Path) -> None:
    for answer in world.run(
        error_of_load_on_rank, hf_models / "qwen3", {"qk_layernorm": False}, 64
    ):
        assert answer == (
            "a tensor must have a parameter in the model: "
            "tensor=model.layers.0.self_attn.q_norm.weight"
        )


def edited_copy(source: Path, copy: Path, edit: dict[str, Tensor | None]) -> Path:
    """A directory of one file, with some tensors replaced, added, or (None) left out."""
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors") | edit
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"model.layers.3.mlp.up_proj.weight": None},
            "must hold every tensor of its model: missing=model.layers.3.mlp.up_proj.weight",
        ),
        (
            {"model.layers.4.mlp.up_proj.weight": torch.zeros(1), "value_head": torch.zeros(1)},
            "must hold no tensor that its model does not use: "
            "unused=model.layers.4.mlp.up_proj.weight and 1 more",
        ),
        (
            {"model.norm.weight": torch.zeros(33)},
            "model.norm.weight must have the shape that config.json says: "
            "tensor=(33,), config.json=(32,)",
        ),
        (
            {"lm_head.weight": torch.zeros(50, 32)},
            "lm_head.weight must equal model.embed_tokens.weight where config.json says "
            "tie_word_embeddings=true",
        ),
    ],
    ids=["missing", "unused", "shape", "tied copy that differs"],
)
def test_a_checkpoint_that_is_not_its_config_is_refused(
    world: World, hf_models: Path, tmp_path: Path, edit: dict[str, Tensor | None], message: str
) -> None:
    directory = edited_copy(hf_models / "llama_tied", tmp_path / "edited", edit)
    for answer in world.run(error_of_load_on_rank, directory, {}, 64):
        assert message in answer


def test_stored_copies_and_rotary_frequencies_are_kept(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    source = hf_models / "qwen2_tied"
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    edit = {
        "lm_head.weight": embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(2),
    }
    directory, output = edited_copy(source, tmp_path / "edited", edit), tmp_path / "out"
    world.run(round_trip_on_rank, Topology(tp=2, pp=2), directory, output, False)
    assert_same_directory(output, directory)


def error_of_export_on_rank(
    rank: int, source: Path, other: Path, output: Path, disk_full: bool
) -> str:
    """What every rank of both replicas hears when a model of `source` is exported like `other`."""
    place = enter(Topology(tp=2, pp=2))
    chunks, _ = build_and_load(place, source)
    write, written = TensorWriter.write, []

    def write_until_full(writer: TensorWriter, name: str, tensor: Tensor) -> None:
        written.append(name)
        if disk_full and len(written) == 5:
            raise OSError("no space left on device")
        write(writer, name, tensor)

    groups = place.groups
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorWriter, "write", write_until_full)
            export_hf_weights(chunks, other, output, tp_group=groups.tp, pp_group=groups.pp)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "exported"


@pytest.mark.parametrize(
    ("other", "output", "disk_full", "message"),
    [
        ("llama", "llama", False, "ValueError: output_directory must not exist yet"),
        ("qwen3", "out", False, "ValueError: kv_channels must be the same in model and checkpoint"),
        ("nothing", "out", False, "ValueError: {folder}/nothing/config.json must be a readable"),
        ("llama", "llama.pt/out", False, "NotADirectoryError"),
        ("llama", "out", True, "OSError: no space left on device"),
    ],
    ids=["output exists", "another model", "no source", "no place", "disk full"],
)
def test_an_export_that_fails_fails_on_every_rank_and_leaves_nothing(
    world: World, hf_models: Path, other: str, output: str, disk_full: bool, message: str
) -> None:
    before = sorted(hf_models.rglob("*"))
    answers = world.run(
        error_of_export_on_rank,
        hf_models / "llama",
        hf_models / other,
        hf_models / output,
        disk_full,
    )
    assert all(answer.startswith(message.format(folder=hf_models)) for answer in answers), answers
    assert sorted(hf_models.rglob("*")) == before
