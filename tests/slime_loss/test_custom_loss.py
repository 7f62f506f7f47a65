import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from slime_loss import PolicyLossConfig, TokenBatch, load_function, make_objective, policy_loss
from tests.slime_loss import user_functions
from tests.slime_loss.places import Place, Topology
from tests.slime_loss.reference_policy import shown
from tests.slime_loss.references import gradients, random_batch, trained_rows
from tests.slime_loss.simulated_ranks import check_same_collectives, simulate

HERE = "tests.slime_loss.user_functions"
RATIO = PolicyLossConfig(
    loss_type="custom_loss", custom_loss_function_path=f"{HERE}:ratio_loss", entropy_coef=0.1
)
TIS = PolicyLossConfig(use_tis=True, custom_tis_function_path=f"{HERE}:bounded_correction")


def run(
    config: PolicyLossConfig, log_probs: Tensor, entropy: Tensor | None, batch: TokenBatch
) -> Any:
    return make_objective(config).function(log_probs, entropy, batch)


@pytest.mark.parametrize("num_rows", [0, 1, 12])
def test_a_custom_loss_is_masked_and_weighted(num_rows: int) -> None:
    log_probs, entropy, batch = random_batch(1, num_rows)
    output = run(RATIO, log_probs, entropy, batch)
    loss, odds, is_up = log_probs.sum() * 0, 0.0, 0.0
    rows = trained_rows(batch)
    for row in rows:
        ratio = (log_probs[row] - batch.old_log_probs[row]).exp()
        token = -batch.advantages[row] * ratio - 0.1 * entropy[row]
        loss = loss + batch.loss_weight[row] * token
        odds += ratio.item()
        is_up += batch.loss_weight[row].item() * float(ratio > 1)
    assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    leaves = log_probs, entropy
    assert_close(gradients(output.loss, *leaves), gradients(loss, *leaves), rtol=1e-12, atol=1e-12)
    total = sum(batch.loss_weight[row].item() for row in rows)
    assert shown(output) == pytest.approx(
        {
            "loss": loss.item(),
            "odds": odds / total if rows else math.nan,
            "is_up": is_up / total if rows else math.nan,
            "active_tokens": float(len(rows)),
        },
        rel=1e-12,
        abs=1e-12,
        nan_ok=True,
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_poison_at_masked_rows_changes_no_bit(poison: float) -> None:
    results = []
    for value, label in ((0.0, 0), (poison, 2**40)):
        log_probs, entropy, batch = random_batch(2, 12)
        mask = batch.loss_mask
        streams = {
            name: torch.where(mask, stream, value)
            for name, stream in vars(batch).items()
            if isinstance(stream, Tensor) and stream.is_floating_point()
        }
        batch = replace(batch, labels=torch.where(mask, batch.labels, label), **streams)
        leaves = [
            torch.where(mask, leaf.detach(), value).requires_grad_()
            for leaf in (log_probs, entropy)
        ]
        outputs = [run(RATIO, *leaves, batch), run(TIS, *leaves, batch)]
        for output in outputs:
            results.append(
                [output.loss.detach(), *gradients(output.loss, *leaves)]
                + [metric.value for metric in output.metrics.values()]
            )
    for clean, dirty in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
        assert all(number.isfinite().all() for number in clean[:3])


def test_a_custom_correction_weighs_and_rejects() -> None:
    log_probs, entropy, batch = random_batch(3, 40)
    ratio = (batch.old_log_probs - batch.rollout_log_probs).exp()
    accepted = batch.loss_mask & (ratio <= 1.5)
    assert 0 < accepted.sum() < batch.loss_mask.sum()
    output = run(TIS, log_probs, entropy, batch)
    kept = replace(batch, loss_mask=accepted, loss_weight=batch.loss_weight * ratio.clamp(max=1.1))
    expected = policy_loss(log_probs, entropy, kept, PolicyLossConfig())
    assert_close(output.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert_close(
        gradients(output.loss, log_probs),
        gradients(expected.loss, log_probs),
        rtol=1e-12,
        atol=1e-12,
    )
    weight = torch.where(batch.loss_mask, batch.loss_weight, 0.0)
    found = shown(output)
    rejected = weight[~accepted].sum() / weight.sum()
    assert found["rs_rejected_frac"] == pytest.approx(rejected.item(), abs=1e-12)
    assert found["tis_max"] == pytest.approx(min(ratio[accepted].max().item(), 1.1))
    assert found["active_tokens"] == accepted.sum()
    assert "tis_clipfrac" not in found


def test_a_rejected_token_leaves_the_mean_of_its_sample() -> None:
    log_probs, entropy, batch = random_batch(3, 40)
    ratio = (batch.old_log_probs - batch.rollout_log_probs).exp()
    accepted = batch.loss_mask & (ratio <= 1.5)
    gspo = PolicyLossConfig(policy_objective="gspo", eps_clip=0.9)
    output = run(replace(TIS, policy_objective="gspo", eps_clip=0.9), log_probs, entropy, batch)
    counts = torch.zeros_like(batch.num_trained_tokens)
    counts.index_add_(0, batch.sample_index, accepted.long())
    kept = replace(
        batch,
        loss_mask=accepted,
        loss_weight=batch.loss_weight * ratio.clamp(max=1.1),
        num_trained_tokens=counts,
    )
    expected = run(gspo, log_probs, entropy, kept)
    assert_close(output.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert_close(
        gradients(output.loss, log_probs),
        gradients(expected.loss, log_probs),
        rtol=1e-12,
        atol=1e-12,
    )


def test_a_correction_may_reject_on_one_rank_and_none_on_another() -> None:
    config = PolicyLossConfig(
        use_tis=True, custom_tis_function_path=f"{HERE}:wrong", policy_objective="gspo"
    )
    log_probs, entropy, batch = random_batch(6, 12)

    def run_rank(place: Place) -> Tensor:
        own = replace(batch, loss_mask=batch.loss_mask & (torch.arange(12) % 2 == place.rank))
        objective = make_objective(config, cp_group=place.cp_group)
        return objective.function(log_probs, entropy, own).loss.detach()

    def run_all(*says_none: int) -> Tensor:
        def wrong(train: Tensor, *_: Any, cp_group: Any) -> Any:
            is_none = torch.distributed.get_rank(cp_group) in says_none
            weights = torch.ones_like(train)
            return weights, None if is_none else weights.bool()

        topology = Topology(cp_size=2)
        with patch.object(user_functions, "wrong", wrong, create=True):
            losses, calls = simulate(topology, run_rank)
        check_same_collectives(topology, calls)
        return torch.stack(losses)

    assert torch.equal(run_all(0), run_all())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loss a number", r"^token_loss returned by .*:wrong must be a tensor: type=float"),
        ("loss too short", r"^token_loss returned by .*:wrong must have the shape of labels"),
        ("loss of integers", r"^token_loss returned by .*:wrong must be floating point"),
        ("loss detached", r"^token_loss returned by .*:wrong must have a gradient"),
        ("metrics a list", r"^metrics returned by .*:wrong must be a dict of streams: type=list"),
        ("metrics taken", r"^metrics returned by .* other than loss, active_tokens: name='loss'"),
        ("metrics too short", r"^metric mine returned by .*:wrong must have the shape of labels"),
        ("weights alone", r"^.*:wrong must return \(weights, accepted or None\): type=Tensor"),
        ("weights too short", r"^weights returned by .*:wrong must have the shape of labels"),
        ("weights infinite", r"^weights returned by .*:wrong must be finite .* row=0, weight=inf"),
        ("accepted of floats", r"^accepted returned by .*:wrong must be torch.bool"),
    ],
)
def test_what_a_function_returns_is_checked(what: str, message: str) -> None:
    log_probs, entropy, batch = random_batch(4, 6)
    batch = replace(batch, loss_mask=torch.ones(6, dtype=torch.bool))
    path = f"{HERE}:wrong"
    config = PolicyLossConfig(loss_type="custom_loss", custom_loss_function_path=path)
    if what.startswith(("weights", "accepted")):
        config = PolicyLossConfig(use_tis=True, custom_tis_function_path=path)

    def wrong(log_probs: Tensor, *_: Any, cp_group: Any) -> Any:
        return user_functions.returns(what, log_probs)

    with (
        patch.object(user_functions, "wrong", wrong, create=True),
        pytest.raises(ValueError, match=message),
    ):
        run(config, log_probs, entropy, batch)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", r"must name a module that can be imported .*ModuleNotFoundError"),
        (f"{HERE}:nothing", r"must name a function of the module, which has no 'nothing'"),
        (f"{HERE}:NOT_A_FUNCTION", r"must name a function, and this is of type int"),
        ("decimal:Decimal", r"must name a function, and this is a class"),
        ("math:fsum", r"must name a function of \(train_log_probs, .*, \*, cp_group\), and this"),
        (HERE, r"must be module:function"),
        (":f", r"must be module:function"),
    ],
)
def test_a_function_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^custom_tis_function_path {message}") as caught:
        load_function(path, "custom_tis_function_path")
    assert f"custom_tis_function_path={path!r}" in str(caught.value)


