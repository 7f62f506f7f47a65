"""What the softmax refuses, and that ranks which share the vocabulary out make one."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import KeptIds
from slime_loss.log_probs import log_probs_from_logits
from tests.slime_loss.reference_log_probs import (
    EXACT,
    LABELS,
    kept_ids_of,
    random_logits,
    random_mask,
    weighted,
)
from tests.slime_loss.references import gradients, without_type_checker
from tests.spawn import World

WRONG: list[tuple[str, Callable[[], object]]] = [
    (
        r"labels must be -100 or in \[0, vocab_size\): labels\[2\]=7, vocab_size=7",
        lambda: log_probs_from_logits(torch.zeros(3, 9), torch.tensor([6, -100, 7]), vocab_size=7),
    ),
    (
        r"labels\[0\]=-1, vocab_size=9",
        lambda: log_probs_from_logits(torch.zeros(1, 9), torch.tensor([-1])),
    ),
    (
        "temperature must be finite and > 0: temperature=0",
        lambda: log_probs_from_logits(torch.zeros(1, 9), torch.tensor([1]), temperature=0.0),
    ),
    (
        r"temperature must be finite and > 0: temperature\[2\]=nan",
        lambda: log_probs_from_logits(
            torch.zeros(3, 9),
            torch.tensor([1, -100, 1]),
            temperature=torch.tensor([1.0, -1.0, math.nan]),
        ),
    ),
    (
        "temperature must be a number or have the shape of labels",
        lambda: log_probs_from_logits(
            torch.zeros(1, 9), torch.tensor([1]), temperature=torch.ones(2)
        ),
    ),
    (
        r"vocab_size must be in \[1, columns of all ranks\]: vocab_size=10, columns=9",
        lambda: log_probs_from_logits(torch.zeros(1, 9), torch.tensor([1]), vocab_size=10),
    ),
    (
        "entropy must be one of none, metric, loss: entropy='yes'",
        lambda: log_probs_from_logits(torch.zeros(1, 9), torch.tensor([1]), entropy="yes"),
    ),
    (
        "chunk_rows must be >= 1: chunk_rows=0",
        lambda: log_probs_from_logits(torch.zeros(1, 9), torch.tensor([1]), chunk_rows=0),
    ),
    (
        r"keep_mask must be bool with the shape of the logits: .*torch.float32",
        lambda: log_probs_from_logits(
            torch.zeros(1, 9), torch.tensor([1]), keep_mask=torch.ones(1, 9)
        ),
    ),
    (
        r"keep_mask must have one row per label: keep_mask.num_rows=2, labels=1",
        lambda: log_probs_from_logits(
            torch.zeros(1, 9),
            torch.tensor([1]),
            keep_mask=KeptIds(torch.tensor([], dtype=torch.int64), torch.zeros(3).long()),
        ),
    ),
    (
        r"logits must have one row per label over all shards: logits.shape=\(2, 9\)",
        lambda: log_probs_from_logits(torch.zeros(2, 9), torch.tensor([1])),
    ),
    (
        "logits must be a floating point matrix: logits.dtype=torch.int64",
        lambda: log_probs_from_logits(torch.zeros(1, 9).long(), torch.tensor([1])),
    ),
    (
        "labels must be int64 with one dimension: labels.dtype=torch.float32",
        lambda: log_probs_from_logits(torch.zeros(1, 9), torch.tensor([1.0])),
    ),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[message[:30] for message, _ in WRONG])
def test_what_cannot_be_is_refused_by_name_rule_and_value(
    message: str, call: Callable[[], object]
) -> None:
    with without_type_checker(), pytest.raises(ValueError, match=message):
        call()


def test_an_unlabelled_row_may_hold_any_temperature() -> None:
    temperature = torch.tensor([1.0, math.nan])
    result = log_probs_from_logits(
        torch.zeros(2, 4), torch.tensor([1, -100]), temperature=temperature
    )
    assert result.log_probs.tolist() == [pytest.approx(-math.log(4)), 0.0]


# Real ranks.


def sharded_equals_whole(rank: int, vocab_size: int) -> list[Tensor]:
    """Every option on this rank's columns against the call on all of them."""
    size, group = dist.get_world_size(), dist.group.WORLD
    num_columns = -(-vocab_size // (2 * size)) * 2
    columns = slice(rank * num_columns, (rank + 1) * num_columns)
    generator = torch.Generator().manual_seed(vocab_size)
    whole = 3 * torch.randn(9, size * num_columns, generator=generator, dtype=torch.float64)
    # Ranks with nothing but suppressed columns, in both ways of suppressing one.
    whole[3], whole[4] = torch.finfo(torch.float64).min, -math.inf
    whole[3:5, vocab_size - 2 :] = 1e4
    keep = torch.rand(whole.shape, generator=generator) < 0.4
    keep[1], keep[7] = False, True
    labels = torch.randint(0, vocab_size, (9,), generator=generator)
    labels[3:6] = torch.tensor([vocab_size - 1, vocab_size - 1, -100])
    labels[0] = 0
    outputs = []
    for entropy in ("none", "metric", "loss"):
        for mask in (None, keep):
            for rows in (labels, torch.full_like(labels, -100)):
                leaf = whole.clone().requires_grad_()
                part = whole[:, columns].clone().requires_grad_()
                options = {"vocab_size": vocab_size, "temperature": 0.7, "entropy": entropy}
                expected = log_probs_from_logits(leaf, rows, keep_mask=mask, **options)
                result = log_probs_from_logits(
                    part,
                    rows,
                    tp_group=group,
                    keep_mask=mask if mask is None else mask[:, columns],
                    **options,
                )
                torch.testing.assert_close(result.log_probs, expected.log_probs, **EXACT)
                torch.testing.assert_close(result.entropy, expected.entropy, **EXACT)
                (grad,) = gradients(weighted(result.log_probs, result.entropy), part)
                (whole_grad,) = gradients(weighted(expected.log_probs, expected.entropy), leaf)
                torch.testing.assert_close(grad, whole_grad[:, columns], **EXACT)
                outputs += [result.log_probs.detach()]
                outputs += [] if result.entropy is None else [result.entropy.detach()]
    return outputs


def kept_ids_equal_dense(rank: int) -> None:
    group = dist.group.WORLD
    mask, logits = random_mask(8), random_logits(8).detach()
    mask[0, 5] = True
    columns = slice(4 * rank, 4 * rank + 4)
    dense, ids = (
        log_probs_from_logits(logits[:, columns], LABELS, tp_group=group, keep_mask=keep)
        for keep in (mask[:, columns], kept_ids_of(mask))
    )
    assert torch.equal(dense.log_probs, ids.log_probs)


@pytest.mark.parametrize("vocab_size", [23, 3])
def test_two_ranks_equal_one_and_each_other_bit_for_bit(two_ranks: World, vocab_size: int) -> None:
    # Of 3 columns the second rank has none.
    first, second = two_ranks.run(sharded_equals_whole, vocab_size)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_four_ranks_equal_one_and_each_other_bit_for_bit(four_ranks: World) -> None:
    first, *others = four_ranks.run(sharded_equals_whole, 17)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_kept_ids_are_those_of_the_whole_vocabulary_on_every_rank(two_ranks: World) -> None:
    two_ranks.run(kept_ids_equal_dense)
