"""From logits: against loops in float64, plain torch's own error below it."""

import math

import pytest
import torch
from torch import Tensor

from slime_loss.log_probs import log_probs_from_logits
from tests.slime_loss.reference_log_probs import (
    EXACT,
    LABELS,
    LargestResult,
    kept_ids_of,
    log_probs_of_rows,
    plain,
    random_logits,
    random_mask,
    saved_for_backward,
    weighted,
)
from tests.slime_loss.references import gradients

# The cases of the specification.


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[2.0, 0]], dtype=torch.float64)
    result = log_probs_from_logits(logits, torch.tensor([0]), temperature=0.5)
    assert result.log_probs.item() == pytest.approx(-0.01814992791780978, abs=1e-15)


@pytest.mark.parametrize(
    ("logits", "label", "expected"),
    [
        ([0.0] * 8, 1, -1.6094379124341003),
        ([-10.0, -10, -10, -10, -8, 0, 0, 0], 4, -0.4326529029917916),
    ],
)
def test_padding_columns_take_no_part(logits: list[float], label: int, expected: float) -> None:
    leaf = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    result = log_probs_from_logits(leaf, torch.tensor([label]), vocab_size=5, entropy="loss")
    assert result.log_probs.item() == pytest.approx(expected, abs=1e-14)
    if label == 1:
        assert result.entropy.item() == pytest.approx(1.6094379124341003, abs=1e-14)
    (grad,) = gradients(result.log_probs.sum() + result.entropy.sum(), leaf)
    assert torch.equal(grad[0, 5:], torch.zeros(3, dtype=torch.float64))
    assert grad[0, :5].abs().min() > 0


def test_a_column_of_probability_zero_adds_exactly_nothing() -> None:
    leaf = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    result = log_probs_from_logits(leaf, torch.tensor([0]), entropy="loss")
    assert result.entropy.item() == 0.6931471805599453
    (of_entropy,) = gradients(result.entropy.sum(), leaf)
    assert of_entropy.tolist() == [[0.0, 0.0, 0.0]]
    (of_log_probs,) = gradients(result.log_probs.sum(), leaf)
    assert of_log_probs.tolist() == [[0.5, -0.5, 0.0]]


# Their whole kind.


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.parametrize("mask", ["none", "dense", "ids"])
@pytest.mark.parametrize("vocab_size", [None, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.3, "stream"])
@pytest.mark.parametrize("chunk_rows", [None, 1, 2])
def test_values_and_gradients_are_those_of_the_loop(
    entropy: str,
    mask: str,
    vocab_size: int | None,
    temperature: float | str,
    chunk_rows: int | None,
) -> None:
    num_columns = 7 if vocab_size is None else 10
    leaf = random_logits(num_columns)
    keep = None if mask == "none" else random_mask(num_columns)
    if mask == "ids":
        keep[0, 4] = True
    divisor = torch.linspace(0.2, 3.0, 7).double() if temperature == "stream" else temperature
    result = log_probs_from_logits(
        leaf,
        LABELS,
        vocab_size=vocab_size,
        temperature=divisor,
        keep_mask=kept_ids_of(keep[:, :vocab_size]) if mask == "ids" else keep,
        entropy=entropy,
        chunk_rows=chunk_rows,
    )
    expected, expected_entropy = log_probs_of_rows(
        leaf, LABELS, vocab_size=vocab_size, temperature=divisor, keep_mask=keep
    )
    torch.testing.assert_close(result.log_probs, expected, **EXACT)
    if entropy == "none":
        assert result.entropy is None
    else:
        torch.testing.assert_close(result.entropy, expected_entropy, **EXACT)
        assert result.entropy.requires_grad == (entropy == "loss")
    with_entropy = expected_entropy if entropy == "loss" else None
    torch.testing.assert_close(
        gradients(weighted(result.log_probs, result.entropy), leaf),
        gradients(weighted(expected, with_entropy), leaf),
        **EXACT,
    )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("suppressed", [-math.inf, -1e300])
