"""From hidden states: the loop over the logits, whatever the chunks, the budget and the ranks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import TokenLogProbs
from slime_loss.linear_log_probs import log_probs_from_hidden
from tests.slime_loss.recording import recorded_collectives
from tests.slime_loss.reference_log_probs import (
    EXACT,
    LABELS,
    LargestResult,
    kept_ids_of,
    log_probs_of_rows,
    peak_bytes,
    plain,
    random_mask,
    saved_for_backward,
    weighted,
)
from tests.slime_loss.references import gradients, without_type_checker
from tests.spawn import World

IGNORED = LABELS == -100


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def random_inputs(num_columns: int = 7, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    shapes = ((len(LABELS), 5), (num_columns, 5), (num_columns,))
    return Inputs(
        *(
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in shapes
        )
    )


def run(inputs: Inputs, labels: Tensor = LABELS, **options: Any) -> TokenLogProbs:
    return log_probs_from_hidden(inputs.hidden, inputs.weight, labels, bias=inputs.bias, **options)


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.parametrize("mask", ["none", "dense", "ids"])
@pytest.mark.parametrize("vocab_size", [None, 7])
@pytest.mark.parametrize("chunk_rows", [None, 1, 2])
@pytest.mark.parametrize("memory_bytes", [1, 2**20])
def test_values_and_gradients_are_those_of_the_loop(
    entropy: str, mask: str, vocab_size: int | None, chunk_rows: int | None, memory_bytes: int
) -> None:
    num_columns = 7 if vocab_size is None else 10
    inputs = random_inputs(num_columns)
    keep = None if mask == "none" else random_mask(num_columns)
    if mask == "ids":
        keep[0, 4] = True
    result = run(
        inputs,
        vocab_size=vocab_size,
        temperature=0.6,
        keep_mask=kept_ids_of(keep[:, :vocab_size]) if mask == "ids" else keep,
        entropy=entropy,
        chunk_rows=chunk_rows,
        memory_bytes=memory_bytes,
    )
    logits = inputs.hidden @ inputs.weight.t() + inputs.bias
    expected, expected_entropy = log_probs_of_rows(
        logits, LABELS, vocab_size=vocab_size, temperature=0.6, keep_mask=keep
    )
    torch.testing.assert_close(result.log_probs, expected, **EXACT)
    if entropy == "none":
        assert result.entropy is None
    else:
        torch.testing.assert_close(result.entropy, expected_entropy, **EXACT)
        assert result.entropy.requires_grad == (entropy == "loss")
    with_entropy = expected_entropy if entropy == "loss" else None
    torch.testing.assert_close(
        gradients(weighted(result.log_probs, result.entropy), *inputs),
        gradients(weighted(expected, with_entropy), *inputs),
        **EXACT,
    )


def test_temperature_may_be_a_stream() -> None:
    inputs, temperature = random_inputs(), torch.linspace(0.2, 3, 7)
    result = run(inputs, temperature=temperature, entropy="loss")
    logits = inputs.hidden @ inputs.weight.t() + inputs.bias
    expected = log_probs_of_rows(logits, LABELS, temperature=temperature.double())
    torch.testing.assert_close((result.log_probs, result.entropy), expected, **EXACT)
    torch.testing.assert_close(
        gradients(weighted(result.log_probs, result.entropy), *inputs),
        gradients(weighted(*expected), *inputs),
        **EXACT,
    )


def test_only_rows_with_a_label_are_projected() -> None:
    inputs = random_inputs()
    inputs = inputs._replace(weight=inputs.weight.detach())
    with LargestResult() as forward:
        result = run(inputs, memory_bytes=1)
    assert sum(forward.matmul_rows) == len(LABELS) - 2
    with LargestResult() as backward:
        torch.autograd.grad(result.log_probs.sum(), inputs.hidden)
    # The logits once more, then their hidden gradient.
    assert sum(backward.matmul_rows) == 2 * (len(LABELS) - 2)


def test_what_an_ignored_row_or_padding_row_holds_changes_no_bit() -> None:
    results = []
    for poison in (0.0, math.nan, math.inf, 1e30):
        inputs = random_inputs(10)
        with torch.no_grad():
            inputs.hidden[IGNORED] = poison
            inputs.weight[7:] = poison
            inputs.bias[7:] = poison
        result = run(inputs, vocab_size=7, entropy="loss", keep_mask=random_mask(10))
        found = gradients(weighted(result.log_probs, result.entropy), *inputs)
        results.append([result.log_probs.detach(), result.entropy.detach(), *found])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    log_probs, entropy, of_hidden, of_weight, of_bias = results[0]
    for nothing in (log_probs[IGNORED], entropy[IGNORED], of_hidden[IGNORED], of_weight[7:]):
        assert torch.equal(nothing, torch.zeros_like(nothing))
    assert torch.equal(of_bias[7:], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("mask", [None, random_mask()])
def test_kept_or_recomputed_or_twice_gives_the_same_bits(mask: Tensor | None) -> None:
    results = []
    # Chunks of 2 rows of 7 columns of 8 bytes: 3 rows to work in, temporaries, and to keep none,
    # one or all.
    temporaries = 3 if mask is None else 5
    for memory_bytes in (1, (3 + 2 * temporaries + 2) * 7 * 8, 2**20):
        inputs = random_inputs()
        before = [tensor.detach().clone() for tensor in inputs]
        with saved_for_backward() as saved:
            result = run(
                inputs,
                entropy="loss",
                temperature=0.7,
                chunk_rows=2,
                keep_mask=mask,
                memory_bytes=memory_bytes,
            )
        loss = weighted(result.log_probs, result.entropy)
        first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
        kept = [tensor for tensor in saved if tensor.dim() == 2 and tensor.shape[1] == 7]
        results.append((len(kept), [result.log_probs.detach(), *first]))
    assert [kept for kept, _ in results] == [0, 1, 3]
    for _, other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], other, strict=True))


@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
@pytest.mark.parametrize("masked", [False, True])
def test_memory_stays_within_the_budget_whatever_the_rows(entropy: str, masked: bool) -> None:
    num_rows, num_columns, budget = 1024, 2048, 2**20
    hidden = torch.randn(num_rows, 8, requires_grad=True)
    weight = torch.randn(num_columns, 8, requires_grad=True)
    labels = torch.arange(num_rows)
    keep = torch.rand(num_rows, num_columns) < 0.5 if masked else None

    def forward_and_backward() -> tuple[Tensor, ...]:
        result = log_probs_from_hidden(
            hidden, weight, labels, keep_mask=keep, entropy=entropy, memory_bytes=budget
        )
        loss = weighted(result.log_probs, result.entropy)
        return torch.autograd.grad(loss, (hidden, weight))

    returned = 4 * (hidden.numel() + weight.numel())
    per_row = 4 * num_rows * 24
    assert peak_bytes(forward_and_backward) <= budget + returned + per_row
    with LargestResult() as largest:
        forward_and_backward()
    assert largest.numel * 4 <= budget // 2
    assert budget * 8 <= 4 * num_rows * num_columns


def test_nothing_is_kept_where_no_gradient_is_asked_for() -> None:
    inputs = random_inputs()
    with torch.no_grad(), saved_for_backward() as saved:
        result = run(inputs, entropy="loss")
    assert not saved
    assert not result.log_probs.requires_grad
    frozen = Inputs(*(tensor.detach() for tensor in inputs))
    assert not run(frozen, entropy="loss").entropy.requires_grad


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_each_input_alone_may_train(trained: str) -> None:
    inputs = random_inputs()
    result = run(inputs, entropy="loss")
    (expected,) = gradients(weighted(result.log_probs, result.entropy), getattr(inputs, trained))
    alone = Inputs(*(tensor.detach() for tensor in inputs))
    getattr(alone, trained).requires_grad_()
    result = run(alone, entropy="loss")
    weighted(result.log_probs, result.entropy).backward()
    for name, tensor in alone._asdict().items():
        assert (tensor.grad is not None) == (name == trained)
    assert torch.equal(getattr(alone, trained).grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 7])
@pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
def test_no_row_that_trains_is_still_connected(
    dtype: torch.dtype, num_rows: int, entropy: str
) -> None:
    inputs = random_inputs(dtype=dtype)
    hidden = torch.full((num_rows, 5), math.nan, dtype=dtype, requires_grad=True)
    inputs = inputs._replace(hidden=hidden)
    result = run(inputs, torch.full((num_rows,), -100), entropy=entropy)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(result.log_probs, torch.zeros(num_rows, dtype=expected))
    if entropy != "none":
        assert torch.equal(result.entropy, torch.zeros(num_rows, dtype=expected))
        assert result.entropy.requires_grad == (entropy == "loss")
    grads = torch.autograd.grad(weighted(result.log_probs, result.entropy), inputs)
    for tensor, grad in zip(inputs, grads, strict=True):
        assert grad.dtype == dtype
        assert torch.equal(grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_error_is_at_most_twice_plain_torch_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(48, 96, generator=generator).to(dtype)
    # A common offset of the logits, as a trained head has it.
    weight = (0.3 * torch.randn(3000, 96, generator=generator) + 0.2).to(dtype)
    labels = torch.randint(0, 3000, (48,), generator=generator)
    found = []
    for kind in (dtype, torch.float32, torch.float64):
        leaves = [tensor.to(kind).requires_grad_() for tensor in (hidden, weight)]
        if len(found) == 0:
            result = log_probs_from_hidden(
                *leaves, labels, temperature=0.7, entropy="loss", chunk_rows=10
            )
            outputs = result.log_probs, result.entropy
            assert {output.dtype for output in outputs} == {torch.float32}
        else:
            outputs = plain(leaves[0] @ leaves[1].t(), labels, temperature=0.7)
        grads = gradients(weighted(*outputs), *leaves)
        if kind != torch.float64:
            assert all(grad.dtype == kind for grad in grads)
            # Gradients are handed over in the dtype of the inputs: plain torch rounds them too.
            grads = [grad.to(dtype) for grad in grads]
        found.append([*outputs, *grads])
    for ours, theirs, exact in zip(*found, strict=True):
        our_error, their_error = ((one.double() - exact).abs() for one in (ours, theirs))
        assert our_error.max() <= 2 * their_error.max()
        assert our_error.mean() <= 2 * their_error.mean()


WRONG: list[tuple[str, Callable[[], object]]] = [
    (
        r"labels\[0\]=7, vocab_size=7",
        lambda: run(random_inputs(8), torch.tensor([7, 0, 0, 0, 0, 0, 0]), vocab_size=7),
    ),
    (
        r"hidden must have one row per label over all shards: hidden.shape=\(7, 5\)",
        lambda: run(random_inputs(), torch.tensor([1])),
    ),
    (
        r"weight must be \[V/tp, H\] with the H of hidden: weight.shape=\(7, 4\)",
        lambda: log_probs_from_hidden(torch.zeros(7, 5), torch.zeros(7, 4), LABELS),
    ),
    (
        r"bias must have one number per row of weight: bias.shape=\(6,\)",
        lambda: run(random_inputs()._replace(bias=torch.zeros(6))),
    ),
    (
        "weight must have the dtype and device of hidden: weight is torch.bfloat16 on cpu",
        lambda: log_probs_from_hidden(torch.zeros(7, 5), torch.zeros(7, 5).bfloat16(), LABELS),
    ),
    ("chunk_rows must be >= 1", lambda: run(random_inputs(), chunk_rows=0)),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[message[:30] for message, _ in WRONG])
def test_what_cannot_be_is_refused_by_name_rule_and_value(
    message: str, call: Callable[[], object]
) -> None:
    with without_type_checker(), pytest.raises(ValueError, match=message):
        call()


# Real ranks.


def rank_inputs(rank: int, sequence_parallel: bool) -> tuple[Inputs, Inputs, Tensor]:
    """The whole inputs, this rank's part of them, and labels that one rank has few of."""
    size, num_columns = dist.get_world_size(), 24
    generator = torch.Generator().manual_seed(9)
    whole = Inputs(
        *(
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in ((12, 5), (num_columns, 5), (num_columns,))
        )
    )
    labels = torch.randint(0, 19, (12,), generator=generator)
    labels[12 // size :] = -100
    labels[-1] = 18
    columns = slice(rank * num_columns // size, (rank + 1) * num_columns // size)
    rows = slice(rank * 12 // size, (rank + 1) * 12 // size) if sequence_parallel else slice(None)
    cut = (whole.hidden[rows], whole.weight[columns], whole.bias[columns])
    return whole, Inputs(*(tensor.detach().clone().requires_grad_() for tensor in cut)), labels


def sharded_equals_whole(rank: int, sequence_parallel: bool) -> list[Any]:
    size, group = dist.get_world_size(), dist.group.WORLD
    num_columns = 24 // size
    whole, part, labels = rank_inputs(rank, sequence_parallel)
    rows = slice(rank * 12 // size, (rank + 1) * 12 // size) if sequence_parallel else slice(None)
    columns = slice(rank * num_columns, (rank + 1) * num_columns)
    keep = torch.rand(12, 24, generator=torch.Generator().manual_seed(1)) < 0.4
    seen: list[Any] = []
    for entropy in ("none", "metric", "loss"):
        for mask in (None, keep):
            for trained in (labels, torch.full_like(labels, -100)):
                options = {"vocab_size": 19, "temperature": 0.7, "entropy": entropy}
                expected = run(whole, trained, keep_mask=mask, **options)
                with recorded_collectives() as calls:
                    result = run(
                        part,
                        trained,
                        keep_mask=mask if mask is None else mask[:, columns],
                        tp_group=group,
                        sequence_parallel=sequence_parallel,
                        chunk_rows=2,
                        memory_bytes=1,
                        **options,
                    )
                    loss = weighted(result.log_probs, result.entropy)
                    grads = torch.autograd.grad(loss, part)
                torch.testing.assert_close(result.log_probs, expected.log_probs, **EXACT)
                torch.testing.assert_close(result.entropy, expected.entropy, **EXACT)
                whole_grads = gradients(weighted(expected.log_probs, expected.entropy), *whole)
                for grad, whole_grad, cut in zip(
                    grads, whole_grads, (rows, columns, columns), strict=True
                ):
                    torch.testing.assert_close(grad, whole_grad[cut], **EXACT)
                seen += [result.log_probs.detach(), calls]
    return seen


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(two_ranks: World, sequence_parallel: bool) -> None:
    first, second = two_ranks.run(sharded_equals_whole, sequence_parallel)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    with_rows, without_rows = first[1], first[3]
    statistics = ("all_gather_rows", (7, 3))
    if sequence_parallel:
        gather = ("all_gather_rows", (6, 5))
        assert with_rows == [gather, statistics, ("reduce_scatter_rows", (12, 5))]
        assert without_rows == [gather, ("all_gather_rows", (0, 3)), with_rows[2]]
    else:
        assert with_rows == [statistics, ("all_reduce_sum_", (7, 5))]
        assert without_rows == [("all_gather_rows", (0, 3)), ("all_reduce_sum_", (0, 5))]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_four_ranks_equal_one(four_ranks: World, sequence_parallel: bool) -> None:
    first, *others = four_ranks.run(sharded_equals_whole, sequence_parallel)
    for other in others:
        assert all(same(a, b) for a, b in zip(first, other, strict=True))
