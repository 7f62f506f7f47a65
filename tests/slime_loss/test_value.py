import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist
from torch.testing import assert_close

from slime_loss import ConfigError, TokenBatch, ValueHead, ValueLossConfig, value_loss
from tests.slime_loss.recording import recorded_collectives
from tests.slime_loss.reference_policy import Numbers, shown
from tests.slime_loss.references import (
    gradients,
    random_batch,
    trained_rows,
    without_type_checker,
)
from tests.spawn import World

CONFIG = ValueLossConfig(value_clip=0.3)
HIDDEN = 4


def value_loss_by_loop(values: Tensor, batch: TokenBatch, clip: float) -> tuple[Tensor, Numbers]:
    rows = trained_rows(batch)
    loss, clipped_weight = values.sum() * 0, 0.0
    for row in rows:
        value, old, target = values[row], batch.values[row], batch.returns[row]
        error = (value - target) ** 2
        clipped_error = (min(max(value, old - clip), old + clip) - target) ** 2
        clipped_weight += batch.loss_weight[row].item() if clipped_error > error else 0.0
        loss = loss + batch.loss_weight[row] * max(error, clipped_error)
    if not rows:
        return loss, {"loss": 0.0, "value_loss": 0.0, "active_tokens": 0.0}
    weights = [batch.loss_weight[row].item() for row in rows]
    targets = [batch.returns[row].item() for row in rows]
    found = [values[row].item() for row in rows]
    explained = math.nan
    if len(rows) > 1:
        errors = [target - value for target, value in zip(targets, found, strict=True)]
        explained = 1 - statistics.variance(errors) / statistics.variance(targets)
    return loss, {
        "loss": loss.item(),
        "value_loss": loss.item(),
        "value_clipfrac": clipped_weight / sum(weights),
        "values_mean": sum(map(math.prod, zip(weights, found, strict=True))) / sum(weights),
        "returns_mean": sum(map(math.prod, zip(weights, targets, strict=True))) / sum(weights),
        "returns_std": statistics.stdev(targets) if len(rows) > 1 else 0.0,
        "returns_min": min(targets),
        "returns_max": max(targets),
        "explained_variance": explained,
        "active_tokens": float(len(rows)),
    }


@given(
    seed=st.integers(0, 10**6), num_rows=st.integers(0, 12), clip=st.sampled_from([0.1, 1.0, 9.0])
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_loss_gradient_and_metrics_equal_the_loop(seed: int, num_rows: int, clip: float) -> None:
    values, _, batch = random_batch(seed, num_rows)
    output = value_loss(values, batch, ValueLossConfig(value_clip=clip))
    loss, metrics = value_loss_by_loop(values, batch, clip)
    assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    assert_close(gradients(output.loss, values), gradients(loss, values), rtol=1e-12, atol=1e-12)
    found = shown(output)
    assert {name: found[name] for name in metrics} == pytest.approx(
        metrics, rel=1e-12, abs=1e-12, nan_ok=True
    )
    nothing = dict.fromkeys(found.keys() - metrics.keys(), math.nan)
    assert {name: found[name] for name in nothing} == pytest.approx(nothing, nan_ok=True)
    assert output.first_nonfinite_row.item() == -1


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient"),
    [
        (1.5, 3.0, 3.24, 0.0),  # moved towards the target, beyond the clip: no further
        (1.5, 0.0, 2.25, 3.0),  # moved away from it: the whole error pulls back
        (1.1, 3.0, 3.61, -3.8),  # within the clip, where both squares are one
    ],
)
def test_the_clip_takes_the_gradient_where_it_counts(
    value: float, target: float, loss: float, gradient: float
) -> None:
    _, _, batch = random_batch(0, 1)
    ones = torch.ones(1, dtype=torch.float64)
    batch = replace(
        batch, loss_mask=ones.bool(), loss_weight=ones, values=ones, returns=ones * target
    )
    values = (ones * value).requires_grad_()
    output = value_loss(values, batch, ValueLossConfig(value_clip=0.2))
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert gradients(output.loss, values)[0].item() == pytest.approx(gradient, abs=1e-12)
    assert shown(output)["value_clipfrac"] == float(gradient == 0.0)


