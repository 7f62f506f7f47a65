"""What config.json says, and what it may not say."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from megatron.rl.hf import architecture_from_hf, architecture_of, config_from_architecture

LLAMA_31 = {  # the form of transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_3 = {  # the form of transformers 5
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
COMMON = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
}


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_llama_31_is_read_from_transformers_4(tmp_path: Path) -> None:
    assert architecture_from_hf(write(tmp_path, LLAMA_31)) == COMMON | {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "layernorm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "rotary_base": 500000.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_max_position_embeddings": 8192,
    }


def test_qwen_3_is_read_from_transformers_5(tmp_path: Path) -> None:
    assert architecture_from_hf(write(tmp_path, QWEN_3)) == COMMON | {
        "num_layers": 28,
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "kv_channels": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "layernorm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "rotary_base": 1000000.0,
        "use_rope_scaling": False,
    }


def test_qwen_2_is_read_from_transformers_4(tmp_path: Path) -> None:
    assert architecture_from_hf(write(tmp_path, QWEN_2)) == COMMON | {
        "num_layers": 24,
        "hidden_size": 896,
        "ffn_hidden_size": 4864,
        "num_attention_heads": 14,
        "num_query_groups": 2,
        "kv_channels": 64,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "layernorm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "rotary_base": 1000000.0,
        "use_rope_scaling": False,
    }


def test_llama_may_leave_heads_biases_and_rotary_base_to_their_defaults(tmp_path: Path) -> None:
    optional = (
        "num_key_value_heads",
        "attention_bias",
        "mlp_bias",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "attention_dropout",
        "hidden_act",
    )
    config = {key: value for key, value in LLAMA_31.items() if key not in optional}
    architecture = architecture_from_hf(write(tmp_path, config))
    assert architecture["num_query_groups"] == 32
    assert architecture["kv_channels"] == 128
    assert architecture["rotary_base"] == 10000.0
    assert architecture["use_rope_scaling"] is False
    assert architecture["untie_embeddings_and_output_weights"] is True
    assert architecture["add_bias_linear"] is False


def test_llama_with_biases_everywhere_is_expressible(tmp_path: Path) -> None:
    config = LLAMA_31 | {"attention_bias": True, "mlp_bias": True}
    architecture = architecture_from_hf(write(tmp_path, config))
    assert (architecture["add_bias_linear"], architecture["add_qkv_bias"]) == (True, False)


def test_a_window_that_no_layer_uses_is_no_window(tmp_path: Path) -> None:
    config = QWEN_2 | {"use_sliding_window": True, "max_window_layers": 24}
    assert architecture_from_hf(write(tmp_path, config))["num_layers"] == 24


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA_31, {"architectures": ["GPT2LMHeadModel"]}, "architectures must be one of"),
        (LLAMA_31, {"architectures": None}, "architectures must be one of"),
        (LLAMA_31, {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        (LLAMA_31, {"attention_bias": True}, "attention_bias must equal mlp_bias"),
        (LLAMA_31, {"mlp_bias": True}, "attention_bias must equal mlp_bias"),
        (LLAMA_31, {"num_key_value_heads": 5}, "num_key_value_heads must divide"),
        (LLAMA_31, {"hidden_size": None}, "hidden_size must be a positive int: hidden_size=None"),
        (LLAMA_31, {"num_hidden_layers": True}, "num_hidden_layers must be a positive int"),
        (LLAMA_31, {"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive float"),
        (LLAMA_31, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must have"),
        (LLAMA_31, {"rope_scaling": {"rope_type": "llama3"}}, "factor must be a positive float"),
        (LLAMA_31, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        (LLAMA_31, {"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        (QWEN_3, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters must have"),
        (
            QWEN_3,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters must be the same in every layer",
        ),
        (QWEN_3, {"attention_bias": True}, "attention_bias must be False"),
        (QWEN_3, {"head_dim": None}, "head_dim must be a positive int"),
        (QWEN_3, {"num_key_value_heads": None}, "num_key_value_heads must be a positive int"),
        (
            QWEN_3,
            {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
            "layer_types must be full_attention in every layer",
        ),
        (QWEN_2, {"use_sliding_window": True}, "use_sliding_window must be false"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    directory = write(tmp_path, base | change)
    with pytest.raises(ValueError, match=message) as error:
        architecture_from_hf(directory)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1, 2]", None])
def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must"):
        architecture_from_hf(tmp_path)


@pytest.mark.parametrize("base", [LLAMA_31, QWEN_2, QWEN_3])
def test_a_config_made_from_an_architecture_reads_back(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    architecture = architecture_from_hf(write(tmp_path, base))
    config = config_from_architecture(architecture)
    assert config["architectures"] == base["architectures"]
    assert architecture_from_hf(write(tmp_path, config)) == architecture


@pytest.mark.parametrize("base", [LLAMA_31, QWEN_2, QWEN_3])
def test_transformers_reads_a_made_config_as_it_reads_the_original(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    original = AutoConfig.from_pretrained(write(tmp_path, base))
    made = config_from_architecture(architecture_from_hf(tmp_path))
    again = AutoConfig.from_pretrained(write(tmp_path, made))
    undecided = {"max_window_layers", "dtype", "use_mrope"}  # no layer and no weight depends on it
    expected = {k: v for k, v in original.to_dict().items() if k not in undecided}
    assert {key: again.to_dict().get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(architectures=["LlamaForCausalLM"], rope_theta=5e5, head_dim=64),
        Qwen2Config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=4),
        Qwen3Config(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True),
    ],
)
def test_what_transformers_saves_is_read(tmp_path: Path, config: PretrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    architecture = architecture_from_hf(tmp_path)
    assert architecture["kv_channels"] == getattr(config, "head_dim", 128)
    assert architecture["num_query_groups"] == config.num_key_value_heads
    assert architecture["rotary_base"] == config.rope_parameters["rope_theta"]
    assert architecture["layernorm_epsilon"] == config.rms_norm_eps
    assert architecture["untie_embeddings_and_output_weights"] is not config.tie_word_embeddings


def test_the_architecture_of_a_run_comes_from_both_configurations(tmp_path: Path) -> None:
    expected = architecture_from_hf(write(tmp_path, LLAMA_31))
    ours = {
        field: value
        for field, value in expected.items()
        if field.startswith(("rotary", "rope", "use_rope", "untie", "swiglu", "vocab", "max_pos"))
    }
    core = {field: value for field, value in expected.items() if field not in ours}
    assert len(core) == 13
    assert architecture_of(SimpleNamespace(**core), SimpleNamespace(**ours)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu": False}, "swiglu must be True in a Hugging Face model: swiglu=False"),
        ({"normalization": "LayerNorm"}, "normalization must be 'RMSNorm'"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "no Llama, Qwen2 or Qwen3 has these layers"),
    ],
)
def test_a_model_that_no_architecture_describes_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    architecture = architecture_from_hf(write(tmp_path, LLAMA_31)) | change
    with pytest.raises(ValueError, match=message):
        config_from_architecture(architecture)
