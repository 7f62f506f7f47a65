"""Rows that list few kept ids: the loop and the dense mask, at the cost of the ids alone."""

import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import KeptIds, RLHead, TokenLogProbs
from slime_loss.kept_columns import KeptColumns
from slime_loss.linear_log_probs import log_probs_from_hidden
from slime_loss.projection import add_product_
from tests.slime_loss.head_packs import CONFIGS, HEAD, PACKS, VOCAB, by_loops, make_pack
from tests.slime_loss.reference_log_probs import (
    EXACT,
    LargestResult,
    log_probs_of_rows,
    peak_bytes,
    weighted,
)
from tests.slime_loss.references import gradients
from tests.spawn import World

VOCAB_SIZE, NUM_COLUMNS = 256, 264
# Up to 4 of 256 ids are few.
KEPT = {
    "label among them": ([5, 9, 200], 9),
    "twice the same, label not among them": ([7, 250, 7], 130),
    "everything": ([], 4),
    "not asked for": ([1, 2], -100),
    "many": (list(range(0, 240, 4)), 8),
    "one": ([255], 255),
    "none of the label's half": ([201, 200], 3),
    "two": ([131, 17], 17),
    "unsorted": ([90, 3, 250, 40], 40),
}
LABELS = torch.tensor([label for _, label in KEPT.values()])
NUM_LABELLED, NUM_WHOLE, NUM_MANY = 8, 1, 1


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def kept_ids_of(rows: list[list[int]]) -> KeptIds:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return KeptIds(torch.tensor([one for row in rows for one in row]), offsets)


KEPT_IDS = kept_ids_of([ids for ids, _ in KEPT.values()])


def random_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(3)
    shapes = ((len(LABELS), 5), (NUM_COLUMNS, 5), (NUM_COLUMNS,))
    return Inputs(
        *(
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in shapes
        )
    )


def run(inputs: Inputs, **options: Any) -> TokenLogProbs:
    arguments = {"vocab_size": VOCAB_SIZE, "keep_mask": KEPT_IDS, "labels": LABELS, **options}
    return log_probs_from_hidden(inputs.hidden, inputs.weight, bias=inputs.bias, **arguments)


def gradients_of(result: TokenLogProbs, inputs: Inputs) -> list[Tensor]:
    return gradients(weighted(result.log_probs, result.entropy), *inputs)


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.parametrize("temperature", [0.6, torch.linspace(0.3, 2, len(LABELS)).double()])
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_values_and_gradients_are_those_of_the_loop_and_of_the_dense_mask(
    entropy: str, temperature: float | Tensor, chunk_rows: int | None
) -> None:
    inputs = random_inputs()
    mask = KEPT_IDS.mask(0, NUM_COLUMNS)
    options = {"temperature": temperature, "entropy": entropy, "chunk_rows": chunk_rows}
    result, dense = run(inputs, **options), run(inputs, keep_mask=mask, **options)
    logits = inputs.hidden @ inputs.weight.t() + inputs.bias
    expected, expected_entropy = log_probs_of_rows(
        logits, LABELS, vocab_size=VOCAB_SIZE, temperature=temperature, keep_mask=mask
    )
    for log_probs in (expected, dense.log_probs):
        torch.testing.assert_close(result.log_probs, log_probs, **EXACT)
    if entropy != "none":
        torch.testing.assert_close(result.entropy, expected_entropy, **EXACT)
    found = gradients_of(result, inputs)
    loss = weighted(expected, expected_entropy if entropy == "loss" else None)
    torch.testing.assert_close(found, gradients(loss, *inputs), **EXACT)
    torch.testing.assert_close(found, gradients_of(dense, inputs), **EXACT)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_each_input_alone_may_train(trained: str) -> None:
    inputs = random_inputs()
    expected = gradients_of(run(inputs), inputs)[Inputs._fields.index(trained)]
    alone = Inputs(*(tensor.detach() for tensor in inputs))
    getattr(alone, trained).requires_grad_()
    weighted(run(alone).log_probs, None).backward()
    assert torch.equal(getattr(alone, trained).grad, expected)


@pytest.mark.parametrize(
    ("entropy", "rows"),
    [
        ("none", NUM_WHOLE + NUM_MANY),
        ("metric", NUM_WHOLE + NUM_MANY),
        ("loss", NUM_LABELLED),
    ],
)
def test_rows_of_few_ids_reach_no_dense_product_and_no_dense_mask(entropy: str, rows: int) -> None:
    inputs = random_inputs()
    multiplied, masked = [], []

    def add_product(out: Tensor, left: Tensor, right: Tensor, **options: Any) -> None:
        multiplied.append(right.shape[0] if left.shape[0] == VOCAB_SIZE else left.shape[0])
        add_product_(out, left, right, **options)

    dense_mask = KeptColumns.mask

    def mask(kept: KeptColumns, rows: Tensor) -> Tensor:
        masked.append(rows.shape[0])
        return dense_mask(kept, rows)

    with (
        patch("slime_loss.gradient_sums.add_product_", add_product),
        patch("slime_loss.gradient_sums.add_long_product_", add_product),
        patch.object(KeptColumns, "mask", mask),
    ):
        result = run(inputs, entropy=entropy)
        assert masked == [NUM_MANY]
        gradients_of(result, inputs)
    assert multiplied == [rows, rows]
    assert sum(masked) == NUM_MANY + rows


