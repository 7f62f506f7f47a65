import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed

from slime_loss import Metric, Metrics, Reduction, TokenMetrics, merge_metrics, reduce_metrics
from tests.spawn import World

NAN, INF = math.nan, math.inf
MEAN, SUM, MIN, MAX = Reduction.MEAN, Reduction.SUM, Reduction.MIN, Reduction.MAX


def metric(value: float, count: float, reduction: Reduction) -> Metric:
    return Metric(torch.tensor(value).double(), torch.tensor(count).double(), reduction)


def all_kinds(stream: Tensor, mask: Tensor, weight: Tensor) -> Metrics:
    tokens = TokenMetrics(mask, weight)
    return {
        "mean": tokens.mean(stream),
        "share": tokens.mean(stream > 0),
        "min": tokens.min(stream),
        "max": tokens.max(stream),
        "sum": tokens.weighted_sum(stream),
        "count": tokens.count(),
    }


def all_kinds_by_loop(trained: list[tuple[float, float]]) -> dict[str, float]:
    values = [value for value, _ in trained]
    total = sum(weight for _, weight in trained)
    weighted_sum = sum(value * weight for value, weight in trained)
    positive = sum(weight for value, weight in trained if value > 0)
    return {
        "mean": weighted_sum / total if trained else NAN,
        "share": positive / total if trained else NAN,
        "min": min(values, default=NAN),
        "max": max(values, default=NAN),
        "sum": weighted_sum,
        "count": float(len(values)),
    }


def test_a_mean_is_sum_over_count() -> None:
    parts = [{"m": metric(3, 3, MEAN)}, {"m": metric(5, 1, MEAN)}]
    assert reduce_metrics(merge_metrics(parts)) == {"m": 2.0}


def test_a_maximum_is_never_averaged() -> None:
    parts = [{"m": metric(3, 1, MAX)}, {"m": metric(9, 1, MAX)}]
    assert reduce_metrics(merge_metrics(parts)) == {"m": 9.0}


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
    expected = all_kinds_by_loop([(value, weight) for value, train, weight in rows if train])
    reduced = reduce_metrics(merge_metrics(parts))
    assert reduced == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_masked_entries_are_never_read(poison: float) -> None:
    mask = torch.tensor([True, False, True])
    stream, weight = torch.tensor([1.0, poison, -2.0]), torch.tensor([0.5, poison, 0.5])
    assert reduce_metrics(all_kinds(stream, mask, weight)) == {
        "mean": -0.5,
        "share": 0.5,
        "min": -2.0,
        "max": 1.0,
        "sum": -0.5,
        "count": 2.0,
    }


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_shows_in_every_metric_of_its_stream(place: int) -> None:
    stream = torch.tensor([1.0, 2.0, 3.0])
    stream[place] = NAN
    ones = torch.ones(1)
    parts = [all_kinds(one.reshape(1), ones.bool(), ones) for one in stream]
    reduced = reduce_metrics(merge_metrics(parts))
    for name in ("mean", "min", "max", "sum"):
        assert math.isnan(reduced[name]), name


def test_no_token_at_all_gives_no_number() -> None:
    reduced = reduce_metrics(all_kinds(torch.ones(2), torch.zeros(2).bool(), torch.ones(2)))
    assert all(math.isnan(reduced[name]) for name in ("mean", "share", "min", "max"))
    assert (reduced["sum"], reduced["count"]) == (0.0, 0.0)
    assert reduce_metrics({}) == merge_metrics([]) == {}


def test_metrics_carry_no_gradient_and_are_float64() -> None:
    stream = torch.ones(2, requires_grad=True)
    for one in all_kinds(stream, torch.ones(2).bool(), torch.ones(2)).values():
        assert (one.value.requires_grad, one.value.dtype) == (False, torch.float64)


def test_parts_must_agree_on_names_and_reductions() -> None:
    mean = metric(1, 1, MEAN)
    for other in ({"b": mean}, {"a": replace(mean, reduction=SUM)}, {"a": mean, "b": mean}):
        with pytest.raises(ValueError, match=r"^parts must have the same metrics: parts\[1\]="):
            merge_metrics([{"a": mean}, other])


RANKS: list[Metrics] = [
    {
        "mean": metric(3, 3, MEAN),
        "max": metric(3, 1, MAX),
        "min": metric(-INF, 4, MIN),
        "nan_first_max": metric(NAN, 1, MAX),
        "nan_last_max": metric(7, 1, MAX),
        "nan_first_min": metric(NAN, 1, MIN),
        "nan_last_min": metric(7, 1, MIN),
        "nan_mean": metric(NAN, 1, MEAN),
        "idle_max": metric(-INF, 0, MAX),
        "idle_min": metric(INF, 0, MIN),
        "nobody": metric(-INF, 0, MAX),
        "sum": metric(1, 2, SUM),
    },
    {
        "mean": metric(5, 1, MEAN),
        "max": metric(9, 1, MAX),
        "min": metric(2, 1, MIN),
        "nan_first_max": metric(7, 1, MAX),
        "nan_last_max": metric(NAN, 1, MAX),
        "nan_first_min": metric(7, 1, MIN),
        "nan_last_min": metric(NAN, 1, MIN),
        "nan_mean": metric(0, 0, MEAN),
        "idle_max": metric(-4, 1, MAX),
        "idle_min": metric(4, 1, MIN),
        "nobody": metric(-INF, 0, MAX),
        "sum": metric(2, 2, SUM),
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
}


def reduce_on_a_rank(rank: int) -> None:
    both, alone = distributed.group.WORLD, [distributed.new_group([one]) for one in (0, 1)]
    # The order in which a rank happens to name its metrics must not matter.
    names = sorted(RANKS[rank], reverse=rank == 1)
    metrics = {name: RANKS[rank][name] for name in names}
    for group in (both, [alone[rank], both]):
        reduced = reduce_metrics(metrics, group)
        assert list(reduced) == names
        assert reduced == pytest.approx(REDUCED, rel=0, abs=0, nan_ok=True)
    lonely = reduce_metrics(metrics, alone[rank])
    assert lonely == pytest.approx(reduce_metrics(metrics), rel=0, abs=0, nan_ok=True)


def test_ranks_are_reduced_by_the_declared_reduction(two_ranks: World) -> None:
    two_ranks.run(reduce_on_a_rank)
