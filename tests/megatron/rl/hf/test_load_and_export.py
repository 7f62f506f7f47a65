"""Live models on four ranks: transformers' logits, mbridge's parameters, and what came in.

The models have two query groups: with tp=4, two ranks share each.
"""

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatron.rl.hf import (
    architecture_from_hf,
    export_hf_weights,
    export_new_hf_weights,
    load_hf_weights,
)
from megatron.rl.hf.files import TensorReader, TensorWriter
from tests.megatron.rl.hf.conftest import MODELS
from tests.megatron.rl.hf.ranks import (
    PADDED_VOCAB,
    Place,
    Topology,
    build,
    build_and_load,
    enter,
    oracle,
    whole_logits,
)
from tests.spawn import World

TOPOLOGIES = [Topology(tp=4), Topology(tp=2, pp=2), Topology(pp=4), Topology(pp=2, vpp=2)]
TP2_PP2 = Topology(tp=2, pp=2)


def export(place: Place, chunks: list[nn.Module], source: Path, output: Path) -> None:
    """By the ranks of one replica, as a caller should."""
    if place.groups.dp.rank() == 0:
        groups = place.groups
        export_hf_weights(chunks, source, output, tp_group=groups.tp, pp_group=groups.pp)


def assert_same_directory(output: Path, source: Path) -> None:
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in output.iterdir()) == names
    same, different, failed = filecmp.cmpfiles(output, source, names, shallow=False)
    assert (sorted(same), different, failed) == (names, [], [])


def logits_on_rank(
    rank: int, topology: Topology, folder: Path, ids: Tensor, fused: bool
) -> dict[str, Tensor]:
    place = enter(topology)
    logits = {}
    for name in MODELS:
        (model,), _ = build_and_load(place, folder / name, fused=fused)
        logits[name] = whole_logits(place, model, ids)
    return logits


@pytest.mark.parametrize(
    ("topology", "fused"),
    [(Topology(), False), (Topology(), True), (Topology(tp=4), False)],
    ids=["core's layers", "transformer-engine's names", "tp4"],
)
def test_logits_are_those_of_transformers(
    world: World, hf_models: Path, topology: Topology, fused: bool
) -> None:
    ids, _, _ = torch.load(hf_models / f"{MODELS[0]}.pt")
    for on_rank in world.run(logits_on_rank, topology, hf_models, ids, fused):
        for name, logits in on_rank.items():
            _, expected, rounding = torch.load(hf_models / f"{name}.pt")
            error = (logits[..., :50] - expected).abs().max().item()
            assert error < 3 * rounding, (name, error, rounding)
            assert torch.equal(logits[..., 50:], torch.zeros(2, 24, PADDED_VOCAB - 50))


def compare_and_export_on_rank(
    rank: int, topology: Topology, folder: Path, outputs: Path
) -> dict[str, tuple[int, list[str]]]:
    """Export every model as it was loaded; number of parameters, and which mbridge has unlike."""
    place = enter(topology)
    answers = {}
    for name in MODELS:
        chunks, _ = build_and_load(place, folder / name)
        export(place, chunks, folder / name, outputs / name)
        if name == "llama_bias":  # mbridge knows no bias but that of query, key and value
            continue
        ours = [pair for chunk in chunks for pair in chunk.named_parameters()]
        theirs = [p for chunk in oracle(place, folder / name) for p in chunk.named_parameters()]
        unlike = [
            key
            for (key, parameter), (their_key, expected) in zip(ours, theirs, strict=True)
            if key != their_key or not torch.equal(parameter, expected)
        ]
        answers[name] = len(ours), unlike
    return answers


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_parameters_are_mbridges_and_come_out_byte_for_byte(
    world: World, hf_models: Path, tmp_path: Path, topology: Topology
) -> None:
    for on_rank in world.run(compare_and_export_on_rank, topology, hf_models, tmp_path):
        for name, (count, unlike) in on_rank.items():
            assert count > 0, name
            assert unlike == [], name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MODELS)
    for name in MODELS:
        assert_same_directory(tmp_path / name, hf_models / name)