def test_a_kept_column_of_minus_infinity_takes_no_part() -> None:
    found = []
    for keep in (KEPT_IDS, KEPT_IDS.mask(0, NUM_COLUMNS)):
        inputs = random_inputs()
        with torch.no_grad():
            inputs.bias[torch.tensor([5, 7, 250])] = -math.inf
        result = run(inputs, keep_mask=keep, entropy="metric")
        found.append([result.log_probs, result.entropy, *gradients_of(result, inputs)])
    assert all(tensor.isfinite().all() for tensor in found[0])
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_accumulated_as_with_the_dense_mask(dtype: torch.dtype) -> None:
    inputs = Inputs(*(tensor.detach().to(dtype).requires_grad_() for tensor in random_inputs()))
    exact = Inputs(*(tensor.detach().double().requires_grad_() for tensor in inputs))
    expected = gradients_of(run(exact), exact)
    for name, grad, right in zip(
        Inputs._fields, gradients_of(run(inputs), inputs), expected, strict=True
    ):
        error = (grad.double() - right).abs() / right.abs().max()
        assert error.max() <= 2 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_fused_and_recomputed_give_the_same_bits(
    pack: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_loss.kept_columns._FEW", 0.6)
    one, loss = make_pack(PACKS[pack]), CONFIGS[config]
    expected = by_loops(one, loss).loss
    found = []
    for recompute in (False, True):
        small = replace(HEAD, log_probs_chunk_size=5, recompute_loss_function=recompute)
        head = RLHead(small, loss, vocab_size=VOCAB)
        output = head(one.hidden, one.weight, one.batch)
        torch.testing.assert_close(output.loss, expected, **EXACT)
        found.append(gradients(output.loss, one.hidden, one.weight))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.testing.assert_close(found[0], gradients(expected, one.hidden, one.weight), **EXACT)


@pytest.mark.parametrize("entropy", ["none", "metric"])
def test_memory_stays_within_the_budget_whatever_the_rows(entropy: str) -> None:
    num_rows, num_columns, num_ids, budget = 1024, 2048, 24, 2**20
    hidden = torch.randn(num_rows, 8, requires_grad=True)
    weight = torch.randn(num_columns, 8, requires_grad=True)
    ids = torch.randint(0, num_columns, (num_rows * num_ids,))
    keep = KeptIds(ids, torch.arange(num_rows + 1) * num_ids)

    def forward_and_backward() -> tuple[Tensor, ...]:
        result = log_probs_from_hidden(
            hidden,
            weight,
            torch.arange(num_rows),
            keep_mask=keep,
            entropy=entropy,
            memory_bytes=budget,
        )
        return torch.autograd.grad(weighted(result.log_probs, None), (hidden, weight))

    returned = 4 * (hidden.numel() + weight.numel())
    per_row, per_id = 4 * num_rows * 24, 8 * ids.numel() * 4
    assert peak_bytes(forward_and_backward) <= budget + returned + per_row + per_id
    with LargestResult() as largest:
        forward_and_backward()
    assert largest.numel * 4 <= budget // 2
    assert budget * 8 <= 4 * num_rows * num_columns


# Real ranks.


def sharded_equals_whole(rank: int) -> list[Tensor]:
    """On half of the columns each: no id or no label here, in some rows."""
    half = NUM_COLUMNS // 2
    columns = slice(rank * half, (rank + 1) * half)
    seen = []
    for entropy in ("none", "metric", "loss"):
        whole = random_inputs()
        cut = (whole.hidden, whole.weight[columns], whole.bias[columns])
        part = Inputs(*(tensor.detach().clone().requires_grad_() for tensor in cut))
        expected = run(whole, entropy=entropy)
        result = run(part, entropy=entropy, tp_group=dist.group.WORLD, chunk_rows=3)
        torch.testing.assert_close(result.log_probs, expected.log_probs, **EXACT)
        torch.testing.assert_close(result.entropy, expected.entropy, **EXACT)
        found, right = gradients_of(result, part), gradients_of(expected, whole)
        for grad, other, of in zip(found, right, (slice(None), columns, columns), strict=True):
            torch.testing.assert_close(grad, other[of], **EXACT)
        seen += [result.log_probs.detach(), found[0]]
    return seen


def test_two_ranks_equal_one_and_each_other_bit_for_bit(two_ranks: World) -> None:
    first, second = two_ranks.run(sharded_equals_whole)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
