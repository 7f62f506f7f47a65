import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_loss import TokenBatch, loss_weights, sample_weights, sft_loss
from tests.slime_loss import references
from tests.slime_loss.references import without_type_checker

AGGREGATIONS = ["sample_mean", "rollout_mean", "prompt_mean", "token_mean", "constant"]
COUNT_MASKED = ["sample_mean", "rollout_mean", "constant"]
INDEX_OF = {"rollout_mean": "rollout_index", "prompt_mean": "group_index"}
CONSTANT = 4.0
OPTIONS = {"rollout_index": [7, 7, 3], "group_index": [1, 0, 1], "constant": CONSTANT}
"""What an aggregation may need, for up to three samples; the others do not look at it."""


def options_for(num_samples: int) -> dict[str, Tensor | float]:
    return {
        name: value if isinstance(value, float) else torch.tensor(value)[:num_samples]
        for name, value in OPTIONS.items()
    }


def stream_of(samples: list[list[float]]) -> tuple[Tensor, Tensor]:
    """The token losses of a step's samples end to end, and the sample of each."""
    losses = [loss for tokens in samples for loss in tokens]
    index = [sample for sample, tokens in enumerate(samples) for _ in tokens]
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(index, dtype=torch.int64)


def sft_sum(losses: Tensor, mask: Tensor, index: Tensor, weights: Tensor) -> float:
    """The loss of one micro-batch, by the library, for given token losses."""
    batch = TokenBatch(torch.zeros_like(index), mask, weights, index)
    return sft_loss(-losses, batch).loss.item()


@pytest.mark.parametrize(
    ("aggregation", "samples", "expected"),
    [
        ("token_mean", [[1, 2], [3, 4, 5, 6, 7]], 4.0),
        ("token_mean", [[4], [1, 1, 1]], 1.75),
        ("sample_mean", [[1, 2, 3], [9]], 5.5),
        ("constant", [[1, 2, 3], [9]], 1.875),
        ("rollout_mean", [[1, 2, 3], [10], [8, 12]], 7.0),
        ("prompt_mean", [[1, 2, 3], [10], [7, 12]], 7.5),
    ],
)
def test_the_loss_is_a_plain_sum_over_micro_batches_and_ranks(
    aggregation: str, samples: list[list[float]], expected: float
) -> None:
    losses, index = stream_of(samples)
    mask = torch.ones_like(index, dtype=torch.bool)
    options = options_for(len(samples))
    weights = loss_weights(mask, index, aggregation=aggregation, **options)
    parts = [index == sample for sample in range(len(samples))]
    total = sum(sft_sum(losses[p], mask[p], index[p], weights[p]) for p in parts)
    assert total == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_tokens_are_in_no_denominator(aggregation: str) -> None:
    mask = torch.tensor([True, True, False, False])
    index = torch.zeros(4, dtype=torch.int64)
    weights = loss_weights(mask, index, aggregation=aggregation, **options_for(1))
    weight = 1 / CONSTANT if aggregation == "constant" else 0.5
    assert weights.tolist() == [weight, weight, 0.0, 0.0]
    assert sft_sum(torch.ones(4), mask, index, weights) == 2 * weight


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    samples=st.lists(
        st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=5), max_size=6
    ),
    units=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    cut=st.integers(0, 30),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_no_order_cut_or_padding_changes_the_loss(
    aggregation: str,
    samples: list[list[tuple[float, bool]]],
    units: list[int],
    cut: int,
    padding: int,
    seed: int,
) -> None:
    trained = [[loss for loss, is_trained in tokens if is_trained] for tokens in samples]
    losses, index = stream_of([[loss for loss, _ in tokens] for tokens in samples])
    flags, _ = stream_of([[float(is_trained) for _, is_trained in tokens] for tokens in samples])
    losses = torch.cat([losses, losses.new_full((padding,), 1e30)])
    index = torch.cat([index, index.new_full((padding,), -1)])
    mask = torch.cat([flags, flags.new_zeros(padding)]).bool()
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))
    losses, index, mask = losses[order], index[order], mask[order]
    options: dict[str, object] = {"constant": CONSTANT}
    named = {}
    if aggregation in INDEX_OF:
        options[INDEX_OF[aggregation]] = torch.tensor(units)
        named = {"units": units[: len(samples)]}
    for count_masked in (False, True) if aggregation in COUNT_MASKED else (False,):
        weights = loss_weights(
            mask, index, aggregation=aggregation, count_masked_samples=count_masked, **options
        )
        total = sum(
            sft_sum(losses[rows], mask[rows], index[rows], weights[rows])
            for rows in (slice(0, cut), slice(cut, None))
        )
        expected = references.aggregate(
            trained, aggregation, count_masked, constant=CONSTANT, **named
        )
        assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_fully_masked_sample_has_weight_zero_and_does_not_count(aggregation: str) -> None:
    counts, options = torch.tensor([2, 0, 3]), options_for(3)
    weights = sample_weights(counts, aggregation=aggregation, **options)
    assert weights[1].item() == 0.0
    # Two samples have 5 tokens; every other aggregation is a mean of all of them.
    total = 5 / (2 * CONSTANT) if aggregation == "constant" else 1.0
    assert (weights * counts).sum().item() == pytest.approx(total, abs=1e-15)
    assert sample_weights(counts * 0, aggregation=aggregation, **options).tolist() == [0.0] * 3
    nothing = sample_weights(counts[:0], aggregation=aggregation, **options_for(0))
    assert nothing.tolist() == []


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sample_mean", [1 / 6, 0, 1 / 3]),
        ("constant", [1 / 12, 0, 1 / 12]),
        # Rollout 7 has a trained token, so the masked sample in it adds no rollout.
        ("rollout_mean", [1 / 4, 0, 1 / 2]),
        ("prompt_mean", [1 / 3, 0, 1 / 3]),
        ("token_mean", [1 / 3, 0, 1 / 3]),
    ],
)
def test_a_fully_masked_sample_counts_when_asked_to(
    aggregation: str, expected: list[float]
) -> None:
    weights = sample_weights(
        torch.tensor([2, 0, 1]),
        aggregation=aggregation,
        count_masked_samples=True,
        **options_for(3),
    )
    assert weights.tolist() == pytest.approx(expected, abs=1e-15)


