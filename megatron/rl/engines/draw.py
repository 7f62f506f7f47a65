"""Drawing the next token: temperature, top-k, then top-p, and the log-prob of what was drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.rl.engines.engine import Sampling


@dataclass(frozen=True)
class Drawn:
    """One token of each sequence.

    Args:
        tokens: int64 [sequences].
        log_probs: of each token among those that could be drawn, nats, fp32 [sequences].
        kept: what could be drawn, ids [sequences, V] likeliest first and how many of them count
            [sequences]; None where everything could.
    """

    tokens: Tensor
    log_probs: Tensor
    kept: tuple[Tensor, Tensor] | None

    def kept_of(self, row: int) -> np.ndarray | None:
        """The ids that one token could have been, int64."""
        if self.kept is None:
            return None
        ids, counts = self.kept
        return ids[row, : counts[row]].cpu().numpy()


def uniforms(seed: tuple[int, ...], count: int) -> np.ndarray:
    """`count` float64 in [0, 1) that depend on the seed alone; a shorter run of them is the same.

    Raw 64-bit draws: numpy keeps a bit generator's stream for good.
    """
    raw = np.random.PCG64(list(seed)).random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Drawn:
    """Draw a token of each row by inverting the cumulative distribution at `uniform`.

    Top-k comes first; top-p keeps the fewest of what is left that hold its share of it (Holtzman
    et al., The Curious Case of Neural Text Degeneration, section 3.1). Equal logits are kept by
    ascending id.

    Args:
        logits: [sequences, V] floating, V the true vocabulary.
        uniform: float64 [sequences], in [0, 1).
        sampling: how.

    Returns:
        The tokens with their log-probs; at temperature 0 the likeliest, at those of temperature 1.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    if sampling.keeps_all:
        tokens = _invert(scaled.double().softmax(-1), uniform)
        if sampling.temperature == 0:
            tokens = scaled.argmax(-1)
        return Drawn(tokens, _log_probs(scaled, tokens), None)
    scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
    counts = _num_kept(scaled, sampling)
    beyond = torch.arange(scaled.shape[1], device=scaled.device) >= counts[:, None]
    scaled = scaled.masked_fill(beyond, -torch.inf)
    places = _invert(scaled.double().softmax(-1), uniform)
    if sampling.temperature == 0:
        places = torch.zeros_like(places)
    tokens = ids.gather(1, places[:, None])[:, 0]
    return Drawn(tokens, _log_probs(scaled, places), (ids, counts))


def _num_kept(scaled: Tensor, sampling: Sampling) -> Tensor:
    """How many of the logits, likeliest first, can be drawn: int64 [sequences], at least 1."""
    num_columns = scaled.shape[1]
    limit = min(sampling.top_k or num_columns, num_columns)
    probs = scaled[:, :limit].double().softmax(-1)
    before = probs.cumsum(-1) - probs
    return (before < sampling.top_p).sum(-1).clamp(min=1)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first column whose cumulative probability exceeds `uniform` of the total."""
    sums = probs.cumsum(-1)
    wanted = uniform[:, None] * sums[:, -1:]
    columns = torch.searchsorted(sums, wanted, right=True)[:, 0]
    # uniform * total may round up to the total: the last column that holds something
    last = (sums < sums[:, -1:]).sum(-1)
    return torch.minimum(columns, last)


def _log_probs(scaled: Tensor, columns: Tensor) -> Tensor:
    return scaled.log_softmax(-1).gather(1, columns[:, None])[:, 0]