def test_suppressed_columns_anywhere_but_at_the_label(mask: bool, suppressed: float) -> None:
    logits = random_logits().detach()
    logits[:, 1] = suppressed
    logits[3, :6] = suppressed
    leaf = logits.requires_grad_()
    keep = random_mask() if mask else None
    result = log_probs_from_logits(leaf, LABELS, keep_mask=keep, entropy="loss")
    expected = log_probs_of_rows(leaf, LABELS, keep_mask=keep)
    torch.testing.assert_close((result.log_probs, result.entropy), expected, **EXACT)
    (grad,) = gradients(weighted(result.log_probs, result.entropy), leaf)
    (expected_grad,) = gradients(weighted(*expected), leaf)
    torch.testing.assert_close(grad, expected_grad, **EXACT)
    assert grad[:, 1].abs().max() == 0


def test_a_label_of_probability_zero_is_minus_infinity_with_finite_gradient() -> None:
    leaf = torch.tensor([[-math.inf, 1.0, 0.0]], requires_grad=True)
    result = log_probs_from_logits(leaf, torch.tensor([0]), entropy="loss")
    assert result.log_probs.item() == -math.inf
    (grad,) = gradients(result.log_probs.sum() + result.entropy.sum(), leaf)
    assert grad.isfinite().all()


@pytest.mark.parametrize("offset", [1e4, -200.0, -1e4])
def test_a_common_offset_leaves_no_trace_in_float32(offset: float) -> None:
    # Multiples of 1/64 stay exact beside 1e4 in float32: all that differs is the arithmetic.
    logits = (random_logits(300).detach() * 64).round() / 64
    shifted = (logits + offset).float().requires_grad_()
    leaf = logits.clone().requires_grad_()
    result = log_probs_from_logits(shifted, LABELS, entropy="loss")
    expected, expected_entropy = log_probs_of_rows(leaf, LABELS)
    torch.testing.assert_close(result.log_probs.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(result.entropy.double(), expected_entropy, rtol=0, atol=3e-6)
    (grad,) = gradients(weighted(result.log_probs, result.entropy), shifted)
    (expected_grad,) = gradients(weighted(expected, expected_entropy), leaf)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 60.0])
