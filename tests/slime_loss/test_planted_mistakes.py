"""Mistakes planted in the library: the checks of sharding must notice each, and pass without it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import LossOutput, ReducedMetrics, RLHead, SequenceLayout, TokenBatch
from slime_loss.collectives import all_gather_rows
from tests.slime_loss import sharded_runs
from tests.slime_loss.packs import Case, Sample, all_train, none_trains
from tests.slime_loss.places import Topology, real_place
from tests.slime_loss.sharded_runs import check_sharded, run_rank
from tests.slime_loss.simulated_ranks import CollectiveError
from tests.spawn import RankError, World

FIRST_ALONE_TRAINS = (all_train(3, 3), none_trains(6, 20))
EVERY_RANK_TRAINS = (all_train(3, 9), all_train(1, 12))
SHORT = (all_train(1, 2),)
Plant = Callable[[], Any]


@contextmanager
def instead_of(owner: Any, name: str, planted: Callable[..., Any]) -> Iterator[None]:
    """Within the block owner.name is `planted`, which gets the right function first."""
    right = getattr(owner, name)

    def wrong(*args: Any, **named: Any) -> Any:
        return planted(right, *args, **named)

    with patch.object(owner, name, wrong):
        yield


def a_rank_without_rows_is_detached() -> Any:
    def planted(right: Any, head: RLHead, *args: Any) -> LossOutput:
        output, batch = right(head, *args), args[-1]
        return output if batch.loss_mask.any() else replace(output, loss=output.loss.detach())

    return instead_of(RLHead, "forward", planted)


def entropy_has_no_gradient_on_one_rank() -> Any:
    def planted(right: Any, head: RLHead, *args: Any) -> LossOutput:
        if head.cp_group is None or dist.get_rank(head.cp_group) != 1:
            return right(head, *args)
        with torch.no_grad():
            values = right(head, *args)
        plain = RLHead(
            head.head,
            replace(sharded_runs.VARIANTS["entropy"].config, entropy_coef=0.0),
            vocab_size=head.vocab_size,
            cp_group=head.cp_group,
        )
        loss = right(plain, *args).loss
        return replace(values, loss=loss + (values.loss - loss).detach())

    return instead_of(RLHead, "forward", planted)


def divided_by_the_local_count() -> Any:
    def planted(right: Any, head: RLHead, hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Any:
        count = batch.loss_mask.sum().clamp(min=1)
        wrong = torch.where(batch.loss_mask, 1 / count.double(), 0.0)
        return right(head, hidden, weight, replace(batch, loss_weight=wrong))

    return instead_of(RLHead, "forward", planted)


def metrics_are_not_reduced_where_no_row_trains() -> Any:
    def planted(right: Any, metrics: Any, group: Any) -> ReducedMetrics:
        return right(metrics, group if metrics["active_tokens"].value > 0 else None)

    return instead_of(sharded_runs, "reduce_metrics", planted)


def no_gather_where_no_token_is_held() -> Any:
    def planted(right: Any, layout: SequenceLayout, local: Tensor, group: Any) -> Tensor:
        if (layout.token_index >= 0).any():
            return right(layout, local, group)
        return local.new_zeros(layout.pack_rows, *local.shape[1:])

    return instead_of(SequenceLayout, "gather", planted)


def only_held_tokens_are_gathered() -> Any:
    def planted(right: Any, layout: SequenceLayout, local: Tensor, group: Any) -> Tensor:
        all_gather_rows(local[layout.token_index >= 0], group)
        return right(layout, local, group)

    return instead_of(SequenceLayout, "gather", planted)


def one_rank_computes_in_lower_precision() -> Any:
    def planted(right: Any, layout: SequenceLayout, local: Tensor, group: Any) -> Tensor:
        trains = (layout.token_index >= 0).any()
        return right(layout, local if trains else local.float(), group).double()

    return instead_of(SequenceLayout, "gather", planted)


def a_maximum_is_averaged() -> Any:
    def planted(right: Any, metrics: Any, group: Any) -> ReducedMetrics:
        found, name = right(metrics, group), "advantages_max"
        if group is None:
            return found
        mean = metrics[name].value[0].nan_to_num(posinf=0.0, neginf=0.0)
        dist.all_reduce(mean, group=group)
        wrong = {name: float(mean) / dist.get_world_size(group)}
        return replace(found, scalars=found.scalars | wrong)

    return instead_of(sharded_runs, "reduce_metrics", planted)


@dataclass(frozen=True)
class Mistake:
    """A mistake, a case that it breaks, and what the check says."""

    plant: Plant
    case: Case
    error: type[AssertionError]
    message: str


def on_ranks(variant: str, samples: tuple[Sample, ...], layout: str = "contiguous") -> Case:
    return Case(variant, samples, Topology(cp_size=4), layout)


HANG = "a collective must be called by every rank of its group: .*"
DIFFERENT = "ranks of one group must call the same: .*"
MISTAKES = [
    Mistake(
        a_rank_without_rows_is_detached,
        on_ranks("ppo", FIRST_ALONE_TRAINS),
        CollectiveError,
        DIFFERENT + "in backward, rank . waits in .* in whitening",
    ),
    Mistake(
        a_rank_without_rows_is_detached,
        replace(on_ranks("ppo", FIRST_ALONE_TRAINS), frozen="hidden"),
        AssertionError,
        "rank 1 has a loss with requires_grad=False",
    ),
    Mistake(
        entropy_has_no_gradient_on_one_rank,
        on_ranks("entropy", EVERY_RANK_TRAINS, "zigzag"),
        AssertionError,
        "gradient of weight",
    ),
    Mistake(
        divided_by_the_local_count,
        on_ranks("ppo", EVERY_RANK_TRAINS),
        AssertionError,
        "loss of rank 0",
    ),
    Mistake(
        metrics_are_not_reduced_where_no_row_trains,
        on_ranks("sft", FIRST_ALONE_TRAINS),
        CollectiveError,
        DIFFERENT + "in metrics",
    ),
    Mistake(
        no_gather_where_no_token_is_held,
        on_ranks("log-probs alone", SHORT),
        CollectiveError,
        DIFFERENT + "in moving the hidden states",
    ),
    Mistake(
        only_held_tokens_are_gathered,
        on_ranks("logits", FIRST_ALONE_TRAINS),
        CollectiveError,
        DIFFERENT + "moving the hidden states",
    ),
    Mistake(
        one_rank_computes_in_lower_precision,
        on_ranks("ppo", SHORT),
        CollectiveError,
        DIFFERENT,
    ),
    Mistake(
        a_maximum_is_averaged, on_ranks("ppo", EVERY_RANK_TRAINS), AssertionError, "advantages_max"
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.plant.__name__)
def test_a_planted_mistake_is_noticed(mistake: Mistake) -> None:
    check_sharded(mistake.case)
    with mistake.plant(), pytest.raises(mistake.error, match=mistake.message):
        check_sharded(mistake.case)
    check_sharded(mistake.case)


def detached_on_real_ranks(rank: int, case: Case, is_planted: bool) -> bool:
    place = real_place(case.topology, rank)
    if not is_planted:
        return run_rank(case, place).requires_grad
    with a_rank_without_rows_is_detached():
        return run_rank(case, place).requires_grad


@pytest.mark.slow
def test_a_detached_rank_ends_real_ranks_in_bounded_time() -> None:
    case = Case("ppo", FIRST_ALONE_TRAINS, Topology(cp_size=2))
    with World(2, timeout_s=20.0) as world:
        assert world.run(detached_on_real_ranks, case, False) == [True, True]
        with pytest.raises(RankError):
            world.run(detached_on_real_ranks, case, True)
