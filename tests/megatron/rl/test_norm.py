from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron.rl.norm import (
    SequenceParallelLayerNorm,
    SequenceParallelNorm,
    SequenceParallelRMSNorm,
)

HIDDEN, EPS = 24, 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, **fields}
    )


def make(normalization: str, dtype: torch.dtype) -> torch.nn.Module:
    """The norm with weights that are not its first ones."""
    norm = SequenceParallelNorm(
        config=config(normalization=normalization, params_dtype=dtype), hidden_size=HIDDEN, eps=EPS
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(HIDDEN, generator=generator).to(dtype))
    return norm


def rows(dtype: torch.dtype) -> Tensor:
    """[5, 3, H], among them a row of zeros, a tiny and a huge one."""
    x = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(2))
    x[0, 0], x[0, 1], x[0, 2] = 0.0, x[0, 1] * 1e-5, x[0, 2] * 1e4
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reference", [LlamaRMSNorm, Qwen3RMSNorm])
def test_rms_norm_has_the_bits_of_hugging_face(
    reference: type[torch.nn.Module], dtype: torch.dtype
) -> None:
    ours = make("RMSNorm", dtype)
    theirs = reference(HIDDEN, eps=EPS).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x, y = rows(dtype), rows(dtype)
    upstream = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    got, expected = ours(x), theirs(y)
    got.backward(upstream)
    expected.backward(upstream)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def reference_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """One row at a time, one element at a time."""
    out = []
    for row in x.reshape(-1, HIDDEN):
        mean_square = sum(element * element for element in row) / HIDDEN
        out += [w * e / (mean_square + EPS) ** 0.5 for w, e in zip(weight, row, strict=True)]
    return torch.stack(out).reshape(x.shape)


def test_rms_norm_is_its_formula_in_value_and_gradient() -> None:
    norm, x = make("RMSNorm", torch.float64), rows(torch.float64)
    weight, y = norm.weight.detach().clone().requires_grad_(), rows(torch.float64)
    upstream = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).double()
    got, expected = norm(x), reference_rms_norm(y, weight)
    got.backward(upstream)
    expected.backward(upstream)
    for one, other in ((got, expected), (x.grad, y.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    norm, x = make("LayerNorm", dtype), rows(dtype)
    expected = F.layer_norm(x, (HIDDEN,), norm.weight, norm.bias, EPS)
    assert torch.equal(norm(x), expected)
    plain = torch.nn.LayerNorm(HIDDEN, eps=EPS).to(dtype)
    assert norm.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_output_has_the_weights_dtype(normalization: str) -> None:
    """A residual kept in fp32 must not reach a bf16 layer."""
    assert make(normalization, torch.bfloat16)(rows(torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("normalization", "kind"),
    [("RMSNorm", SequenceParallelRMSNorm), ("LayerNorm", SequenceParallelLayerNorm)],
)
def test_the_config_names_the_norm_and_marks_its_parameters(
    normalization: str, kind: type[torch.nn.Module], sequence_parallel: bool
) -> None:
    norm = SequenceParallelNorm(
        config(
            normalization=normalization,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        ),
        HIDDEN,
    )
    assert type(norm) is kind
    assert norm.eps == 1e-5
    assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel] * len(
        list(norm.parameters())
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"normalization": "L2Norm"},
        {"layernorm_zero_centered_gamma": True},
        {"persist_layer_norm": True},
        {"memory_efficient_layer_norm": True},
    ],
)
def test_what_is_not_here_is_refused_by_name_and_value(fields: dict[str, Any]) -> None:
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match=f"{name} must be .*: {name}={value}"):
        SequenceParallelNorm(config(**fields), HIDDEN)
