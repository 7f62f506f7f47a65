"""Rotary embedding against complex rotation, and Llama 3's scaling against transformers."""

import cmath

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.rl.rotary import Llama3Scaling, Rotary, rotate


def turned_one_by_one(x: list[float], position: int, rotary: Rotary) -> list[float]:
    """Channel i and channel i + half are one complex number that turns by position * frequency."""
    channels = int(rotary.head_dim * rotary.percent)
    half = channels // 2
    out = list(x)
    for i in range(half):
        angle = position / rotary.base ** (2 * i / channels)
        turned = complex(x[i], x[i + half]) * cmath.exp(1j * angle)
        out[i], out[i + half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("base", [10000.0, 100000.0])
def test_rotation_is_a_complex_turn_by_position(percent: float, base: float) -> None:
    rotary = Rotary(8, base, percent)
    positions = torch.tensor([0, 1, 17, 900])
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    got = rotate(x, *rotary.table(positions))
    for row, position in enumerate(positions.tolist()):
        for head in range(3):
            expected = turned_one_by_one(x[row, head].tolist(), position, rotary)
            torch.testing.assert_close(
                got[row, head], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-4
            )


def test_products_depend_on_the_distance_alone() -> None:
    rotary = Rotary(16)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    near = rotate(q, *rotary.table(torch.tensor([5]))) * rotate(k, *rotary.table(torch.tensor([3])))
    far = rotate(q, *rotary.table(torch.tensor([45]))) * rotate(
        k, *rotary.table(torch.tensor([43]))
    )
    torch.testing.assert_close(near.sum(), far.sum(), rtol=0, atol=1e-5)


def test_llama3_scaling_is_that_of_transformers() -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    got = Llama3Scaling(8.0, 1.0, 4.0, 8192).scale(plain)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(got, plain)
