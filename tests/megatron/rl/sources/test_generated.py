"""Rollouts that a run makes: what is drawn, scored, filtered, counted and written."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron.rl.engines import Completion, Request, Sampling
from megatron.rl.prompts import Prompt, PromptSource
from megatron.rl.rewards import RewardInput, Rewards, SampleError
from megatron.rl.samples import RowRules
from megatron.rl.sources import ReadOptions, Spool
from megatron.rl.sources.generated import GeneratedRollouts, GenerationConfig, NoSampleError
from megatron.rl.sources.spooled import SpooledSource
from megatron.rl.text import TokenizerConfig, build_tokenizer
from slime_loss import ConfigError

NUM_PROMPTS = 5


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Prompts:
    """Prompt i is the id i, twice."""

    fingerprint = "five"

    def __len__(self) -> int:
        return NUM_PROMPTS

    def read(self, positions: Sequence[int]) -> list[Prompt]:
        return [
            Prompt(np.array([i, i]), f"text {i}", None, f"label {i}", {"i": i}, f"here:{i}")
            for i in positions
        ]


class Engine:
    """Answers with the sample's number, as often as its place in the group says."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.version = -1
        self.aborts = False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.asked += requests
        return [self._answer(request, sampling) for request in requests]

    def _answer(self, request: Request, sampling: Sampling) -> Completion:
        length = 0 if self.aborts else request.index % 4 + 1
        status = "truncated" if length == sampling.max_response_length else "completed"
        return Completion(
            index=request.index,
            tokens=np.full(length, request.index),
            log_probs=np.full(length, -0.5, np.float32),
            status="aborted" if self.aborts else status,
            weight_version=self.version,
        )

    def refresh(self, weight_version: int) -> None:
        self.version = weight_version

    def close(self) -> None:
        pass


class Scorer:
    """Rewards by the sample's number; None is a failure."""

    def __init__(self, rewards: dict[int, float | None]) -> None:
        self.rewards = rewards
        self.seen: list[RewardInput] = []

    def score(self, samples: Sequence[RewardInput]) -> Rewards:
        self.seen += samples
        found = [self.rewards.get(sample.index, 0.0) for sample in samples]
        failed = [s.index for s, reward in zip(samples, found, strict=True) if reward is None]
        return Rewards(
            rewards=np.array([np.nan if reward is None else reward for reward in found]),
            scored=np.array([reward is not None for reward in found]),
            parts={"twice": np.array([np.nan if r is None else 2 * r for r in found])},
            errors=tuple(SampleError(index, "no answer") for index in failed),
            num_errors=len(failed),
        )


def source(folder: Path, rewards: dict[int, float | None], **fields: object) -> SpooledSource:
    """Rollouts of two prompts with four responses each."""
    config = GenerationConfig(**{"rollout_batch_size": 2, "n_samples_per_prompt": 4, **fields})
    spool = Spool(folder / "spool")
    maker = GeneratedRollouts(
        prompts=PromptSource(Prompts(), shuffle=False),
        engine=Engine(),
        rewards=Scorer(rewards),
        tokenizer=build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=1000)),
        sampling=Sampling(4),
        config=config,
        spool=spool,
        seed=9,
    )
    made = SpooledSource(spool, maker, RowRules(need_reward=True), ReadOptions())
    made.open()
    return made


def indexes(found: object) -> list[int]:
    return found.files.rows["index"][found.places].tolist()


def test_a_rollout_is_what_was_drawn_and_scored(tmp_path: Path) -> None:
    made = source(tmp_path, {i: i / 10 for i in range(8)})
    found = made.rollout(0, 7)
    assert indexes(found) == list(range(8))
    samples = found.files.read(found.places)
    assert [sample.reward for sample in samples] == [i / 10 for i in range(8)]
    assert samples[6].tokens.tolist() == [1, 1, 6, 6, 6]
    assert samples[6].rollout_log_probs.tolist() == [-0.5] * 3
    assert [sample.group_index for sample in samples] == [0] * 4 + [1] * 4
    assert [sample.status for sample in samples] == ["completed"] * 3 + ["truncated"] + [
        "completed"
    ] * 3 + ["truncated"]
    assert found.files.rows["weight_version"].tolist() == [7] * 8
    assert found.scalars["rollout/reward/twice"] == pytest.approx(0.7)
    assert found.scalars["rollout/drawn_prompts"] == 2
    assert found.scalars["rollout/staleness/max"] == 0
    seen = made.maker.rewards.seen[6]
    assert (seen.response, seen.prompt, seen.label, seen.metadata) == (
        "6 6 6",
        "text 1",
        "label 1",
        {"i": 1},
    )


