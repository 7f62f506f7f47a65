"""Ranks that are about to do different things say so, by name, instead of hanging."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.rl.checkpoint_manifest import CheckpointError
from megatron.rl.guard import SkippedStepsError, StepDigest, StepError, agree, agree_on_flags, phase
from megatron.rl.initialize import World as RankWorld
from megatron.rl.watch import Watch
from tests.spawn import World

SAME = StepDigest(step=7, rollout=2, num_micro_batches=3, samples=12345, skipped_steps=0)


IDS = {0: [10, 11], 1: [10, 11], 2: [12, 13]}


def grid_of(rank: int, world_size: int) -> SimpleNamespace:
    return SimpleNamespace(world=RankWorld(rank, rank, world_size), device=torch.device("cpu"))


def agree_or_say_why(rank: int, differing: dict[int, dict[str, int]], stops: list[int]) -> str:
    digest = replace(SAME, **differing.get(rank, {}))
    try:
        return f"stop {agree(digest, stops[rank], IDS[rank], grid_of(rank, len(stops)))}"
    except StepError as error:
        return str(error)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3, timeout_s=120) as world:
        yield world


def test_equal_ranks_agree_on_the_strongest_wish_to_stop(three_ranks: World) -> None:
    assert three_ranks.run(agree_or_say_why, {}, [0, 0, 0]) == ["stop 0"] * 3
    assert three_ranks.run(agree_or_say_why, {}, [0, 4, 1]) == ["stop 4"] * 3


def test_every_rank_names_the_fields_and_ranks_that_differ(three_ranks: World) -> None:
    differing = {1: {"samples": 5}, 2: {"samples": 6, "num_micro_batches": 4}}
    message = (
        "ranks are about to take different steps (step 7); "
        "num_micro_batches: rank 2 has 4, rank 0 has 3; "
        "samples: rank 1 has 5, rank 2 has 6, rank 0 has 12345; "
        "samples [10, 11] on rank 0, 1, [12, 13] on rank 2"
    )
    assert three_ranks.run(agree_or_say_why, differing, [0, 0, 0]) == [message] * 3


def flags_or_say_why(rank: int, written: list[str]) -> str:
    try:
        agree_on_flags(written[rank])
    except StepError as error:
        return str(error)
    return "same"


def test_every_rank_names_the_flags_that_differ(three_ranks: World) -> None:
    written = "seed: 1\nlr: 0.1\n"
    assert three_ranks.run(flags_or_say_why, [written] * 3) == ["same"] * 3
    message = (
        "all ranks must have the same flags; --seed: 1 on rank 0, 1, 7 on rank 2; fix: start every "
        "rank with the same command line, --config file and --hf-checkpoint"
    )
    assert (
        three_ranks.run(flags_or_say_why, [written] * 2 + ["seed: 7\nlr: 0.1\n"]) == [message] * 3
    )


def test_an_error_in_a_phase_names_rank_step_and_samples() -> None:
    with (
        pytest.raises(
            StepError, match=r"^rank 1, step 3, training \(samples 4, 5\): OSError: gone$"
        ),
        phase("training", 3, Watch(1, 2), "4, 5"),
    ):
        raise OSError("gone")


def test_a_step_error_is_told_once() -> None:
    with pytest.raises(StepError, match=r"^inner$"), phase("training", 3, Watch(0, 1)):
        raise StepError("inner")


def test_a_checkpoint_that_cannot_be_written_is_told_once_without_a_trace() -> None:
    message = r"^rank 1, step 3, saving: no room$"
    with pytest.raises(StepError, match=message) as raised, phase("saving", 3, Watch(1, 2)):
        raise CheckpointError("no room") from OSError()
    assert raised.value.__cause__ is None


def test_a_start_lets_its_refusals_pass() -> None:
    watch = Watch(1, 2)
    with (
        pytest.raises(ValueError, match=r"^flag$"),
        phase("building the model", 0, watch, lets_pass=(ValueError,)),
    ):
        raise ValueError("flag")
    with (
        pytest.raises(StepError, match=r"^rank 1, start-up, building the model: OSError: gone$"),
        phase("building the model", 0, watch, lets_pass=(ValueError,)),
    ):
        raise OSError("gone")


def test_too_many_skipped_steps_stay_what_they_are() -> None:
    with pytest.raises(SkippedStepsError, match=r"^many$"), phase("training", 3, Watch(0, 1)):
        raise SkippedStepsError("many")
