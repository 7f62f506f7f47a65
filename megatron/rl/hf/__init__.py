"""Hugging Face directories in and out: the architecture, and the weights of a live model."""

from megatron.rl.hf.architectures import (
    architecture_from_hf,
    architecture_of,
    config_from_architecture,
)
from megatron.rl.hf.export import export_hf_weights, export_new_hf_weights
from megatron.rl.hf.load import load_hf_weights

__all__ = [
    "architecture_from_hf",
    "architecture_of",
    "config_from_architecture",
    "export_hf_weights",
    "export_new_hf_weights",
    "load_hf_weights",
]
