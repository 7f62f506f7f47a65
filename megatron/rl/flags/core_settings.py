"""What megatron-core must be told whatever the flags say, in one place, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional as F

from megatron.rl.core_versions import settings_of_this_core

Settings = Mapping[str, Mapping[str, Any]]
"""Section of `RunConfig` -> field of its dataclass -> value."""


def core_settings(flags: Mapping[str, Any], device_type: str) -> Settings:
    """Values of megatron-core's fields that follow from the flags and the device.

    They are laid over the flags' own values; a field that is always set here is no flag.

    Args:
        flags: every flag's value by name.
        device_type: "cuda" or "cpu".
    """
    dtype = torch.bfloat16 if flags["bf16"] else torch.float32
    if flags["fp64"]:
        dtype = torch.float64
    of_this_core = settings_of_this_core(flags)
    return {
        "transformer": {
            **_loss_and_precision(flags, dtype),
            **_pipeline(flags),
            **_activation(flags),
            **_kernels(flags, device_type),
            **of_this_core["transformer"],
        },
        "optimizer": {"params_dtype": dtype},
        "ddp": {
            # 16-bit sums over replicas and micro-batches lose small gradients; Megatron-LM does so
            "grad_reduce_in_fp32": (
                (flags["grad_reduce_in_fp32"] or flags["bf16"]) and not flags["fp64"]
            ),
            # the step looks at the gradient itself, and skips instead of raising
            "check_for_nan_in_grad": False,
            **of_this_core["ddp"],
        },
    }


def _loss_and_precision(flags: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        # the loss is a plain sum over the step: no division by micro-batches or replicas
        "calculate_per_token_loss": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp8_param": flags["fp8_param_gather"],
        # there is nothing to cut on a single tensor-parallel rank; Megatron-LM drops it too
        "sequence_parallel": flags["sequence_parallel"] and flags["tensor_model_parallel_size"] > 1,
    }


def _pipeline(flags: Mapping[str, Any]) -> dict[str, Any]:
    """How stages exchange activations."""
    interleaved = (flags["virtual_pipeline_model_parallel_size"] or 1) > 1
    return {
        # packed micro-batches differ in length, so stages exchange shapes first
        "variable_seq_lengths": flags["pipeline_model_parallel_size"] > 1,
        # batched exchange mixes up interleaved chunks under gloo and is slower under NCCL
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _activation(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The MLP's non-linearity."""
    function: Callable = F.gelu
    if flags["swiglu"]:
        function = F.silu
    elif flags["squared_relu"]:
        function = squared_relu
    return {"activation_func": function, "gated_linear_unit": flags["swiglu"]}


def _kernels(flags: Mapping[str, Any], device_type: str) -> dict[str, Any]:
    """Fused kernels only where they exist: none on a CPU, none for float64."""
    on_gpu = device_type == "cuda" and not flags["fp64"]
    # core fuses the bias with GELU or SwiGLU, and GELU only where there is a bias
    fusible = flags["swiglu"] or (flags["add_bias_linear"] and not flags["squared_relu"])
    fusible = fusible and not flags["use_te_activation_func"]
    fuses_gradient = find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "transformer_impl": (
            "transformer_engine" if on_gpu and find_spec("transformer_engine") else "local"
        ),
        "use_cpu_initialization": flags["use_cpu_initialization"] or device_type == "cpu",
        "bias_dropout_fusion": flags["bias_dropout_fusion"] and on_gpu,
        "bias_activation_fusion": flags["bias_activation_fusion"] and on_gpu and fusible,
        "gradient_accumulation_fusion": (
            flags["gradient_accumulation_fusion"] and on_gpu and fuses_gradient
        ),
        # rotary embedding and softmax belong to our attention, norms to transformer-engine or us
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # flash-attn, which auto may take on a GPU, does not know float64
        **(
            {"attention_backend": AttnBackend.unfused}
            if flags["fp64"] and device_type == "cuda"
            else {}
        ),
    }
