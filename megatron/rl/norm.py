"""The norms of core's local layers, in plain torch and fit for sequence parallelism.

Core's own local norm refuses sequence parallelism. It needs nothing but a mark on the
parameters: each tensor parallel rank sees a slice of the sequence, so core must sum their
gradients over the group. RMSNorm: Zhang & Sennrich 2019, arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class SequenceParallelRMSNorm(nn.Module):
    """RMSNorm rounded as Hugging Face's Llama and Qwen round it.

    The input is normalised in fp32 (fp64 stays fp64), cast to the dtype of the weight, and only
    then scaled.

    Args:
        config: `sequence_parallel` marks the weight; `params_dtype` is its dtype.
        hidden_size: Width of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        _mark(self.weight, config)

    def forward(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Normalise each row over its last dimension; communicates over no group."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(self.weight.dtype)


class SequenceParallelLayerNorm(nn.Module):
    """LayerNorm, with a bias.

    Args:
        config: `sequence_parallel` marks weight and bias; `params_dtype` is their dtype.
        hidden_size: Width of the last dimension.
        eps: Added to the variance.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        _mark(self.weight, config)
        _mark(self.bias, config)

    def forward(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Normalise each row over its last dimension; communicates over no group."""
        x = x.to(self.weight.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class SequenceParallelNorm:
    """The norm that `config.normalization` names; stands wherever a spec names a norm class.

    Args:
        config: `normalization` is RMSNorm or LayerNorm.
        hidden_size: Width of the last dimension.
        eps: Added to the mean square or the variance.

    Raises:
        ValueError: `config` asks for a norm, or for a variant of one, that is not here.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:
        """Make the norm; a spec calls a class, so this is one."""
        norms = {"RMSNorm": SequenceParallelRMSNorm, "LayerNorm": SequenceParallelLayerNorm}
        if config.normalization not in norms:
            raise ValueError(
                f"normalization must be one of {', '.join(norms)} with the local layer spec: "
                f"normalization={config.normalization}"
            )
        for variant in (
            "layernorm_zero_centered_gamma",
            "memory_efficient_layer_norm",
            "persist_layer_norm",
        ):
            if getattr(config, variant):
                raise ValueError(f"{variant} must be off with the local layer spec: {variant}=True")
        return norms[config.normalization](config, hidden_size, eps)


def _mark(parameter: nn.Parameter, config: TransformerConfig) -> None:
    """Tell core whether to sum this parameter's gradient over the tensor parallel group."""
    parameter.sequence_parallel = config.sequence_parallel