def export_in_other_ways_on_rank(rank: int, folder: Path, outputs: Path) -> set[torch.dtype]:
    """Layers with transformer-engine's names; a wrapped 16-bit model; a model that was trained."""
    place = enter(TP2_PP2)
    fused, _ = build_and_load(place, folder / "qwen3", fused=True)
    export(place, fused, folder / "qwen3", outputs / "fused")

    source = folder / "llama"
    (model,) = build(place, architecture_from_hf(source), dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), Float16Module(model.config, model)
    )
    load_hf_weights([wrapped], source, tp_group=place.groups.tp)
    export(place, [wrapped], source, outputs / "wrapped")

    trained, _ = build_and_load(place, folder / "llama_tied")
    with torch.no_grad():
        for chunk in trained:
            for parameter in chunk.parameters():
                parameter.mul_(-2)
    export(place, trained, folder / "llama_tied", outputs / "trained")
    return {parameter.dtype for parameter in model.parameters()}


def test_layers_of_other_names_wrapped_and_trained_models_are_exported(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    dtypes = world.run(export_in_other_ways_on_rank, hf_models, tmp_path)
    assert dtypes == [{torch.bfloat16}] * 4
    assert_same_directory(tmp_path / "fused", hf_models / "qwen3")
    assert_same_directory(tmp_path / "wrapped", hf_models / "llama")
    before = load_file(hf_models / "llama_tied" / "model.safetensors")
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], -2 * before[name]) for name in before)


def export_new_on_rank(rank: int, folder: Path, outputs: Path) -> None:
    place = enter(TP2_PP2)
    groups = place.groups
    for name in MODELS:
        chunks, architecture = build_and_load(place, folder / name)
        export_new_hf_weights(
            chunks,
            architecture,
            outputs / name,
            tp_group=groups.tp,
            pp_group=groups.pp,
            max_shard_bytes=20_000,
        )


def test_a_model_without_a_source_is_one_that_transformers_loads(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    world.run(export_new_on_rank, hf_models, tmp_path)
    ids = torch.arange(10)[None]
    for name in MODELS:
        files = list((tmp_path / name).glob("*.safetensors"))
        assert len(files) > 1
        assert max(path.stat().st_size for path in files) < 24_000
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["torch_dtype"] == "float32"
        expected = AutoModelForCausalLM.from_pretrained(hf_models / name, dtype=torch.float32)
        written, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True
        )
        assert not any(report.values()), report
        assert type(written) is type(expected)
        with torch.no_grad():
            assert torch.equal(written(ids).logits, expected(ids).logits), name


def numbers_read_on_rank(rank: int, directory: Path) -> tuple[int, int]:
    """How many numbers loading takes from the files, and how many the parameters hold."""
    place = enter(TP2_PP2)
    read, counted = TensorReader.read, []

    def counting_read(*args: Any) -> Tensor:
        counted.append(read(*args))
        return counted[-1]

    with patch.object(TensorReader, "read", counting_read):
        chunks, _ = build_and_load(place, directory)
    held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    return sum(tensor.numel() for tensor in counted), held


def test_a_rank_reads_what_it_holds_and_no_more(world: World, hf_models: Path) -> None:
    answers = world.run(numbers_read_on_rank, hf_models / "llama")
    # the second tp rank holds the 14 padded rows, of 32, of the embedding or the output layer
    assert [held - read for read, held in answers] == [0, 14 * 32, 0, 14 * 32]


def load_error(place: Place, directory: Path, built: dict[str, Any], vocab: int) -> str:
    chunks = build(place, architecture_from_hf(directory) | built, padded_vocab=vocab)
    try:
        load_hf_weights(chunks, directory, tp_group=place.groups.tp)
    except ValueError as error:
        return str(error)
    return "loaded"


def load_errors_on_rank(rank: int, cases: list[tuple[Path, dict[str, Any], int]]) -> list[str]:
    place = enter(Topology())
    return [load_error(place, *case) for case in cases]


