"""A token is drawn as the flags say, and its log-prob is that of the draw."""

import math

import numpy as np
import pytest
import torch

from megatron.rl.engines.draw import draw, uniforms
from megatron.rl.engines.engine import Sampling

VOCABULARY = 11
SAMPLINGS = [
    Sampling(1),
    Sampling(1, temperature=0.7),
    Sampling(1, top_k=3),
    Sampling(1, top_p=0.9),
    Sampling(1, temperature=1.7, top_p=0.5),
    Sampling(1, temperature=0.7, top_k=4, top_p=0.8),
    Sampling(1, top_k=1),
    Sampling(1, top_k=100),
    Sampling(1, top_p=1e-9),
]


def reference(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The probability of each token that can be drawn, likeliest first."""
    scaled = [logit / sampling.temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = order[: sampling.top_k or len(order)]
    total = sum(math.exp(scaled[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < sampling.top_p:
            kept.append(token)
        mass += math.exp(scaled[token]) / total
    total = sum(math.exp(scaled[token]) for token in kept)
    return {token: math.exp(scaled[token]) / total for token in kept}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_drawn_as_often_as_their_probability_says(sampling: Sampling) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    expected = reference(logits.tolist(), sampling)
    # an even grid in place of random numbers: counts are right to one draw
    num_draws = 4000
    grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    drawn = draw(logits.expand(num_draws, -1), grid, sampling)
    counts = drawn.tokens.bincount(minlength=VOCABULARY)
    for token in range(VOCABULARY):
        assert abs(int(counts[token]) - num_draws * expected.get(token, 0.0)) <= 1.01, token
    wanted = [math.log(expected[token]) for token in drawn.tokens.tolist()]
    torch.testing.assert_close(drawn.log_probs, torch.tensor(wanted), rtol=0, atol=2e-6)
    if sampling.keeps_all:
        assert drawn.kept_of(0) is None
    else:
        assert drawn.kept_of(0).tolist() == list(expected)


def test_temperature_zero_takes_the_likeliest_at_its_own_log_prob() -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0]])
    expected = float(logits.log_softmax(-1)[0, 1])
    drawn = draw(logits, torch.tensor([0.99], dtype=torch.float64), Sampling(1, temperature=0))
    assert (drawn.tokens.item(), drawn.log_probs.item()) == (1, pytest.approx(expected))
    of_two = draw(logits, torch.tensor([0.99]).double(), Sampling(1, temperature=0, top_k=2))
    assert (of_two.tokens.item(), of_two.log_probs.item()) == (1, pytest.approx(-math.log(2)))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("top_k", [0, 3])
def test_what_has_no_probability_is_never_drawn(uniform: float, top_k: int) -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -math.inf]])
    drawn = draw(logits, torch.tensor([uniform]).double(), Sampling(1, top_k=top_k))
    assert drawn.tokens.item() in (1, 3)
    assert drawn.log_probs.item() == pytest.approx(-math.log(2))


def test_draws_depend_on_the_seed_alone_and_begin_alike() -> None:
    assert np.array_equal(uniforms((1, 2, 3), 5), uniforms((1, 2, 3), 9)[:5])
    assert not np.array_equal(uniforms((1, 2, 3), 5), uniforms((1, 2, 4), 5))
    many = uniforms((7,), 20000)
    assert many.min() >= 0
    assert many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_response_length", 0),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("temperature", math.nan),
    ],
)
def test_what_cannot_be_drawn_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*: {field}={value}"):
        Sampling(**{"max_response_length": 1, field: value})