def test_an_exact_tie_has_the_gradient_of_the_value() -> None:
    _, _, batch = random_batch(0, 1)
    ones = torch.ones(1, dtype=torch.float64)
    # The clipped value is 1.25, the value 1.75: as far from 1.5, and exact in binary.
    batch = replace(batch, loss_mask=ones.bool(), loss_weight=ones, values=ones, returns=1.5 * ones)
    values = (1.75 * ones).requires_grad_()
    output = value_loss(values, batch, ValueLossConfig(value_clip=0.25))
    assert gradients(output.loss, values)[0].item() == 0.5
    assert shown(output)["value_clipfrac"] == 0.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_poison_at_masked_rows_changes_no_bit(poison: float) -> None:
    results = []
    for value in (0.0, poison):
        values, _, batch = random_batch(3, 12)
        mask = batch.loss_mask
        streams = {
            name: torch.where(mask, getattr(batch, name), value)
            for name in ("loss_weight", "values", "returns")
        }
        values = torch.where(mask, values.detach(), value).requires_grad_()
        output = value_loss(values, replace(batch, **streams), CONFIG)
        numbers = [metric.value for metric in output.metrics.values()]
        results.append([output.loss.detach(), *gradients(output.loss, values), *numbers])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(number.isfinite().all() for number in results[0])


def test_a_missing_stream_is_named() -> None:
    values, _, batch = random_batch(0, 4)
    for name in ("values", "returns"):
        with pytest.raises(ValueError, match=f"^{name} is needed by value_loss: {name}=None"):
            value_loss(values, replace(batch, **{name: None}), CONFIG)
    with (
        without_type_checker(),
        pytest.raises(ValueError, match="values must have the shape of labels"),
    ):
        value_loss(values[:2], batch, CONFIG)


@pytest.mark.parametrize("value_clip", [0.0, -1.0, math.inf, math.nan, None])
def test_the_clip_must_be_positive(value_clip: float | None) -> None:
    with without_type_checker(), pytest.raises(ConfigError, match=r"^value_clip must be"):
        ValueLossConfig(value_clip=value_clip)


# The head.


def leaves_of(seed: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((num_rows, HIDDEN), (1, HIDDEN), (1,))
    )
    return hidden, weight, bias, random_batch(seed, num_rows)[2]


