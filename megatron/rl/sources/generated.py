"""Rollouts that the run makes itself: prompts, responses of an engine, rewards, filters."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron.rl.engines import Completion, Engine, Request, Sampling
from megatron.rl.prompts import Prompt, PromptSource
from megatron.rl.reward_functions import RewardInput
from megatron.rl.reward_rules import in_differing_groups, soft_overlong_penalty
from megatron.rl.rewards import RewardPool, Rewards
from megatron.rl.sources.spool import Entry, Spool
from megatron.rl.text import TextTokenizer
from megatron.rl.together import gathered, on_first_rank
from slime_loss.checked_config import CheckedConfig, Rule

_MESSAGES = logging.getLogger("megatron.rl.sources")


@dataclass(frozen=True)
class GenerationConfig(CheckedConfig):
    """How much is drawn for a rollout, and what of it is trained.

    Raises:
        ConfigError: A field has a value that cannot be.
    """

    rollout_batch_size: int
    """Prompts of a rollout."""
    n_samples_per_prompt: int
    """Responses to each."""
    dynamic_sampling: bool = False
    """Leave out prompts whose responses all have the same reward, and draw further ones."""
    max_draws: int = 10
    """Times as many prompts as a rollout has that may be drawn for it."""
    overlong_filtering: bool = False
    """Responses that were cut off train nothing; their reward still counts in its group."""
    overlong_cache_length: int | None = None
    """Last tokens of the longest response in which the reward falls by up to 1."""

    def rules(self) -> Iterator[Rule]:
        """Numbers are positive."""
        for name in ("rollout_batch_size", "n_samples_per_prompt", "max_draws"):
            yield getattr(self, name) > 0, name, "must be positive", "give a positive number"


class NoSampleError(Exception):
    """Nothing of what was drawn for a rollout can be trained."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """What one rank drew and scored.

    Args:
        rows: of samples that have a reward, as a rollout file has them.
        num_tokens: drawn in all.
        num_aborted: samples that the engine gave up.
        rewards: of the others, in their order.
    """

    rows: list[dict[str, Any]]
    num_tokens: int
    num_aborted: int
    rewards: Rewards | None


@dataclass
class GeneratedRollouts:
    """Makes rollouts; a `Maker`.

    Args:
        prompts: endless; prompt j of the run is the same for every rank.
        engine: draws responses; None in a dry run.
        rewards: scores what this rank drew; None on a rank that draws nothing.
        tokenizer: shows responses to the reward function.
        sampling: how responses are drawn.
        config: how many, and which are trained.
        spool: where rank 0 writes rows.
        seed: of the draws.
    """

    prompts: PromptSource
    engine: Engine | None
    rewards: RewardPool | None
    tokenizer: TextTokenizer
    sampling: Sampling
    config: GenerationConfig
    spool: Spool
    seed: int = 0
    samples_per_rollout: int = field(init=False)

    def __post_init__(self) -> None:
        """Foresee the size of a rollout."""
        config = self.config
        self.samples_per_rollout = config.rollout_batch_size * config.n_samples_per_prompt

    def make(self, k: int, weight_version: int, cursor: Mapping[str, Any]) -> Entry:
        """Draw and score rollout k; see `Maker.make`.

        Every rank draws its share; rows are gathered on rank 0, which writes them.

        Raises:
            EngineError: a response could not be drawn.
            RewardError: responses could not be scored.
            NoSampleError: nothing can be trained.
        """
        start = time.perf_counter()
        gathered(lambda: self.engine.refresh(weight_version))
        refreshed = time.perf_counter()
        number = cursor.get("prompt", 0)
        made = _Made(self.config)
        while count := on_first_rank(lambda: made.num_missing(k)):
            drawn = gathered(lambda first=number, wanted=count: self._draw(first, wanted))
            number += count
            if drawn is not None:
                made.add(drawn, count)
        seconds = time.perf_counter() - refreshed
        scalars = {"perf/refresh_time": refreshed - start, "perf/generate_time": seconds}
        return on_first_rank(lambda: self._write(k, made, number, scalars))

    def describe(self) -> str:
        """Prompts and what is drawn to them."""
        config = self.config
        return (
            f"{'prompts':<18}{len(self.prompts.prompts)}, {config.rollout_batch_size} a rollout\n"
            f"{'responses':<18}{config.n_samples_per_prompt} a prompt, at most "
            f"{self.sampling.max_response_length} tokens"
        )

    def identity(self) -> dict[str, object]:
        """Prompts, seed and how much is drawn: with the weights they decide every rollout."""
        return {
            "prompts": self.prompts.prompts.fingerprint,
            "sampling": asdict(self.sampling),
            "generation": asdict(self.config),
            "seed": self.seed,
        }

    def _draw(self, first: int, count: int) -> Drawn:
        """Responses to prompts `first` to `first + count - 1`, those of this rank's share."""
        prompts = self.prompts.take(first, count)
        size = self.config.n_samples_per_prompt
        requests = [
            Request(size * number + i, prompt.prompt_ids, (self.seed, number, i))
            for number, prompt in enumerate(prompts, first)
            for i in range(size)
        ]
        completions = self.engine.generate(requests, self.sampling)
        whole = [c for c in completions if c.status != "aborted" and len(c.tokens) > 0]
        num_tokens = sum(len(c.tokens) for c in completions)
        num_aborted = len(completions) - len(whole)
        if not whole:
            return Drawn([], num_tokens, num_aborted, None)
        of_sample = [prompts[c.index // size - first] for c in whole]
        inputs = [self._input(p, c) for p, c in zip(of_sample, whole, strict=True)]
        rewards = self.rewards.score(inputs)
        rows = [
            self._row(prompt, completion, shown.response, float(reward))
            for prompt, completion, shown, reward, scored in zip(
                of_sample, whole, inputs, rewards.rewards, rewards.scored, strict=True
            )
            if scored
        ]
        return Drawn(rows, num_tokens, num_aborted, rewards)

    def _input(self, prompt: Prompt, completion: Completion) -> RewardInput:
        return RewardInput(
            index=completion.index,
            response=self.tokenizer.decode(completion.tokens),
            prompt=prompt.text,
            messages=prompt.messages,
            label=prompt.label,
            metadata=prompt.metadata,
            prompt_ids=prompt.prompt_ids,
            response_ids=completion.tokens,
            status=completion.status,
        )

    def _row(
        self, prompt: Prompt, completion: Completion, response: str, reward: float
    ) -> dict[str, Any]:
        """A sample as a rollout file has it."""
        length, config = len(completion.tokens), self.config
        if config.overlong_cache_length is not None:
            reward += float(
                soft_overlong_penalty(
                    np.array([length]),
                    self.sampling.max_response_length,
                    config.overlong_cache_length,
                )[0]
            )
        row = {
            "index": completion.index,
            "group_index": completion.index // config.n_samples_per_prompt,
            "tokens": [*prompt.prompt_ids.tolist(), *completion.tokens.tolist()],
            "response_length": length,
            "rollout_log_probs": completion.log_probs.tolist(),
            "reward": reward,
            "status": completion.status,
            "prompt": prompt.text if prompt.messages is None else prompt.messages,
            "response": response,
            "label": prompt.label,
        }
        if config.overlong_filtering and completion.status == "truncated":
            row["loss_mask"] = [0] * length
        if completion.kept_ids is not None:
            row["rollout_top_p_token_ids"] = completion.kept_ids.tolist()
            row["rollout_top_p_token_offsets"] = completion.kept_offsets.tolist()
        if completion.weight_version is not None:
            row["weight_version"] = completion.weight_version
        return row

    def _write(self, k: int, made: _Made, number: int, scalars: dict[str, float]) -> Entry:
        made.warn(k)
        name = self.spool.write_rows(k, made.rows)
        rate = made.num_tokens / max(scalars["perf/generate_time"], 1e-9)
        figures = {"perf/generated_tokens_per_sec": rate, **scalars, **made.scalars()}
        return Entry((name,), {"prompt": number}, figures)


class _Made:
    """What rank 0 has of a rollout so far."""

    def __init__(self, config: GenerationConfig) -> None:
        self._config = config
        self._rewards: list[Rewards] = []
        self._num_prompts = self._num_groups = 0
        self.rows: list[dict[str, Any]] = []
        self.num_tokens = self.num_aborted = 0

    def add(self, drawn: Sequence[Drawn], num_prompts: int) -> None:
        """Take what the ranks drew to further prompts."""
        rows = sorted((row for part in drawn for row in part.rows), key=lambda row: row["index"])
        self._num_prompts += num_prompts
        self.num_tokens += sum(part.num_tokens for part in drawn)
        self.num_aborted += sum(part.num_aborted for part in drawn)
        self._rewards += [part.rewards for part in drawn if part.rewards is not None]
        if self._config.dynamic_sampling and rows:
            groups = np.array([row["group_index"] for row in rows])
            differing = in_differing_groups(np.array([row["reward"] for row in rows]), groups)
            rows = [row for row, keep in zip(rows, differing, strict=True) if keep]
        self._num_groups += len({row["group_index"] for row in rows})
        self.rows += rows

    def num_missing(self, k: int) -> int:
        """Prompts that are still to be drawn to.

        Raises:
            NoSampleError: nothing can be trained.
        """
        config = self._config
        is_over = self._num_prompts >= config.rollout_batch_size * (
            config.max_draws if config.dynamic_sampling else 1
        )
        missing = config.rollout_batch_size - self._num_groups
        if missing and not is_over:
            return missing
        if not self.rows:
            raise NoSampleError(
                f"no sample of rollout {k} can be trained: {self._num_prompts} prompts were drawn "
                f"to, {self.num_aborted} responses aborted, {self._num_errors} without reward"
                f"{self._first_error}; fix: look at --reward, or at how hard the prompts are"
            )
        return 0

    def warn(self, k: int) -> None:
        """Say what is missing."""
        missing = self._config.rollout_batch_size - self._num_groups
        if missing and self._config.dynamic_sampling:
            _MESSAGES.warning(
                f"rollout {k} has {self._num_groups} prompts in place of "
                f"{self._config.rollout_batch_size}: the rewards of all others were equal, "
                f"{self._num_prompts} prompts were drawn to (--max-draws)"
            )
        if self._num_errors:
            _MESSAGES.warning(
                f"rollout {k}: {self._num_errors} responses have no reward and are left out"
                f"{self._first_error}"
            )

    def scalars(self) -> dict[str, float]:
        """Figures of the rollout, by TensorBoard name."""
        parts = {
            name: np.concatenate([r.parts[name] for r in self._rewards if name in r.parts])
            for name in sorted({name for r in self._rewards for name in r.parts})
        }
        return {
            "rollout/drawn_prompts": self._num_prompts,
            "rollout/aborted_samples": self.num_aborted,
            "rollout/reward_errors": self._num_errors,
            **{f"rollout/reward/{name}": float(np.nanmean(part)) for name, part in parts.items()},
        }

    @property
    def _num_errors(self) -> int:
        return sum(rewards.num_errors for rewards in self._rewards)

    @property
    def _first_error(self) -> str:
        errors = [error for rewards in self._rewards for error in rewards.errors]
        return f", the first: {errors[0]}" if errors else ""