def test_a_missing_function_is_noticed_before_the_first_step() -> None:
    for config in (
        PolicyLossConfig(loss_type="custom_loss", custom_loss_function_path="no_such_module:f"),
        PolicyLossConfig(use_tis=True, custom_tis_function_path="no_such_module:f"),
    ):
        with pytest.raises(ValueError, match=r"^custom_\w+_function_path must name a module"):
            make_objective(config)


def test_a_function_says_itself_whether_it_works_row_by_row() -> None:
    for name, is_separable in (("ratio_loss", False), ("log_loss", True)):
        config = PolicyLossConfig(
            loss_type="custom_loss", custom_loss_function_path=f"{HERE}:{name}"
        )
        assert make_objective(config).is_row_separable is is_separable
    for name, is_separable in (("bounded_correction", False), ("unit_correction", True)):
        config = PolicyLossConfig(use_tis=True, custom_tis_function_path=f"{HERE}:{name}")
        assert make_objective(config).is_row_separable is is_separable


def test_the_entropy_has_a_gradient_where_its_coefficient_is_not_zero() -> None:
    assert make_objective(RATIO).entropy == "loss"
    assert make_objective(replace(RATIO, entropy_coef=0.0)).entropy == "metric"
    log_probs, entropy, batch = random_batch(5, 4)
    with pytest.raises(ValueError, match=r"^entropy must be given, with gradient"):
        run(RATIO, log_probs, entropy.detach(), batch)
