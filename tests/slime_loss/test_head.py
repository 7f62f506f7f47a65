"""The head as a trainer calls it: against loops, over every layout, on real ranks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import PolicyLossConfig, merge_metrics
from slime_loss.head import RLHead
from slime_loss.layout import ContiguousLayout, PaddedLayout, SequenceLayout, ZigzagLayout
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
from tests.slime_loss.reference_log_probs import EXACT, log_probs_of_rows
from tests.slime_loss.references import gradients
from tests.spawn import World


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("samples", PACKS.values(), ids=PACKS)
def test_the_loss_is_the_objective_of_the_looped_log_probs(
    samples: list[tuple[int, int]], config: PolicyLossConfig
) -> None:
    pack = make_pack(samples)
    output = head_for(config)(pack.hidden, pack.weight, pack.batch)
    expected = by_loops(pack, config)
    assert output.loss.requires_grad
    torch.testing.assert_close(output.loss, expected.loss, **EXACT)
    assert_same_metrics(output, expected)
    leaves = pack.hidden, pack.weight
    torch.testing.assert_close(
        gradients(output.loss, *leaves), gradients(expected.loss, *leaves), **EXACT
    )


def test_log_probs_come_without_loss_and_without_entropy() -> None:
    pack = make_pack(PACKS["usual"])
    head = head_for(CONFIGS["entropy"])
    result = head.log_probs(pack.hidden, pack.weight, pack.batch)
    expected, _ = log_probs_of_rows(
        pack.hidden @ pack.weight.t(),
        pack.batch.trained_labels,
        vocab_size=VOCAB,
        temperature=0.7,
        keep_mask=pack.batch.kept_ids.mask(0, PADDED_VOCAB),
    )
    torch.testing.assert_close(result.log_probs, expected, **EXACT)
    assert result.entropy is None
    assert list(head.parameters()) == []


def test_a_bias_is_added_to_the_logits() -> None:
    pack = make_pack(PACKS["usual"])
    bias = torch.randn(PADDED_VOCAB, dtype=torch.float64, requires_grad=True)
    head = head_for(CONFIGS["metric"])
    output = head(pack.hidden, pack.weight, pack.batch, bias=bias)
    wide_hidden = torch.cat([pack.hidden, torch.ones(len(pack.hidden), 1).double()], dim=1)
    wide_weight = torch.cat([pack.weight, bias[:, None]], dim=1)
    expected = head(wide_hidden, wide_weight, pack.batch)
    leaves = pack.hidden, pack.weight, bias
    torch.testing.assert_close(output.loss, expected.loss, **EXACT)
    torch.testing.assert_close(
        gradients(output.loss, *leaves), gradients(expected.loss, *leaves), **EXACT
    )
    for result, same in zip(
        vars(head.log_probs(pack.hidden, pack.weight, pack.batch, bias=bias)).values(),
        vars(head.log_probs(wide_hidden, wide_weight, pack.batch)).values(),
        strict=True,
    ):
        torch.testing.assert_close(result, same, **EXACT)


def test_chunk_size_and_memory_of_the_config_are_used() -> None:
    pack = make_pack(PACKS["usual"])
    expected = head_for(CONFIGS["entropy"])(pack.hidden, pack.weight, pack.batch)
    small = RLHead(
        replace(HEAD, log_probs_chunk_size=3, log_probs_memory_mb=1),
        CONFIGS["entropy"],
        vocab_size=VOCAB,
    )
    output = small(pack.hidden, pack.weight, pack.batch)
    torch.testing.assert_close(output.loss, expected.loss, **EXACT)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_a_row_that_does_not_train_holds_changes_no_bit(config: PolicyLossConfig) -> None:
    results = []
    for poison, label in ((0.0, 0), (math.nan, 10**9), (math.inf, -7), (1e30, -100)):
        pack = make_pack(PACKS["usual"])
        excluded = ~pack.batch.loss_mask
        with torch.no_grad():
            pack.hidden[excluded] = poison
        streams = {
            name: torch.where(excluded, poison, stream)
            for name, stream in vars(pack.batch).items()
            if isinstance(stream, Tensor) and stream.is_floating_point()
        }
        labels = torch.where(excluded, label, pack.batch.labels)
        batch = replace(pack.batch, labels=labels, **streams)
        output = head_for(config)(pack.hidden, pack.weight, batch)
        found = gradients(output.loss, pack.hidden, pack.weight)
        numbers = [metric.value for metric in output.metrics.values()]
        results.append([output.loss.detach(), *found, *numbers])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("config", [CONFIGS["metric"], CONFIGS["entropy"]], ids=["0", "0.01"])
@pytest.mark.parametrize("samples", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("kind", [ContiguousLayout, ZigzagLayout, PaddedLayout])
def test_every_layout_and_cp_size_gives_the_same_loss_gradient_and_metrics(
    kind: type, samples: list[tuple[int, int]], config: PolicyLossConfig
) -> None:
    pack, head = make_pack(samples), head_for(config)
    expected = head(pack.hidden, pack.weight, pack.batch)
    expected_grads = gradients(expected.loss, pack.hidden, pack.weight)
    for cp_size in [1] if kind is PaddedLayout else range(1, 9):
        layouts = (
            [PaddedLayout(pack.lengths, pad_to_multiple_of=4)]
            if kind is PaddedLayout
            else [
                kind(pack.lengths, cp_rank=rank, cp_size=cp_size, pad_to_multiple_of=2)
                for rank in range(cp_size)
            ]
        )
        outputs = []
        for layout in layouts:
            hidden, batch = pack.local(layout)
            outputs.append(head(hidden, pack.weight, batch))
        for output in outputs:
            assert output.loss.requires_grad
            assert output.loss.dtype == torch.float64
        total = torch.stack([output.loss for output in outputs]).sum()
        torch.testing.assert_close(total, expected.loss, **EXACT)
        merged = merge_metrics([output.metrics for output in outputs])
        assert_same_metrics(replace(expected, metrics=merged), expected)
        torch.testing.assert_close(
            gradients(total, pack.hidden, pack.weight), expected_grads, **EXACT
        )


def test_low_precision_is_the_same_dtype_on_a_rank_without_rows() -> None:
    pack = make_pack(PACKS["first sample alone trains"], dtype=torch.bfloat16)
    head = head_for(CONFIGS["entropy"])
    seen = set()
    for rank in range(4):
        hidden, batch = pack.local(ContiguousLayout(pack.lengths, cp_rank=rank, cp_size=4))
        local = hidden.detach().requires_grad_()
        result = head.log_probs(local, pack.weight, batch)
        output = head(local, pack.weight, batch)
        grads = torch.autograd.grad(output.loss, (local, pack.weight))
        needs_grad = result.log_probs.requires_grad and output.loss.requires_grad
        seen.add((result.log_probs.dtype, needs_grad, *(grad.dtype for grad in grads)))
    assert seen == {(torch.float32, True, torch.bfloat16, torch.bfloat16)}


def test_the_head_says_how_its_gradients_come_about() -> None:
    fused = head_for(CONFIGS["metric"])
    assert fused.describe() == "fused gradients (3 products): the loss of a row is its own"
    small = RLHead(replace(HEAD, log_probs_memory_mb=64), CONFIGS["metric"], vocab_size=VOCAB)
    assert "(3 products, 64 MiB of logits at a time)" in small.describe()
    again = replace(HEAD, recompute_loss_function=True)
    recomputed = RLHead(again, CONFIGS["metric"], vocab_size=VOCAB)
    expected = "recomputed logits (4 products): recompute_loss_function asks for it"
    assert recomputed.describe() == expected
    fused.objective = replace(fused.objective, is_row_separable=False)
    assert fused.describe().endswith("the loss sees whole samples")
    for options in (
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{FUNCTIONS}:ratio_loss"},
        {"use_tis": True, "custom_tis_function_path": f"{FUNCTIONS}:bounded_correction"},
    ):
        described = RLHead(HEAD, PolicyLossConfig(**options), vocab_size=VOCAB).describe()
        path = next(path for path in options.values() if FUNCTIONS in str(path))
        assert described.endswith(f"products): {path} has no row_separable = True")
    gspo = PolicyLossConfig(policy_objective="gspo", **options)
    of_samples = RLHead(HEAD, gspo, vocab_size=VOCAB)
    assert of_samples.describe().endswith("the loss sees whole samples")


FUNCTIONS = "tests.slime_loss.user_functions"


# Real ranks: tensor parallel inside context parallel.


def head_on_ranks(rank: int, kind: type, tp_size: int, sequence_parallel: bool) -> list[Any]:
    """The head over tp_size x cp_size ranks against one process; the collectives it made."""
    cp_size = dist.get_world_size() // tp_size
    cp_rank, tp_rank = divmod(rank, tp_size)
    tp_groups = [
        dist.new_group(list(range(first, first + tp_size)))
        for first in range(0, cp_size * tp_size, tp_size)
    ]
    cp_groups = [
        dist.new_group(list(range(first, cp_size * tp_size, tp_size))) for first in range(tp_size)
    ]
    groups = {"tp_group": tp_groups[cp_rank], "cp_group": cp_groups[tp_rank]}
    recorded = []
    for samples in PACKS.values():
        for config in CONFIGS.values():
            pack = make_pack(samples)
            layout = kind(
                pack.lengths, cp_rank=cp_rank, cp_size=cp_size, pad_to_multiple_of=tp_size
            )
            head = head_for(config, sequence_parallel=sequence_parallel, **groups)
            with recorded_collectives() as calls:
                check_head(pack, layout, head, tp_rank, tp_size)
            recorded.append(calls)
    return recorded


def check_head(
    pack: Pack, layout: SequenceLayout, head: RLHead, tp_rank: int, tp_size: int
) -> None:
    expected = head_for(head.loss)(pack.hidden, pack.weight, pack.batch)
    of_hidden, of_weight = gradients(expected.loss, pack.hidden, pack.weight)

    rows, columns = slice(None), slice(None)
    if head.sequence_parallel:
        width = layout.num_rows // tp_size
        rows = slice(tp_rank * width, (tp_rank + 1) * width)
    width = PADDED_VOCAB // tp_size
    columns = slice(tp_rank * width, (tp_rank + 1) * width)
    all_rows, batch = pack.local(layout)
    hidden = all_rows[rows].detach().clone().requires_grad_()
    weight = pack.weight[columns].detach().clone().requires_grad_()
    output = head(hidden, weight, batch)
    grad_hidden, grad_weight = torch.autograd.grad(output.loss, (hidden, weight))

    torch.testing.assert_close(grad_hidden, layout.shard(of_hidden)[rows], **EXACT)
    # Over the context-parallel ranks the loss is a plain sum, and so is the weight's gradient.
    loss = output.loss.detach().clone()
    dist.all_reduce(loss, group=head.cp_group)
    dist.all_reduce(grad_weight, group=head.cp_group)
    torch.testing.assert_close(loss, expected.loss, **EXACT)
    torch.testing.assert_close(grad_weight, of_weight[columns], **EXACT)
    # Log-probs travel to other layouts: a rank without rows takes part, with the same dtype.
    local = head.log_probs(hidden, weight, batch).log_probs
    everywhere = layout.gather(local, head.cp_group)
    whole = head_for(head.loss).log_probs(pack.hidden, pack.weight, pack.batch).log_probs
    torch.testing.assert_close(everywhere, whole, **EXACT)
    (of_own,) = torch.autograd.grad(everywhere.sum(), hidden)
    (of_whole,) = gradients(layout.cp_size * whole.sum(), pack.hidden)
    torch.testing.assert_close(of_own, layout.shard(of_whole)[rows], **EXACT)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_equal_one(two_ranks: World, sequence_parallel: bool) -> None:
    first, second = two_ranks.run(head_on_ranks, ContiguousLayout, 2, sequence_parallel)
    assert first == second
    assert all(calls for calls in first)


@pytest.mark.parametrize("kind", [ContiguousLayout, ZigzagLayout])
def test_two_context_parallel_ranks_equal_one(two_ranks: World, kind: type) -> None:
    first, second = two_ranks.run(head_on_ranks, kind, 1, False)
    assert [[name for name, _ in calls] for calls in first] == [
        [name for name, _ in calls] for calls in second
    ]


@pytest.mark.parametrize("kind", [ContiguousLayout, ZigzagLayout])
def test_tensor_inside_context_parallel_equals_one(four_ranks: World, kind: type) -> None:
    ranks = four_ranks.run(head_on_ranks, kind, 2, True)
    # What is sized by the trained rows agrees inside tensor-parallel groups; the kind and order
    # of collectives agrees everywhere.
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    names = [[[name for name, _ in calls] for calls in rank] for rank in ranks]
    assert names[0] == names[2]