def test_a_fully_masked_rollout_counts_when_asked_to() -> None:
    counts, rollout_index = torch.tensor([2, 0, 0]), torch.tensor([5, 5, 9])
    for count_masked, expected in ((False, 0.5), (True, 0.25)):
        weights = sample_weights(
            counts,
            aggregation="rollout_mean",
            count_masked_samples=count_masked,
            rollout_index=rollout_index,
        )
        assert weights.tolist() == [expected, 0, 0]


@pytest.mark.parametrize("aggregation", ["rollout_mean", "prompt_mean"])
def test_a_unit_cut_over_ranks_has_the_gradient_of_the_whole(aggregation: str) -> None:
    # Samples 0 and 2 are one unit, and lie on different ranks; sample 1 is another, of two tokens.
    index = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, False, True, True, True])
    options = {INDEX_OF[aggregation]: torch.tensor([4, 6, 4])}
    weights = loss_weights(mask, index, aggregation=aggregation, **options)
    log_probs = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    for rank in (slice(0, 3), slice(3, 5), slice(5, 6)):
        batch = TokenBatch(index[rank], mask[rank], weights[rank], index[rank])
        sft_loss(log_probs[rank], batch).loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-1 / 6, -1 / 6, 0, -1 / 4, -1 / 4, -1 / 6])


@pytest.mark.parametrize(("aggregation", "name"), INDEX_OF.items())
def test_a_unit_is_found_by_sample_where_a_sample_has_no_row(aggregation: str, name: str) -> None:
    index, mask = torch.tensor([2, 0, 3]), torch.ones(3, dtype=torch.bool)
    weights = loss_weights(
        mask, index, aggregation=aggregation, **{name: torch.tensor([7, 5, 7, 5])}
    )
    assert weights.tolist() == [0.25, 0.25, 0.5]


def test_each_sample_its_own_unit_is_the_sample_mean() -> None:
    counts, own = torch.tensor([2, 0, 3, 1]), torch.tensor([3, 1, 0, 2])
    expected = sample_weights(counts, aggregation="sample_mean")
    for aggregation, name in INDEX_OF.items():
        weights = sample_weights(counts, aggregation=aggregation, **{name: own})
        assert torch.equal(weights, expected)


@pytest.mark.parametrize(("aggregation", "name"), INDEX_OF.items())
def test_a_missing_index_is_named(aggregation: str, name: str) -> None:
    counts, options = torch.tensor([2, 1]), {"aggregation": aggregation}
    with pytest.raises(ValueError, match=f"^{name} is needed by {aggregation}: {name}=None$"):
        sample_weights(counts, **options)
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=rf"{name}.shape=\(1,\), num_trained_tokens.shape=\(2,\)"),
    ):
        sample_weights(counts, **{name: torch.tensor([0])}, **options)
    mask, index = torch.tensor([True, True]), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=rf"{name}.shape=\(2,\), sample_index.max\(\)=2$"):
        loss_weights(mask, index, **{name: torch.tensor([0, 0])}, **options)


def test_a_wrong_constant_is_named() -> None:
    counts = torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"^constant is needed by .*: constant=None$"):
        sample_weights(counts, aggregation="constant")
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"^constant must be > 0 and finite: constant={bad}$"):
            sample_weights(counts, aggregation="constant", constant=bad)


def test_wrong_arguments_are_refused() -> None:
    mask, index = torch.tensor([False, True, True]), torch.tensor([-1, 0, -1])
    with pytest.raises(ValueError, match=r"^sample_index must be >= 0 .*: sample_index\[2\]=-1$"):
        loss_weights(mask, index, aggregation="token_mean")
    names = ", ".join(AGGREGATIONS)
    with pytest.raises(
        ValueError, match=f"^aggregation must be one of {names}: aggregation='mean'$"
    ):
        sample_weights(index, aggregation="mean")
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=r"sample_index.shape=\(2,\), loss_mask.shape=\(3,\)"),
    ):
        loss_weights(mask, index[:2], aggregation="token_mean")
