"""Rotary position embedding by position (Su et al., RoFormer, eq. 34), with Llama 3's scaling.

Positions come from the layout, so the same code serves every split of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """What the rotary embedding of a model is made from.

    Args:
        head_dim: channels of one attention head.
        base: base of the geometric progression of wavelengths.
        percent: share of the channels that rotate, in (0, 1].
        scaling: Llama 3's frequency scaling, or None.
    """

    head_dim: int
    base: float = 10000.0
    percent: float = 1.0
    scaling: Llama3Scaling | None = None

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position.

        Args:
            positions: [rows] int64, the position of each row within its sample.

        Returns:
            Two fp32 tensors [rows, 1, rotary channels], to broadcast over the heads.
        """
        channels = int(self.head_dim * self.percent)
        exponents = torch.arange(0, channels, 2, device=positions.device).float() / channels
        frequencies = 1.0 / self.base**exponents
        if self.scaling is not None:
            frequencies = self.scaling.scale(frequencies)
        angles = torch.outer(positions.float(), frequencies)
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1: long wavelengths are stretched by `factor`.

    Args:
        factor: stretch of the longest wavelengths.
        low_freq_factor: wavelengths above `original / low` are stretched whole.
        high_freq_factor: wavelengths below `original / high` are left alone.
        original_max_position_embeddings: context length of the pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies: Tensor) -> Tensor:
        """Scaled copy of `frequencies` [channels / 2], interpolated between the two bounds."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_position_embeddings / wavelengths
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the leading channels of every head.

    Args:
        x: [rows, heads, head_dim].
        cosines: [rows, 1, rotary channels].
        sines: the same.

    Returns:
        The rotated heads, in the dtype of `x`.
    """
    channels = cosines.shape[-1]
    turning, still = x[..., :channels], x[..., channels:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cosines.to(x.dtype) + torch.cat([-second, first], -1) * sines.to(x.dtype)
    return torch.cat([turned, still], dim=-1)