def test_the_error_is_at_most_twice_plain_torch_in_float32(
    dtype: torch.dtype, offset: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    low = (4 * torch.randn(64, 2000, generator=generator) + offset).to(dtype)
    labels = torch.randint(0, 2000, (64,), generator=generator)
    leaves = [low.clone().requires_grad_(), low.float().requires_grad_(), low.double()]
    leaves[2].requires_grad_()
    result = log_probs_from_logits(leaves[0], labels, entropy="loss", temperature=0.7)
    outputs = [
        (result.log_probs, result.entropy),
        *(plain(leaf, labels, temperature=0.7) for leaf in leaves[1:]),
    ]
    grads = [
        gradients(weighted(*output), leaf)[0] for output, leaf in zip(outputs, leaves, strict=True)
    ]
    assert result.log_probs.dtype == result.entropy.dtype == torch.float32
    assert grads[0].dtype == dtype
    for number in range(2):
        ours, theirs = (
            (outputs[which][number].double() - outputs[2][number]).abs() for which in (0, 1)
        )
        assert ours.max() <= 2 * theirs.max()
        assert ours.mean() <= 2 * theirs.mean()
    # The gradient is handed over in the dtype of the logits: plain torch rounds it as well.
    errors = [(grad.to(dtype).double() - grads[2]).abs() for grad in grads[:2]]
    assert errors[0].max() <= 2 * errors[1].max()
    assert errors[0].mean() <= 2 * errors[1].mean()


def test_what_an_ignored_row_or_padding_column_holds_changes_no_bit() -> None:
    results = []
    for poison in (0.0, math.nan, math.inf, -math.inf, 1e30):
        logits = random_logits(10).detach()
        logits[:, 7:] = poison
        logits[LABELS == -100] = poison
        leaf = logits.requires_grad_()
        result = log_probs_from_logits(
            leaf, LABELS, vocab_size=7, keep_mask=random_mask(10), entropy="loss"
        )
        (grad,) = gradients(weighted(result.log_probs, result.entropy), leaf)
        results.append((result.log_probs.detach(), result.entropy.detach(), grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    log_probs, entropy, grad = results[0]
    for nothing in (log_probs, entropy, grad):
        assert torch.equal(nothing[LABELS == -100], torch.zeros_like(nothing[LABELS == -100]))


@pytest.mark.parametrize("keep", [None, random_mask()])
def test_backward_twice_gives_the_same_bits_and_nothing_is_changed(keep: Tensor | None) -> None:
    leaf = random_logits()
    before = leaf.detach().clone()
    result = log_probs_from_logits(leaf, LABELS, keep_mask=keep, entropy="loss")
    loss = weighted(result.log_probs, result.entropy)
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_nothing_of_the_size_of_the_logits_is_kept_beside_them(entropy: str) -> None:
    leaf = torch.randn(32, 500, requires_grad=True)
    labels = torch.arange(32)
    with saved_for_backward() as saved, LargestResult() as largest:
        result = log_probs_from_logits(leaf, labels, entropy=entropy, chunk_rows=4)
    others = [tensor for tensor in saved if tensor.data_ptr() != leaf.data_ptr()]
    assert max(tensor.numel() for tensor in others) == 32
    assert largest.numel == 4 * 500
    assert result.log_probs.requires_grad


def test_an_entropy_metric_needs_no_gradient_even_where_no_row_trains() -> None:
    for labels in (LABELS, torch.full_like(LABELS, -100)):
        result = log_probs_from_logits(random_logits(), labels, entropy="metric")
        assert result.log_probs.requires_grad
        assert not result.entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_no_row_that_trains_is_still_connected(
    dtype: torch.dtype, num_rows: int, entropy: str
) -> None:
    leaf = torch.full((num_rows, 5), math.nan, dtype=dtype, requires_grad=True)
    labels = torch.full((num_rows,), -100)
    result = log_probs_from_logits(leaf, labels, entropy=entropy)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for output in (result.log_probs, result.entropy):
        if output is not None:
            assert torch.equal(output, torch.zeros(num_rows, dtype=expected))
    (grad,) = torch.autograd.grad(weighted(result.log_probs, result.entropy), leaf)
    assert torch.equal(grad, torch.zeros(num_rows, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_reused_logits_become_their_gradient_once(dtype: torch.dtype, masked: bool) -> None:
    def made_logits() -> tuple[Tensor, Tensor]:
        leaf = random_logits(10).detach().to(dtype).requires_grad_()
        return leaf, leaf * 2

    results = []
    for reuse in (False, True):
        leaf, logits = made_logits()
        result = log_probs_from_logits(
            logits,
            LABELS,
            vocab_size=7,
            temperature=0.7,
            keep_mask=random_mask(10) if masked else None,
            entropy="loss",
            chunk_rows=2,
            reuse_logits=reuse,
        )
        loss = weighted(result.log_probs, result.entropy)
        before = logits.detach().clone()
        (of_logits,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert (of_logits.data_ptr() == logits.data_ptr()) == reuse
        results.append(of_logits.clone())
        if reuse:
            with pytest.raises(RuntimeError, match="only once with reuse_logits=True"):
                torch.autograd.grad(loss, logits, retain_graph=True)
        else:
            assert torch.equal(logits, before)
            torch.autograd.grad(loss, leaf)
    assert torch.equal(*results)


def test_reused_logits_make_no_second_buffer() -> None:
    logits = torch.randn(64, 400, requires_grad=True) * 2
    result = log_probs_from_logits(
        logits, torch.arange(64), entropy="loss", chunk_rows=4, reuse_logits=True
    )
    loss = weighted(result.log_probs, result.entropy)
    with LargestResult() as largest:
        torch.autograd.grad(loss, logits)
    assert largest.numel == 4 * 400
