"""config.json of a Hugging Face directory <-> the fields of our own configuration.

An architecture is a dict: names of core's TransformerConfig and of our ModelConfig, with values.
Whatever it cannot express is refused, because a model that computes something else trains quietly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.transformer import TransformerConfig

from megatron.rl.config import ModelConfig

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3"}

# our field <-> config.json's key, for what is a plain positive integer in every architecture
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
# what every one of these architectures has, and core must be told
COMMON = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "hidden_dropout": 0.0,
}
LLAMA3_SCALING = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
}
FIELDS = (
    *SIZES,
    *COMMON,
    *LLAMA3_SCALING,
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "attention_dropout",
    "untie_embeddings_and_output_weights",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "rotary_base",
    "use_rope_scaling",
)


def architecture_from_hf(directory: Path) -> dict[str, Any]:
    """The model that a Hugging Face directory describes.

    Args:
        directory: holds config.json, as transformers 4 or 5 writes it.

    Returns:
        Values for fields of core's TransformerConfig and of our ModelConfig, by field name.

    Raises:
        ValueError: config.json is missing or unreadable, is of another architecture, or holds
            something that the fields cannot express; file, key and value are named.
    """
    config = HFConfig.read(Path(directory) / "config.json")
    config.refuse_unlike("quantization_config", None)
    config.refuse_unlike("hidden_act", "silu", default="silu")
    if config.architecture != LLAMA:
        _refuse_sliding_window(config)
    return {
        **COMMON,
        **{field: config.positive(key, int) for field, key in SIZES.items()},
        "layernorm_epsilon": config.positive("rms_norm_eps", float),
        "attention_dropout": config.values.get("attention_dropout") or 0.0,
        "untie_embeddings_and_output_weights": not config.values.get("tie_word_embeddings", False),
        "qk_layernorm": config.architecture == QWEN3,
        **_heads(config),
        **_biases(config),
        **_rotary(config),
    }


def config_from_architecture(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a model that never had one; `architecture_from_hf` gives it back.

    Args:
        architecture: values by field name, as `architecture_from_hf` returns them.

    Returns:
        The keys of config.json, understood by transformers 4 and 5.

    Raises:
        ValueError: no Llama, Qwen2 or Qwen3 has this architecture; the field is named.
    """
    name = _name_of(architecture)
    config = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        **{key: architecture[field] for field, key in SIZES.items()},
        "num_key_value_heads": architecture["num_query_groups"],
        "head_dim": architecture["kv_channels"],
        "hidden_act": "silu",
        "rms_norm_eps": architecture["layernorm_epsilon"],
        "attention_dropout": architecture["attention_dropout"],
        "tie_word_embeddings": not architecture["untie_embeddings_and_output_weights"],
        "rope_theta": architecture["rotary_base"],
    }
    if name == LLAMA:
        config["attention_bias"] = config["mlp_bias"] = architecture["add_bias_linear"]
    if architecture["use_rope_scaling"]:
        scaling = {key: architecture[field] for field, key in LLAMA3_SCALING.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return config


def architecture_of(transformer: TransformerConfig, model: ModelConfig) -> dict[str, Any]:
    """The architecture that a run's own flags describe, for a model without a source directory.

    Args:
        transformer: core's configuration.
        model: ours.

    Returns:
        Values by field name, as `architecture_from_hf` returns them.
    """
    return {
        field: getattr(model if hasattr(model, field) else transformer, field) for field in FIELDS
    }


@dataclass(frozen=True)
class HFConfig:
    """The content of one config.json, with errors that name file, key and value."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> HFConfig:
        """Read a file, and check that its architecture is one of ours."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} must be a readable JSON file: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold an object: value={values!r}")
        config = cls(path, values)
        if config.architecture not in MODEL_TYPES:
            config.refuse("architectures", f"must be one of {', '.join(MODEL_TYPES)}")
        return config

    @property
    def architecture(self) -> str | None:
        """The one name under `architectures`."""
        names = self.values.get("architectures")
        return names[0] if isinstance(names, list) and len(names) == 1 else None

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise the error of a key that breaks a rule."""
        raise ValueError(f"{self.path}: {key} {rule}: {key}={self.values.get(key)!r}")

    def refuse_unlike(self, key: str, only: Any, *, default: Any = None) -> None:
        """Refuse every value of a key but one."""
        if self.values.get(key, default) != only:
            self.refuse(key, f"must be {only!r}, nothing else can be honoured")

    def positive(self, key: str, kind: type[int] | type[float]) -> Any:
        """A required number above zero."""
        value = self.values.get(key)
        kinds = int if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            self.refuse(key, f"must be a positive {kind.__name__}")
        return kind(value)


def _refuse_sliding_window(config: HFConfig) -> None:
    """Qwen attends in a window where it is switched on, from layer max_window_layers upwards."""
    kinds = config.values.get("layer_types")
    if kinds is not None:
        if any(kind != "full_attention" for kind in kinds):
            config.refuse("layer_types", "must be full_attention in every layer")
        return
    switched_on = config.values.get("use_sliding_window", False)
    if switched_on and config.values.get("sliding_window") is not None:
        full = config.values.get("max_window_layers", 0)
        if full < config.positive("num_hidden_layers", int):
            config.refuse("use_sliding_window", "must be false, sliding windows are not built")


def _heads(config: HFConfig) -> dict[str, Any]:
    """Query groups and head size; only Llama's config.json may leave them to a default."""
    num_heads = config.positive("num_attention_heads", int)
    num_groups, head_dim = num_heads, config.positive("hidden_size", int) // num_heads
    may_default = config.architecture == LLAMA
    if not may_default or config.values.get("num_key_value_heads") is not None:
        num_groups = config.positive("num_key_value_heads", int)
    if config.architecture == QWEN3 or config.values.get("head_dim") is not None:
        head_dim = config.positive("head_dim", int)
    if num_heads % num_groups:
        config.refuse("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    return {"num_query_groups": num_groups, "kv_channels": head_dim}


def _biases(config: HFConfig) -> dict[str, Any]:
    """Core has biases in all linear layers, in query, key and value only, or nowhere."""
    attention = bool(config.values.get("attention_bias", False))
    if config.architecture == LLAMA:
        if attention != bool(config.values.get("mlp_bias", False)):
            config.refuse("attention_bias", "must equal mlp_bias")
        return {"add_bias_linear": attention, "add_qkv_bias": False}
    if config.architecture == QWEN3:
        config.refuse_unlike("attention_bias", False, default=False)
    return {"add_bias_linear": False, "add_qkv_bias": config.architecture == QWEN2}


def _rotary(config: HFConfig) -> dict[str, Any]:
    """Transformers 5 writes `rope_parameters`, 4 writes `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    parameters = config.values.get(key) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        config.refuse(key, "must be the same in every layer")
    rope = HFConfig(config.path, {"rope_theta": 10000.0, **config.values, **parameters})
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "llama3"):
        config.refuse(key, "must have rope_type default or llama3")
    if rope.values.get("partial_rotary_factor") is not None:
        rope.refuse_unlike("partial_rotary_factor", 1.0)
    scaling: dict[str, Any] = {}
    if kind == "llama3":
        scaling = {field: rope.positive(name, float) for field, name in LLAMA3_SCALING.items()}
        length = "rope_original_max_position_embeddings"
        scaling[length] = rope.positive(LLAMA3_SCALING[length], int)
    return {
        "rotary_base": rope.positive("rope_theta", float),
        "use_rope_scaling": kind == "llama3",
        **scaling,
    }


def _name_of(architecture: Mapping[str, Any]) -> str:
    """The transformers class with the norms and biases of an architecture."""
    for field, value in COMMON.items():
        if field != "hidden_dropout" and architecture[field] != value:
            raise ValueError(
                f"{field} must be {value!r} in a Hugging Face model: {field}={architecture[field]}"
            )
    biases = architecture["add_bias_linear"], architecture["add_qkv_bias"]
    names = {
        (False, False, False): LLAMA,
        (False, True, False): LLAMA,
        (False, False, True): QWEN2,
        (True, False, False): QWEN3,
    }
    name = names.get((architecture["qk_layernorm"], *biases))
    if name is None:
        raise ValueError(
            "no Llama, Qwen2 or Qwen3 has these layers: "
            f"qk_layernorm={architecture['qk_layernorm']}, "
            f"add_bias_linear={biases[0]}, add_qkv_bias={biases[1]}"
        )
    return name
