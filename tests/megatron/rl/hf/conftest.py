"""Tiny random models that transformers writes, and four ranks to load them on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.spawn import World

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 16384,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = ("llama", "llama_tied", "llama_bias", "qwen2_tied", "qwen3", "qwen3_tied")


def make_model(name: str) -> PreTrainedModel:
    tied = {"tie_word_embeddings": name.endswith("_tied")}
    if name.startswith("qwen2"):
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **tied))
    if name.startswith("qwen3"):
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **tied, head_dim=16))
    biases = {"attention_bias": name == "llama_bias", "mlp_bias": name == "llama_bias"}
    rope = {"rope_parameters": LLAMA_3_ROPE} if name == "llama_tied" else {}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **tied, **biases, **rope))


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one directory a model; beside each: ids, fp64 logits, what fp32 rounds off.

    Every parameter is random, norms and biases too, and large enough that logits depend on all.
    The untied ones are in bfloat16 and in many files.
    """
    folder = tmp_path_factory.mktemp("hf")
    ids = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(7))
    for name in MODELS:
        torch.manual_seed(11)
        model = make_model(name)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.normal_(std=0.3).add_(float("norm" in key))
        is_sharded = not name.endswith("_tied")
        stored = model.to(torch.bfloat16 if is_sharded else torch.float32)
        limit = "10KB" if is_sharded else "1GB"
        stored.save_pretrained(folder / name, max_shard_size=limit)
        for other in ("tokenizer.json", "LICENSE"):
            (folder / name / other).write_text(f"{other} of {name}")
        logits = {}
        for dtype in (torch.float32, torch.float64):
            again = type(model).from_pretrained(folder / name, dtype=dtype).eval()
            with torch.no_grad():
                logits[dtype] = again(ids).logits
        rounding = (logits[torch.float32] - logits[torch.float64]).abs().max().item()
        torch.save((ids, logits[torch.float64], rounding), folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with World(4, timeout_s=120) as ranks:
        yield ranks