def test_rollouts_go_on_with_the_next_prompts_and_draw_by_sample(tmp_path: Path) -> None:
    made = source(tmp_path, {})
    assert indexes(made.rollout(0, 0)) == list(range(8))
    assert indexes(made.rollout(1, 1)) == list(range(8, 16))
    third = made.rollout(2, 2)
    assert indexes(third) == list(range(16, 24))
    # the fifth prompt, and behind it the first once more, drawn to anew
    assert third.files.read(third.places[-1:])[0].tokens[0] == 0
    assert [r.seed for r in made.maker.engine.asked[-2:]] == [(9, 5, 2), (9, 5, 3)]


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    source(tmp_path, {}).rollout(0, 0)
    again = source(tmp_path, {})
    assert indexes(again.rollout(0, 0)) == list(range(8))
    assert again.maker.engine.asked == []
    assert indexes(again.rollout(1, 3)) == list(range(8, 16))


def test_dynamic_sampling_draws_until_rewards_differ(tmp_path: Path) -> None:
    differing = {1: 1.0, 13: 1.0}  # of prompts 0 and 3
    made = source(tmp_path, differing, dynamic_sampling=True)
    found = made.rollout(0, 0)
    assert indexes(found) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert found.scalars["rollout/drawn_prompts"] == 4
    assert made.spool.get(0).cursor == {"prompt": 4}


def test_dynamic_sampling_ends_with_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = source(tmp_path, {1: 1.0}, dynamic_sampling=True, max_draws=3)
    assert indexes(made.rollout(0, 0)) == [0, 1, 2, 3]
    assert "rollout 0 has 1 prompts in place of 2" in caplog.text
    with pytest.raises(NoSampleError, match=r"no sample of rollout 1 .* fix: "):
        made.rollout(1, 1)


def test_samples_without_reward_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = source(tmp_path, {2: None, 5: None}).rollout(0, 0)
    assert indexes(found) == [0, 1, 3, 4, 6, 7]
    assert found.scalars["rollout/reward_errors"] == 2
    assert "2 responses have no reward and are left out, the first: sample 2: no" in caplog.text
    with pytest.raises(NoSampleError, match=r"8 without reward, the first: sample 0: no answer"):
        source(tmp_path / "other", dict.fromkeys(range(8))).rollout(0, 0)


def test_aborted_responses_are_left_out(tmp_path: Path) -> None:
    made = source(tmp_path, {})
    made.maker.engine.aborts = True
    with pytest.raises(NoSampleError, match="8 responses aborted"):
        made.rollout(0, 0)


def test_long_responses_are_punished_or_train_nothing(tmp_path: Path) -> None:
    found = source(tmp_path, {}, overlong_cache_length=2, overlong_filtering=True).rollout(0, 0)
    samples = found.files.read(found.places)
    assert [sample.reward for sample in samples[:4]] == [0.0, 0.0, -0.5, -1.0]
    assert [sample.num_trained_tokens for sample in samples[:4]] == [1, 2, 3, 0]


def test_the_spool_of_other_prompts_or_draws_is_refused(tmp_path: Path) -> None:
    source(tmp_path, {}).rollout(0, 0)
    with pytest.raises(Exception, match="holds the rollouts of another run: generation is"):
        source(tmp_path, {}, n_samples_per_prompt=3)


@pytest.mark.parametrize("name", ["rollout_batch_size", "n_samples_per_prompt", "max_draws"])
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be positive"):
        GenerationConfig(**{"rollout_batch_size": 1, "n_samples_per_prompt": 1, name: 0})
