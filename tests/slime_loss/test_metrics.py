import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed

from slime_loss import (
    Histogram,
    Metric,
    Metrics,
    Reduction,
    TokenMetrics,
    merge_metrics,
    reduce_metrics,
)
from slime_loss.reductions import (
    ESS,
    EXPLAINED_VARIANCE,
    MAX,
    MEAN,
    MIN,
    STD,
    SUM,
    histogram_over,
)
from tests.slime_loss.recording import recorded_collectives
from tests.slime_loss.references import without_type_checker
from tests.spawn import World

NAN, INF = math.nan, math.inf
EDGES = (-1.0, 0.0, 0.5, 3.0)


def metric(reduction: Reduction, *numbers: float) -> Metric:
    return Metric(torch.tensor(numbers).double(), reduction)


def all_kinds(stream: Tensor, mask: Tensor, weight: Tensor) -> Metrics:
    tokens = TokenMetrics(mask, weight)
    return {
        "mean": tokens.mean(stream),
        "share": tokens.mean(stream > 0),
        "min": tokens.min(stream),
        "max": tokens.max(stream),
        "std": tokens.std(stream),
        "ess": tokens.effective_sample_size(stream.abs()),
        "explained": tokens.explained_variance(weight, stream),
        "histogram": tokens.histogram(stream, EDGES),
        "sum": tokens.weighted_sum(stream),
        "count": tokens.count(),
    }


def scalars_by_loop(trained: list[tuple[float, float]]) -> dict[str, float]:
    values = [value for value, _ in trained]
    total = sum(weight for _, weight in trained)
    weighted_sum = sum(value * weight for value, weight in trained)
    positive = sum(weight for value, weight in trained if value > 0)
    squares = sum(value**2 for value in values)
    ess = sum(map(abs, values)) ** 2 / (len(values) * squares) if squares else 0.0
    return {
        "mean": weighted_sum / total if trained else NAN,
        "share": positive / total if trained else NAN,
        "min": min(values, default=NAN),
        "max": max(values, default=NAN),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0 if values else NAN,
        "ess": ess if values else NAN,
        "explained": explained_by_loop(trained),
        "sum": weighted_sum,
        "count": float(len(values)),
    }


def explained_by_loop(trained: list[tuple[float, float]]) -> float:
    values = [value for value, _ in trained]
    if len(values) < 2 or statistics.variance(values) == 0:
        return NAN
    errors = [value - predicted for value, predicted in trained]
    return 1 - statistics.variance(errors) / statistics.variance(values)


def histogram_by_loop(values: list[float]) -> Histogram:
    bounds = [-INF, *EDGES, INF]
    counts = [
        float(sum(bounds[i] < value <= bounds[i + 1] for value in values))
        for i in range(len(EDGES) + 1)
    ]
    total, squares = math.fsum(values), math.fsum(value**2 for value in values)
    smallest, largest = min(values, default=NAN), max(values, default=NAN)
    return Histogram(EDGES, tuple(counts), smallest, largest, total, squares)


def test_a_mean_is_sum_over_count() -> None:
    parts = [{"m": metric(MEAN, 3, 3)}, {"m": metric(MEAN, 5, 1)}]
    assert reduce_metrics(merge_metrics(parts)).scalars == {"m": 2.0}


def test_a_maximum_is_never_averaged() -> None:
    parts = [{"m": metric(MAX, 3, 1)}, {"m": metric(MAX, 9, 1)}]
    assert reduce_metrics(merge_metrics(parts)).scalars == {"m": 9.0}


def test_a_standard_deviation_keeps_its_accuracy_far_from_zero() -> None:
    values = [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 5]
    ones = torch.ones(2)
    parts = [
        {"std": TokenMetrics(ones.bool(), ones).std(torch.tensor(pair, dtype=torch.float64))}
        for pair in (values[:2], values[2:])
    ]
    found = reduce_metrics(merge_metrics(parts)).scalars["std"]
    assert found == pytest.approx(statistics.stdev([0, 1, 2, 5]), rel=1e-12)