def test_a_model_that_is_built_otherwise_is_refused(world: World, hf_models: Path) -> None:
    same = "must be the same in model and checkpoint:"
    counterpart = "a parameter must have a Hugging Face counterpart: parameter="
    cases = [
        ("llama", {"num_layers": 3}, 64, f"num_layers {same} model=3, checkpoint=4"),
        (  # of equal shapes
            "qwen3",
            {"num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 8},
            64,
            f"num_attention_heads {same} model=16, checkpoint=8",
        ),
        (
            "llama",
            {"untie_embeddings_and_output_weights": False},
            64,
            f"untie_embeddings_and_output_weights {same} model=False, checkpoint=True",
        ),
        (
            "llama",
            {"qk_layernorm": True},
            64,
            f"{counterpart}decoder.layers.0.self_attention.q_layernorm.weight",
        ),
        (
            "qwen3",
            {"qk_layernorm": False},
            64,
            "a tensor must have a parameter in the model: "
            "tensor=model.layers.0.self_attn.q_norm.weight",
        ),
        (
            "llama",
            {},
            48,
            "the padded vocabulary must hold model.embed_tokens.weight: rows=50, "
            "embedding.word_embeddings.weight=48",
        ),
    ]
    asked = [(hf_models / name, built, vocab) for name, built, vocab, _ in cases]
    expected = [message for *_, message in cases]
    assert world.run(load_errors_on_rank, asked) == [expected] * 4


def edited_copy(source: Path, copy: Path, edit: dict[str, Tensor | None]) -> Path:
    """A directory of one file, with some tensors replaced, added, or (None) left out."""
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors") | edit
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_checkpoint_that_is_not_its_config_is_refused(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    layer = "model.layers.{}.mlp.up_proj.weight".format
    cases: list[tuple[dict[str, Tensor | None], str]] = [
        (
            {layer(3): None},
            f"{{}} must hold every tensor of its model: missing={layer(3)}",
        ),
        (
            {layer(4): torch.zeros(1), "value_head": torch.zeros(1)},
            f"{{}} must hold no tensor that its model does not use: unused={layer(4)} and 1 more",
        ),
        (
            {"model.norm.weight": torch.zeros(33)},
            "{}: model.norm.weight must have the shape that config.json says: "
            "tensor=(33,), config.json=(32,)",
        ),
        (
            {"lm_head.weight": torch.zeros(50, 32)},
            "lm_head.weight must equal model.embed_tokens.weight where config.json says "
            "tie_word_embeddings=true",
        ),
    ]
    asked, expected = [], []
    for number, (edit, message) in enumerate(cases):
        copy = edited_copy(hf_models / "llama_tied", tmp_path / str(number), edit)
        asked.append((copy, {}, 64))
        expected.append(message.format(copy))
    assert world.run(load_errors_on_rank, asked) == [expected] * 4


def round_trip_on_rank(rank: int, source: Path, output: Path) -> None:
    place = enter(TP2_PP2)
    chunks, _ = build_and_load(place, source)
    export(place, chunks, source, output)


def test_stored_copies_and_rotary_frequencies_are_kept(
    world: World, hf_models: Path, tmp_path: Path
) -> None:
    source = hf_models / "qwen2_tied"
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    edit = {
        "lm_head.weight": embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(2),
    }
    directory = edited_copy(source, tmp_path / "edited", edit)
    world.run(round_trip_on_rank, directory, tmp_path / "out")
    assert_same_directory(tmp_path / "out", directory)


def full_after(room: int) -> Callable[[TensorWriter, str, Tensor], None]:
    """TensorWriter.write on a disk with room for so many tensors."""
    write, written = TensorWriter.write, []

    def write_until_full(writer: TensorWriter, name: str, tensor: Tensor) -> None:
        if len(written) == room:
            raise OSError("no space left on device")
        written.append(name)
        write(writer, name, tensor)

    return write_until_full


def export_errors_on_rank(rank: int, folder: Path, cases: list[tuple[str, str, int]]) -> list[str]:
    place = enter(TP2_PP2)
    chunks, _ = build_and_load(place, folder / "llama")
    answers = []
    for source, output, room in cases:
        with patch.object(TensorWriter, "write", full_after(room)):
            try:
                export(place, chunks, folder / source, folder / output)
                answers.append("exported")
            except (ValueError, OSError) as error:
                answers.append(f"{type(error).__name__}: {error}")
    return answers


def test_an_export_that_fails_fails_on_every_rank_and_leaves_nothing(
    world: World, hf_models: Path
) -> None:
    cases = [
        ("llama", "llama", 1000, "ValueError: output_directory must not exist yet"),
        ("qwen3", "out", 1000, "ValueError: kv_channels must be the same in model and checkpoint"),
        ("nothing", "out", 1000, f"ValueError: {hf_models}/nothing/config.json must be a readable"),
        ("llama", "llama.pt/out", 1000, "NotADirectoryError"),
        ("llama", "out", 5, "OSError: no space left on device"),  # while the first stage sends
        ("llama", "out", 30, "OSError: no space left on device"),  # while the last one does
    ]
    before = sorted(hf_models.rglob("*"))
    for answers in world.run(export_errors_on_rank, hf_models, [case[:3] for case in cases]):
        for answer, (*_, message) in zip(answers, cases, strict=True):
            assert answer.startswith(message)
    assert sorted(hf_models.rglob("*")) == before
