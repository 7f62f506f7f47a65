"""Gradients formed in the forward: those of the other way, bit for bit, and what they cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import (
    HeadConfig,
    LossOutput,
    PolicyLossConfig,
    RLHead,
    TokenBatch,
    gradient_sums,
    projection,
)
from tests.slime_loss.head_packs import (
    CONFIGS,
    HEAD,
    PACKS,
    PADDED_VOCAB,
    VOCAB,
    Pack,
    assert_same_metrics,
    by_loops,
    head_for,
    make_pack,
)
from tests.slime_loss.recording import recorded_collectives
from tests.slime_loss.reference_log_probs import EXACT, plain, saved_for_backward
from tests.slime_loss.references import gradients
from tests.spawn import World

# Of the rows that train, in the order of the pack; True has an advantage of 0.
NO_GRADIENT = {
    "none": lambda number: torch.zeros(number, dtype=torch.bool),
    "every other": lambda number: torch.arange(number) % 2 == 1,
    "most": lambda number: torch.arange(number) % 5 != 2,
    "first half": lambda number: torch.arange(number) < number // 2,
    "all": lambda number: torch.ones(number, dtype=torch.bool),
}


def pack_with(no_gradient: str, *, masked: bool = True, dtype: torch.dtype = torch.float64) -> Pack:
    """The usual pack, where some of the trained rows have no gradient."""
    pack = make_pack(PACKS["usual"], dtype=dtype)
    advantages = pack.batch.advantages.clone()
    trained = pack.batch.loss_mask.nonzero().squeeze(1)
    advantages[trained[NO_GRADIENT[no_gradient](len(trained))]] = 0
    kept_ids = pack.batch.kept_ids if masked else None
    pack.batch = replace(pack.batch, advantages=advantages, kept_ids=kept_ids)
    return pack


def not_separable(head: RLHead) -> RLHead:
    head.objective = replace(head.objective, is_row_separable=False)
    return head


def results(pack: Pack, head: RLHead, bias: Tensor) -> list[Tensor]:
    """The loss, every metric and every gradient."""
    output = head(pack.hidden, pack.weight, pack.batch, bias=bias)
    grads = torch.autograd.grad(output.loss, (pack.hidden, pack.weight, bias))
    metrics = [metric.value for metric in output.metrics.values()]
    return [output.loss.detach(), *metrics, *grads]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("no_gradient", NO_GRADIENT)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_loss_function_changes_no_bit(
    config: PolicyLossConfig, no_gradient: str, masked: bool, dtype: torch.dtype
) -> None:
    pack = pack_with(no_gradient, masked=masked, dtype=dtype)
    bias = torch.linspace(-1, 1, PADDED_VOCAB).to(dtype).requires_grad_()
    for chunk_rows in (None, 3):
        way = replace(HEAD, log_probs_chunk_size=chunk_rows)
        again = replace(way, recompute_loss_function=True)
        found = [
            results(pack, head, bias)
            for head in (
                RLHead(way, config, vocab_size=VOCAB),
                RLHead(again, config, vocab_size=VOCAB),
                not_separable(RLHead(way, config, vocab_size=VOCAB)),
                not_separable(RLHead(again, config, vocab_size=VOCAB)),
            )
        ]
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("no_gradient", NO_GRADIENT)
@pytest.mark.parametrize("chunk_rows", [None, 1, 5])
def test_any_chunk_and_any_share_of_rows_with_gradient_is_the_loop(
    config: PolicyLossConfig, no_gradient: str, chunk_rows: int | None
) -> None:
    pack = pack_with(no_gradient)
    head = RLHead(replace(HEAD, log_probs_chunk_size=chunk_rows), config, vocab_size=VOCAB)
    output, expected = head(pack.hidden, pack.weight, pack.batch), by_loops(pack, config)
    torch.testing.assert_close(output.loss, expected.loss, **EXACT)
    assert_same_metrics(output, expected)
    leaves = pack.hidden, pack.weight
    torch.testing.assert_close(
        gradients(-3.5 * output.loss, *leaves), gradients(-3.5 * expected.loss, *leaves), **EXACT
    )


def test_the_backward_runs_as_often_as_one_likes_and_leaves_its_results_alone() -> None:
    pack, head = pack_with("every other"), head_for(CONFIGS["entropy"])
    before = pack.hidden.detach().clone(), pack.weight.detach().clone()
    loss = head(pack.hidden, pack.weight, pack.batch).loss
    leaves = pack.hidden, pack.weight
    first = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(-loss, leaves, retain_graph=True)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    for one, copy, other, leaf in zip(first, copies, second, leaves, strict=True):
        assert torch.equal(one, copy)
        torch.testing.assert_close(one, -2 * other, **EXACT)
        torch.testing.assert_close(leaf.grad, 2 * one, **EXACT)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert torch.equal(pack.hidden, before[0])
    assert torch.equal(pack.weight, before[1])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_each_input_alone_may_train(config: PolicyLossConfig, trained: str) -> None:
    pack, head = pack_with("every other"), head_for(config)
    inputs = {
        "hidden": pack.hidden,
        "weight": pack.weight,
        "bias": torch.linspace(-1, 1, PADDED_VOCAB).double().requires_grad_(),
    }
    whole = head(inputs["hidden"], inputs["weight"], pack.batch, bias=inputs["bias"]).loss
    (expected,) = torch.autograd.grad(whole, inputs[trained])
    alone = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    alone[trained].requires_grad_()
    with products() as rows:
        head(alone["hidden"], alone["weight"], pack.batch, bias=alone["bias"]).loss.backward()
    assert torch.equal(alone[trained].grad, expected)
    assert all(alone[name].grad is None for name in inputs if name != trained)
    assert len(rows) == (1 if trained == "bias" else 2)


@contextmanager
def products() -> Iterator[list[int]]:
    """The rows of logits, or of their gradient, that each matrix product inside the block has."""
    rows: list[int] = []
    original = projection.add_product_

    def counted(out: Tensor, left: Tensor, right: Tensor, **options: Any) -> None:
        # [rows, H] @ [H, V], [rows, V] @ [V, H] or [V, rows] @ [rows, H].
        is_weight = out.shape == (VOCAB, right.shape[1]) and left.shape[0] == VOCAB
        rows.append(left.shape[1] if is_weight else left.shape[0])
        original(out, left, right, **options)

    with (
        patch.object(projection, "add_product_", counted),
        patch.object(gradient_sums, "add_product_", counted),
    ):
        yield rows


def count_rows(head: RLHead, pack: Pack) -> tuple[int, int]:
    """The rows of all products in the forward, and in the backward."""
    with products() as forward:
        loss = head(pack.hidden, pack.weight, pack.batch).loss
    with products() as backward:
        torch.autograd.grad(loss, (pack.hidden, pack.weight))
    return sum(forward), sum(backward)


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_rows_without_gradient_reach_no_product_but_that_of_the_logits(
    chunk_rows: int | None,
) -> None:
    num_trained = int(make_pack(PACKS["usual"]).batch.loss_mask.sum())
    way = replace(HEAD, log_probs_chunk_size=chunk_rows)
    again = replace(way, recompute_loss_function=True)
    for no_gradient, flags in NO_GRADIENT.items():
        pack, active = pack_with(no_gradient), int((~flags(num_trained)).sum())
        # On policy, so that nothing is clipped.
        pack.batch = replace(pack.batch, old_log_probs=None)
        fused = RLHead(way, CONFIGS["metric"], vocab_size=VOCAB)
        assert count_rows(fused, pack) == (num_trained + 2 * active, 0)
        recomputed = RLHead(again, CONFIGS["metric"], vocab_size=VOCAB)
        forward, backward = count_rows(recomputed, pack)
        assert forward == num_trained
        # A chunk whose rows all have no gradient is not projected again.
        chunks = (~flags(num_trained)).split(chunk_rows or num_trained)
        again_projected = sum(len(chunk) for chunk in chunks if chunk.any())
        assert backward == again_projected + 2 * active


def test_without_gradient_there_is_one_product() -> None:
    pack, head = pack_with("none"), head_for(CONFIGS["entropy"])
    expected = head(pack.hidden, pack.weight, pack.batch)
    with torch.no_grad(), products() as rows, saved_for_backward() as saved:
        output = head(pack.hidden, pack.weight, pack.batch)
    assert rows == [int(pack.batch.loss_mask.sum())]
    assert not saved
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, expected.loss)
    frozen = head(pack.hidden.detach(), pack.weight.detach(), pack.batch)
    assert torch.equal(frozen.loss, expected.loss)


def test_nothing_of_the_size_of_the_logits_is_kept() -> None:
    pack = pack_with("none", masked=False)
    for config in CONFIGS.values():
        with saved_for_backward() as saved:
            output = head_for(config)(pack.hidden, pack.weight, pack.batch)
        shapes = {tuple(tensor.shape) for tensor in saved if tensor.dim() == 2}
        assert shapes == {(int(pack.batch.loss_mask.sum()), 5), (PADDED_VOCAB, 5)}
        assert output.loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_error_is_at_most_twice_plain_torch_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, 96, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(3000, 96, generator=generator) + 0.2).to(dtype)
    batch = make_pack([(65, 64)]).batch
    batch = replace(batch.select(torch.arange(64)), kept_ids=None)
    config = replace(CONFIGS["entropy"], entropy_coef=0.1)
    found = []
    for kind in (dtype, torch.float32, torch.float64):
        leaves = [tensor.to(kind).requires_grad_() for tensor in (hidden, weight)]
        if not found:
            small = HeadConfig(rollout_temperature=0.7, log_probs_chunk_size=10)
            head = RLHead(small, config, vocab_size=3000)
            loss = head(*leaves, batch).loss
        else:
            log_probs = plain(leaves[0] @ leaves[1].t(), batch.labels, temperature=0.7)
            loss = head.objective.function(*log_probs, batch).loss
        grads = gradients(loss, *leaves)
        if kind != torch.float64:
            # Gradients are handed over in the dtype of the inputs: plain torch rounds them too.
            grads = [grad.to(dtype) for grad in grads]
        found.append(grads)
    for ours, theirs, exact in zip(*found, strict=True):
        our_error, their_error = ((one.double() - exact).abs() for one in (ours, theirs))
        assert our_error.max() <= 2 * their_error.max()
        assert our_error.mean() <= 2 * their_error.mean()


# Real ranks.


def fused_on_ranks(rank: int, sequence_parallel: bool) -> list[Any]:
    """Chunk after chunk over the ranks against one process, and the collectives of that."""
    size = dist.get_world_size()
    recorded: list[Any] = []
    for name, config in CONFIGS.items():
        for no_gradient in NO_GRADIENT:
            pack = pack_with(no_gradient, masked=name != "sft")
            whole = head_for(config)(pack.hidden, pack.weight, pack.batch)
            of_whole = gradients(2 * whole.loss, pack.hidden, pack.weight)
            found = [
                rank_results(pack, rank, size, way, config, sequence_parallel)
                for way in (
                    replace(HEAD, log_probs_chunk_size=5),
                    replace(HEAD, log_probs_chunk_size=5, recompute_loss_function=True),
                )
            ]
            for output, grads, calls in found:
                torch.testing.assert_close(output.loss, whole.loss, **EXACT)
                assert_same_metrics(output, whole)
                for grad, expected in zip(grads, of_whole, strict=True):
                    share = len(grad) != len(expected)
                    part = slice(rank * len(grad), (rank + 1) * len(grad)) if share else slice(None)
                    torch.testing.assert_close(grad, expected[part], **EXACT)
                recorded += [output.loss.detach(), calls]
            assert torch.equal(found[0][0].loss, found[1][0].loss)
            # The scale is a power of two, so that it changes no bit either.
            assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    return recorded


def rank_results(
    pack: Pack, rank: int, size: int, way: HeadConfig, config: PolicyLossConfig, split: bool
) -> tuple[LossOutput, tuple[Tensor, ...], list[Any]]:
    head = RLHead(way, config, vocab_size=VOCAB, tp_group=dist.group.WORLD, sequence_parallel=split)
    num_rows, num_columns = len(pack.hidden) // size, PADDED_VOCAB // size
    rows = slice(rank * num_rows, (rank + 1) * num_rows) if split else slice(None)
    hidden = pack.hidden[rows].detach().clone().requires_grad_()
    columns = slice(rank * num_columns, (rank + 1) * num_columns)
    weight = pack.weight[columns].detach().clone().requires_grad_()
    with recorded_collectives() as calls:
        output = head(hidden, weight, pack.batch)
        grads = torch.autograd.grad(2 * output.loss, (hidden, weight))
    return output, grads, calls


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(two_ranks: World, sequence_parallel: bool) -> None:
    first, second = two_ranks.run(fused_on_ranks, sequence_parallel)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    fused = [name for name, _ in first[1]]
    # 26 of 46 rows, in chunks of 5; ranks that have other rows of the pack must call as often.
    statistics = ["all_gather_rows"] * 10
    assert sum(shape[0] == 0 for _, shape in first[1]) == 4
    if sequence_parallel:
        assert fused == ["all_gather_rows", *statistics, "reduce_scatter_rows"]
    else:
        assert fused == [*statistics, "all_reduce_sum_"]


@pytest.mark.parametrize("sequence_parallel", [False])
def test_four_ranks_equal_one(four_ranks: World, sequence_parallel: bool) -> None:
    first, *others = four_ranks.run(fused_on_ranks, sequence_parallel)
    for other in others:
        assert all(same(a, b) for a, b in zip(first, other, strict=True))


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_a_gradient_is_not_differentiated_again(recompute: bool, loss_type: str) -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    batch = TokenBatch(
        labels=torch.tensor([1, 2, 3]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        loss_weight=torch.ones(3),
        sample_index=torch.zeros(3, dtype=torch.int64),
        advantages=torch.ones(3),
    )
    head = RLHead(
        HeadConfig(recompute_loss_function=recompute),
        PolicyLossConfig(loss_type=loss_type),
        vocab_size=7,
    )
    loss = head(hidden, weight, batch).loss
    with pytest.raises(RuntimeError, match="must not be differentiated again"):
        torch.autograd.grad(loss, hidden, create_graph=True)
