"""The first step is the same on every layout: loss, metrics, gradient norm, every gradient."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.rl import build, norm, parity
from megatron.rl.batching import MicroBatch
from megatron.rl.parity import Difference, RankStep, Step, assemble, compare
from tests.megatron.rl.matrix import (
    MATRIX,
    OBJECTIVES,
    QUICK,
    Layout,
    Measure,
    layouts,
    step_of_rank,
)
from tests.megatron.rl.running import running

TOLERANCE = 1e-10
"""In float64, of every number: what another order of summation explains a hundred times over."""
SHORT = [layout for layout in OBJECTIVES if layout.words in ("cp2 allgather mb3", "dp2 mb3")]
LONG = [layout for layout in MATRIX if layout not in QUICK and layout not in SHORT]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measure]:
    with Measure(tmp_path_factory.mktemp("rollouts")) as measure:
        yield measure


def assert_same(measure: Measure, layout: Layout) -> None:
    reference = measure.reference(layout.run)
    assert reference.scalars["grad_norm"] > 0.01
    assert all(gradient.dtype == torch.float64 for gradient in reference.gradients.values())
    differences = compare(reference, measure.step(layout))
    assert not [d for d in differences if not d.worst <= TOLERANCE]


@pytest.mark.parametrize("layout", [*QUICK, *SHORT], ids=str)
def test_a_layout_changes_nothing(measure: Measure, layout: Layout) -> None:
    assert_same(measure, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LONG, ids=str)
def test_a_large_layout_changes_nothing(measure: Measure, layout: Layout) -> None:
    assert_same(measure, layout)


def errors_of(step: Step, exact: Step) -> tuple[float, float]:
    """The norm of the error relative to that of the gradient: of all together, and of the worst."""
    errors = {name: step.gradients[name].double() - g for name, g in exact.gradients.items()}
    norms = {name: float(gradient.norm()) for name, gradient in exact.gradients.items()}
    all_errors = math.hypot(*(float(error.norm()) for error in errors.values()))
    worst = max(float(error.norm()) / norms[name] for name, error in errors.items())
    return all_errors / math.hypot(*norms.values()), worst


LOW_PRECISION = layouts(
    "tied", "tp2 sp mb4", "cp2 mb3", "pp2 vpp2 mb4", "dp2 distopt mb3", "dp2 overlap mb3"
)


@pytest.mark.parametrize("layout", LOW_PRECISION, ids=str)
def test_bf16_rounds_no_more_on_a_layout_than_on_one_process(
    measure: Measure, layout: Layout
) -> None:
    exact = measure.reference(layout.run)
    one, many = measure.reference(layout.run, "bf16"), measure.step(layout, "bf16")
    assert {gradient.dtype for gradient in many.gradients.values()} == {torch.float32}
    for got, bound in zip(errors_of(many, exact), errors_of(one, exact), strict=True):
        assert got <= 2 * bound
    assert many.scalars["loss"] == pytest.approx(exact.scalars["loss"], rel=0.05)


def step_of_wrong_rank(rank: int, num_ranks: int, argv: list[str], mistake: str) -> RankStep:
    """A step by ranks that make a mistake which a run on one rank would not show."""
    with ExitStack() as stack:
        stack.enter_context(MISTAKES[mistake]())
        return step_of_rank(rank, num_ranks, argv)


def averaged_over_ranks() -> Any:
    """Gradients divided by the number of replicas."""

    def finalize(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        right(model, *args, **kwargs)
        for chunk in model:
            chunk.scale_gradients(1 / 2)

    right = build.finalize_sum
    return patch.object(build, "finalize_sum", finalize)


def divided_by_own_tokens() -> Any:
    """A mean over the tokens that a micro-batch happens to hold."""

    def local_mean(*args: Any) -> MicroBatch:
        made = right(*args)
        count = made.batch.loss_mask.sum().clamp_min(1)
        weight = torch.where(made.batch.loss_mask, 1.0 / count, 0.0)
        return replace(made, batch=replace(made.batch, loss_weight=weight))

    right = parity.micro_batch_of
    return patch.object(parity, "micro_batch_of", local_mean)


def norms_not_reduced() -> Any:
    """Under sequence parallelism each rank keeps the gradients of its own rows."""
    return patch.object(norm, "_mark", lambda *_: None)


MISTAKES = {
    function.__name__: function
    for function in (averaged_over_ranks, divided_by_own_tokens, norms_not_reduced)
}


def wrong(measure: Measure, mistake: str, words: str) -> list[Difference]:
    """What a step with a mistake differs in, beyond the tolerance."""
    layout = Layout("tied", words)
    reference = measure.reference("tied")
    argv = [*measure.argv(layout), "--fp64"]
    ranks = measure.world(2).run(step_of_wrong_rank, 2, argv, mistake)
    differences = compare(reference, assemble(ranks))
    return [difference for difference in differences if not difference.worst <= TOLERANCE]


def test_averaged_gradients_are_found(measure: Measure) -> None:
    found = wrong(measure, "averaged_over_ranks", "dp2 mb3")
    gradients = [difference for difference in found if difference.kind == "gradient"]
    assert all(difference.relative == pytest.approx(0.5) for difference in gradients)
    assert len(gradients) == len(measure.reference("tied").gradients)
    assert [d.name for d in found if d.kind == "scalar"] == ["grad_norm"]


def test_a_mean_over_own_tokens_is_found(measure: Measure) -> None:
    found = wrong(measure, "divided_by_own_tokens", "dp2 mb3")
    assert {"loss", "pg_loss", "grad_norm"} <= {difference.name for difference in found}
    assert len(found) > len(measure.reference("tied").gradients)


def test_copies_that_were_not_reduced_are_found(measure: Measure) -> None:
    found = wrong(measure, "norms_not_reduced", "tp2 sp mb4")
    assert {d.name.split("[")[0].split(".")[-1] for d in found if d.kind == "gradient"} == {
        "layer_norm_weight",
        "weight",
    }
    assert all("norm" in difference.name for difference in found)
    assert all(difference.spread > 1e-3 for difference in found if difference.kind == "gradient")


def test_only_steps_on_the_same_samples_are_compared(measure: Measure) -> None:
    step = measure.reference("tied")
    with pytest.raises(ValueError, match="must train the same samples"):
        compare(step, replace(step, samples=step.samples + 1))


def test_what_one_step_lacks_is_the_largest_difference(measure: Measure) -> None:
    step = measure.reference("tied")
    name = next(iter(step.gradients))
    rest = {key: gradient for key, gradient in step.gradients.items() if key != name}
    first, *others = compare(step, replace(step, gradients=rest))
    assert (first.name, first.relative, first.second) == (name, math.inf, None)
    assert all(difference.worst == 0 for difference in others)


def gradients(
    rank: int, world_size: int, argv: list[str], into_main_grad: bool
) -> dict[str, torch.Tensor]:
    """The gradients of the first step, with or without the head adding its own to main_grad."""
    with running(rank, world_size, argv) as run:
        run.trainee.head.accumulate_into_main_grad = into_main_grad
        run.trainee.step(run.micro_batches())
        return {
            name: parameter.main_grad.clone()
            for chunk in run.trainee.chunks
            for name, parameter in chunk.named_parameters()
        }


@pytest.mark.parametrize(
    "words", ["dp2 mb3", "dp2 overlap mb3", "dp2 distopt mb3", "pp2 mb4", "tp2 mb4"]
)
def test_the_head_adds_to_main_grad_what_autograd_would(measure: Measure, words: str) -> None:
    argv = [*measure.argv(Layout("tied", words)), "--fp64"]
    found, expected = (measure.world(2).run(gradients, 2, argv, into) for into in (True, False))
    for got, wanted in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(
                got[parameter], gradient, rtol=0, atol=1e-13 * largest, msg=parameter
            )