@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_head_is_the_loss_of_a_product(num_rows: int, has_bias: bool) -> None:
    hidden, weight, bias, batch = leaves_of(5, num_rows)
    leaves = (hidden, weight, bias) if has_bias else (hidden, weight)
    output = ValueHead(CONFIG)(hidden, weight, batch, bias=bias if has_bias else None)
    values = (hidden * weight).sum(1) + (bias if has_bias else 0.0)
    expected = value_loss(values, batch, CONFIG)
    assert_close(output.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert shown(output) == pytest.approx(shown(expected), rel=1e-12, abs=1e-12, nan_ok=True)
    assert_close(
        gradients(output.loss, *leaves), gradients(expected.loss, *leaves), rtol=1e-12, atol=1e-12
    )
    found = ValueHead(CONFIG).values(hidden, weight, batch, bias=bias if has_bias else None)
    assert_close(found, torch.where(batch.loss_mask, values, 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_rows", [0, 6])
def test_a_rank_without_a_trained_row_stays_connected(num_rows: int) -> None:
    hidden, weight, _, batch = leaves_of(1, num_rows)
    batch = replace(batch, loss_mask=torch.zeros(num_rows, dtype=torch.bool))
    with torch.no_grad():
        hidden.fill_(math.nan)
    output = ValueHead(CONFIG)(hidden, weight, batch)
    of_hidden, of_weight = torch.autograd.grad(output.loss, (hidden, weight))
    assert output.loss.item() == 0.0
    assert torch.equal(of_hidden, torch.zeros_like(of_hidden))
    assert torch.equal(of_weight, torch.zeros_like(of_weight))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_a_masked_row_of_hidden_states_changes_no_bit(poison: float) -> None:
    results = []
    for value in (0.0, poison):
        hidden, weight, _, batch = leaves_of(2, 12)
        with torch.no_grad():
            hidden[~batch.loss_mask] = value
        output = ValueHead(CONFIG)(hidden, weight, batch)
        results.append([output.loss.detach(), *gradients(output.loss, hidden, weight)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_low_precision_is_accumulated_in_float32() -> None:
    hidden, weight, _, batch = leaves_of(4, 12)
    narrow, narrow_weight = (leaf.detach().bfloat16().requires_grad_() for leaf in (hidden, weight))
    values = ValueHead(CONFIG).values(narrow, narrow_weight, batch)
    exact = (narrow.double() * narrow_weight.double()).sum(1)
    assert values.dtype == torch.float32
    assert_close(values.double(), torch.where(batch.loss_mask, exact, 0.0), rtol=1e-6, atol=1e-6)
    output = ValueHead(CONFIG)(narrow, narrow_weight, batch)
    output.loss.backward()
    assert narrow.grad.dtype == narrow_weight.grad.dtype == torch.bfloat16


def test_autocast_leaves_values_in_float32() -> None:
    hidden, weight, _, batch = leaves_of(4, 12)
    hidden, weight = hidden.float(), weight.float()
    expected = ValueHead(CONFIG).values(hidden, weight, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = ValueHead(CONFIG).values(hidden, weight, batch)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, bias, batch = leaves_of(0, 4)
    head = ValueHead(CONFIG)
    with without_type_checker():
        with pytest.raises(ValueError, match="hidden must have one row per label"):
            head(hidden[:2], weight, batch)
        with pytest.raises(ValueError, match=r"weight must be \[1, H\] with the H of hidden"):
            head(hidden, weight[:, :2], batch)
        with pytest.raises(ValueError, match="bias must be one number"):
            head(hidden, weight, batch, bias=bias.expand(2))


def head_on_ranks(rank: int) -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    for seed, num_rows, mask in ((0, 8, None), (1, 8, [True] * 4 + [False] * 4), (2, 0, None)):
        hidden, weight, bias, batch = leaves_of(seed, num_rows)
        if mask is not None:
            batch = replace(batch, loss_mask=torch.tensor(mask))
        expected = ValueHead(CONFIG)(hidden, weight, batch, bias=bias)
        of_hidden, *of_rest = gradients(expected.loss, hidden, weight, bias)
        own = slice(rank * num_rows // size, (rank + 1) * num_rows // size)
        part = hidden[own].detach().clone().requires_grad_()
        with recorded_collectives() as calls:
            sharded = ValueHead(CONFIG, tp_group=group, sequence_parallel=True)
            output = sharded(part, weight, batch, bias=bias)
            of_part, *of_own = torch.autograd.grad(output.loss, (part, weight, bias))
        assert [name for name, _ in calls] == ["all_gather_rows"]
        assert torch.equal(output.loss, expected.loss)
        assert_close(of_part, of_hidden[own], rtol=1e-12, atol=1e-12)
        for found, whole in zip(of_own, of_rest, strict=True):
            dist.all_reduce(found)
            assert_close(found, whole, rtol=1e-12, atol=1e-12)
        with recorded_collectives() as calls:
            same = ValueHead(CONFIG, tp_group=group)(hidden, weight, batch, bias=bias)
            assert_close(gradients(same.loss, hidden), [of_hidden], rtol=1e-12, atol=1e-12)
        assert calls == []


def test_ranks_that_share_the_rows_equal_one(two_ranks: World) -> None:
    two_ranks.run(head_on_ranks)
