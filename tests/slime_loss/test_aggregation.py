import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_loss import TokenBatch, loss_weights, sample_weights, sft_loss
from tests.slime_loss import references
from tests.slime_loss.references import without_type_checker

AGGREGATIONS = ["sample_mean", "token_mean"]


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
    ],
)
def test_the_loss_is_a_plain_sum_over_micro_batches_and_ranks(
    aggregation: str, samples: list[list[float]], expected: float
) -> None:
    losses, index = stream_of(samples)
    mask = torch.ones_like(index, dtype=torch.bool)
    weights = loss_weights(mask, index, aggregation=aggregation)
    parts = [index == sample for sample in range(len(samples))]
    total = sum(sft_sum(losses[p], mask[p], index[p], weights[p]) for p in parts)
    assert total == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_tokens_are_in_no_denominator(aggregation: str) -> None:
    mask = torch.tensor([True, True, False, False])
    index = torch.zeros(4, dtype=torch.int64)
    weights = loss_weights(mask, index, aggregation=aggregation)
    assert weights.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert sft_sum(torch.ones(4), mask, index, weights) == 1.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    samples=st.lists(
        st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=5), max_size=6
    ),
    cut=st.integers(0, 30),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_no_order_cut_or_padding_changes_the_loss(
    aggregation: str, samples: list[list[tuple[float, bool]]], cut: int, padding: int, seed: int
) -> None:
    trained = [[loss for loss, is_trained in tokens if is_trained] for tokens in samples]
    losses, index = stream_of([[loss for loss, _ in tokens] for tokens in samples])
    flags, _ = stream_of([[float(is_trained) for _, is_trained in tokens] for tokens in samples])
    losses = torch.cat([losses, losses.new_full((padding,), 1e30)])
    index = torch.cat([index, index.new_full((padding,), -1)])
    mask = torch.cat([flags, flags.new_zeros(padding)]).bool()
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))
    losses, index, mask = losses[order], index[order], mask[order]
    for count_masked in (False, True) if aggregation == "sample_mean" else (False,):
        weights = loss_weights(
            mask, index, aggregation=aggregation, count_masked_samples=count_masked
        )
        total = sum(
            sft_sum(losses[rows], mask[rows], index[rows], weights[rows])
            for rows in (slice(0, cut), slice(cut, None))
        )
        expected = references.aggregate(trained, aggregation, count_masked)
        assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_fully_masked_sample_has_weight_zero_and_does_not_count(aggregation: str) -> None:
    counts = torch.tensor([2, 0, 3])
    weights = sample_weights(counts, aggregation=aggregation)
    assert weights[1].item() == 0.0
    assert (weights * counts).sum().item() == pytest.approx(1.0, abs=1e-15)
    assert sample_weights(counts * 0, aggregation=aggregation).tolist() == [0.0] * 3
    assert sample_weights(counts[:0], aggregation=aggregation).tolist() == []


def test_a_fully_masked_sample_counts_when_asked_to() -> None:
    weights = sample_weights(
        torch.tensor([2, 0, 1]), aggregation="sample_mean", count_masked_samples=True
    )
    assert weights.tolist() == pytest.approx([1 / 6, 0, 1 / 3], abs=1e-15)


def test_wrong_arguments_are_refused() -> None:
    mask, index = torch.tensor([False, True, True]), torch.tensor([-1, 0, -1])
    with pytest.raises(ValueError, match=r"^sample_index must be >= 0 .*: sample_index\[2\]=-1$"):
        loss_weights(mask, index, aggregation="token_mean")
    with pytest.raises(
        ValueError, match=r"^aggregation must be one of sample_mean, token_mean: aggregation='mean'"
    ):
        sample_weights(index, aggregation="mean")
    with (
        without_type_checker(),
        pytest.raises(ValueError, match=r"sample_index.shape=\(2,\), loss_mask.shape=\(3,\)"),
    ):
        loss_weights(mask, index[:2], aggregation="token_mean")