@given(
    rows=st.lists(st.tuples(st.floats(-9, 9), st.booleans(), st.floats(0.01, 1.0)), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_micro_batches_of_any_size_give_the_metrics_of_the_whole(
    rows: list[tuple[float, bool, float]], cuts: list[int]
) -> None:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    stream, mask, weight = table[:, 0], table[:, 1].bool(), table[:, 2]
    starts = [0, *sorted(cuts)]
    parts = [
        all_kinds(stream[i:j], mask[i:j], weight[i:j])
        for i, j in zip(starts, [*starts[1:], len(rows)], strict=True)
    ]
    trained = [(value, weight) for value, train, weight in rows if train]
    reduced = reduce_metrics(merge_metrics(parts))
    expected, deviations = scalars_by_loop(trained), {"std", "explained"}
    for name, value in reduced.scalars.items():
        # Of entries that differ by their last bits alone, deviations are rounding.
        slack = 1e-7 if name in deviations else 1e-12
        assert value == pytest.approx(expected[name], rel=slack, abs=slack, nan_ok=True), name
    assert list(reduced.histograms) == ["histogram"]
    found, by_loop = reduced.histograms["histogram"], histogram_by_loop([v for v, _ in trained])
    assert (found.edges, found.counts) == (by_loop.edges, by_loop.counts)
    assert found.num_entries == len(trained)
    for field in ("minimum", "maximum", "total", "sum_of_squares"):
        number = getattr(by_loop, field)
        assert getattr(found, field) == pytest.approx(number, rel=1e-12, abs=1e-12, nan_ok=True)


def test_the_last_bucket_of_a_histogram_ends_at_the_largest_entry() -> None:
    histogram = histogram_by_loop([-2.0, 1.0, 7.0])
    assert histogram.bucket_limits == (*EDGES, 7.0)
    assert histogram_by_loop([1.0]).bucket_limits == (*EDGES, 3.0)
    assert histogram_by_loop([]).bucket_limits == (*EDGES, 3.0)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_masked_entries_are_never_read(poison: float) -> None:
    mask = torch.tensor([True, False, True])
    stream, weight = torch.tensor([1.0, poison, -2.0]), torch.tensor([0.5, poison, 0.5])
    clean = all_kinds(stream[mask], mask[mask], weight[mask])
    dirty = all_kinds(stream, mask, weight)
    for name, one in dirty.items():
        assert torch.equal(one.value, clean[name].value), name
    assert reduce_metrics(dirty).scalars["mean"] == -0.5


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_shows_in_every_metric_of_its_stream(place: int) -> None:
    stream = torch.tensor([1.0, 2.0, 3.0])
    stream[place] = NAN
    ones = torch.ones(1)
    parts = [all_kinds(one.reshape(1), ones.bool(), ones) for one in stream]
    reduced = reduce_metrics(merge_metrics(parts))
    for name in ("mean", "min", "max", "std", "ess", "explained", "sum"):
        assert math.isnan(reduced.scalars[name]), name
    histogram = reduced.histograms["histogram"]
    assert histogram.num_entries == 3
    assert math.isnan(histogram.minimum)
    assert math.isnan(histogram.maximum)
    assert math.isnan(histogram.total)


def test_no_token_at_all_gives_no_number() -> None:
    reduced = reduce_metrics(all_kinds(torch.ones(2), torch.zeros(2).bool(), torch.ones(2)))
    sums = {"sum": 0.0, "count": 0.0}
    nothing = dict.fromkeys(reduced.scalars, NAN) | sums
    assert reduced.scalars == pytest.approx(nothing, nan_ok=True)
    assert math.isnan(reduced.histograms["histogram"].minimum)
    assert reduce_metrics({}).scalars == reduce_metrics({}).histograms == merge_metrics([]) == {}


def test_metrics_carry_no_gradient_and_are_float64() -> None:
    stream = torch.ones(2, requires_grad=True)
    for one in all_kinds(stream, torch.ones(2).bool(), torch.ones(2)).values():
        assert (one.value.requires_grad, one.value.dtype) == (False, torch.float64)


def test_parts_must_agree_on_names_and_reductions() -> None:
    mean, wide = metric(MEAN, 1, 1), histogram_over((0.0, 1.0))
    buckets = metric(wide, *range(7))
    for one, other in (
        ({"a": mean}, {"b": mean}),
        ({"a": mean}, {"a": replace(mean, reduction=MIN)}),
        ({"a": mean}, {"a": mean, "b": mean}),
        ({"a": buckets}, {"a": replace(buckets, reduction=histogram_over((0.0, 2.0)))}),
    ):
        with pytest.raises(ValueError, match=r"^parts must have the same metrics: parts\[1\]="):
            merge_metrics([one, other])
    assert merge_metrics([{"a": buckets}] * 2)["a"].reduction == histogram_over((0.0, 1.0))


def test_a_metric_has_the_vector_of_its_reduction() -> None:
    for value in (torch.ones(3).double(), torch.ones(2)):
        with without_type_checker(), pytest.raises(ValueError, match=r"^value must be \[2\] float"):
            Metric(value, MEAN)


RANKS: list[Metrics] = [
    {
        "mean": metric(MEAN, 3, 3),
        "max": metric(MAX, 3, 1),
        "min": metric(MIN, -INF, 4),
        "nan_first_max": metric(MAX, NAN, 1),
        "nan_last_max": metric(MAX, 7, 1),
        "nan_first_min": metric(MIN, NAN, 1),
        "nan_last_min": metric(MIN, 7, 1),
        "nan_mean": metric(MEAN, NAN, 1),
        "idle_max": metric(MAX, -INF, 0),
        "idle_min": metric(MIN, INF, 0),
        "nobody": metric(MAX, -INF, 0),
        "sum": metric(SUM, 1),
        "std": metric(STD, 2, 1, 2),
        "ess": metric(ESS, 2, 3, 5),
        "explained": metric(EXPLAINED_VARIANCE, 2, 1, 2, 0, 0.5),
        "buckets": metric(histogram_over((0.5,)), 0, 1, 1, 1, 1, 1),
    },
    {
        "mean": metric(MEAN, 5, 1),
        "max": metric(MAX, 9, 1),
        "min": metric(MIN, 2, 1),
        "nan_first_max": metric(MAX, 7, 1),
        "nan_last_max": metric(MAX, NAN, 1),
        "nan_first_min": metric(MIN, 7, 1),
        "nan_last_min": metric(MIN, NAN, 1),
        "nan_mean": metric(MEAN, 0, 0),
        "idle_max": metric(MAX, -4, 1),
        "idle_min": metric(MIN, 4, 1),
        "nobody": metric(MAX, -INF, 0),
        "sum": metric(SUM, 2),
        "std": metric(STD, 1, 5, 0),
        "ess": metric(ESS, 1, 0, 0),
        "explained": metric(EXPLAINED_VARIANCE, 1, 5, 0, 3, 0),
        "buckets": metric(histogram_over((0.5,)), 3, 3, 3, 9, 0, 1),
    },
]
REDUCED = {
    "mean": 2.0,
    "max": 9.0,
    "min": -INF,
    "nan_first_max": NAN,
    "nan_last_max": NAN,
    "nan_first_min": NAN,
    "nan_last_min": NAN,
    "nan_mean": NAN,
    "idle_max": -4.0,
    "idle_min": 4.0,
    "nobody": NAN,
    "sum": 3.0,
    # Of 0, 2 and 5; of weights 1, 2 and 0; of errors -0.5, 0.5 and 3.
    "std": statistics.stdev([0, 2, 5]),
    "ess": 9 / 15,
    "explained": 1 - statistics.variance([-0.5, 0.5, 3]) / statistics.variance([0, 2, 5]),
}
BUCKETS = Histogram((0.5,), (1.0, 2.0), 0.0, 3.0, 4.0, 10.0)


def reduce_on_a_rank(rank: int) -> None:
    both, alone = distributed.group.WORLD, [distributed.new_group([one]) for one in (0, 1)]
    # The order in which a rank happens to name its metrics must not matter.
    names = sorted(RANKS[rank], reverse=rank == 1)
    metrics = {name: RANKS[rank][name] for name in names}
    for group in (both, [alone[rank], both]):
        with recorded_collectives() as calls:
            reduced = reduce_metrics(metrics, group)
        assert [name for name, _ in calls] == ["all_gather_rows"] * (1 if group is both else 2)
        assert [name for name in names if name != "buckets"] == list(reduced.scalars)
        assert reduced.scalars == pytest.approx(REDUCED, rel=1e-15, abs=0, nan_ok=True)
        assert reduced.histograms == {"buckets": BUCKETS}
        # Merged as micro-batches are, to the bit.
        merged = reduce_metrics(merge_metrics(RANKS))
        for name, value in merged.scalars.items():
            assert reduced.scalars[name] == pytest.approx(value, rel=0, abs=0, nan_ok=True), name
    lonely = reduce_metrics(metrics, alone[rank]).scalars
    assert lonely == pytest.approx(reduce_metrics(metrics).scalars, rel=0, abs=0, nan_ok=True)


def test_ranks_are_reduced_by_the_declared_reduction(two_ranks: World) -> None:
    two_ranks.run(reduce_on_a_rank)
