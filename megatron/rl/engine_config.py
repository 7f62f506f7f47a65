"""Flags of rollouts that the run makes itself, and the configs of those who make them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from megatron.rl.engines import Sampling
from megatron.rl.engines.http_config import HttpEngineConfig
from megatron.rl.prompt_tasks import TaskConfig
from megatron.rl.prompts import PromptConfig
from megatron.rl.rewards import RewardConfig
from megatron.rl.text import TokenizerConfig, TokenizerType
from slime_loss import ConfigError
from slime_loss.checked_config import CheckedConfig, Rule


@dataclass(frozen=True)
class EngineConfig(CheckedConfig):
    """What draws responses, to which prompts, and what rewards them.

    Raises:
        ConfigError: A field has a value that cannot be.
    """

    rollout_engine: Literal["native", "sglang", "openai"] | None = None
    """Make rollouts during the run, in place of --rollout-data: by the model in training itself
    (native; for small models and tests), or by servers at --rollout-url."""

    prompt_data: tuple[str, ...] = ()
    """Prompt files (JSONL, Parquet), globs or folders."""

    prompt_task: str | None = None
    """A task of reasoning-gym in place of --prompt-data, chain_sum for example."""

    prompt_task_parameters: str | None = None
    """Fields of the task's config, as JSON."""

    prompt_task_size: int = 10_000
    """Different items of the task."""

    input_key: str = "prompt"
    """Field of a prompt: a text, a list of messages, or a list of ids."""

    label_key: str | None = None
    """Field of its right answer."""

    metadata_key: str = "metadata"
    """Field of an object for the reward function; a row may leave it out."""

    apply_chat_template: bool = False
    """Make ids of a text, as a user's message, or of messages by the chat template."""

    rollout_max_prompt_len: int | None = None
    """Most tokens of a prompt; a longer one is an error."""

    tokenizer_type: TokenizerType | None = None
    """Megatron's name: HuggingFaceTokenizer (without it), SentencePieceTokenizer,
    GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer, or NullTokenizer (ids alone)."""

    tokenizer_model: str | None = None
    """Its local directory or file; without it --hf-checkpoint."""

    chat_template: str | None = None
    """A Jinja file, in place of the tokenizer's own template."""

    rollout_max_response_len: int = 1024
    """Most tokens of a response."""

    rollout_top_k: int = 0
    """Draw from so many of the likeliest tokens only; 0 is no limit."""

    rollout_stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these; without them the tokenizer's."""

    rollout_native_batch_size: int = 64
    """Responses that a replica draws at a time with --rollout-engine native."""

    rollout_url: tuple[str, ...] = ()
    """Where servers listen, http://host:port; all serve the same model."""

    rollout_server_model: str | None = None
    """The model's name on a server of type openai that has several."""

    rollout_server_concurrency: int = 64
    """Most requests that a server has at a time."""

    rollout_kept_ids: Literal["top_p_token_ids", "sampling_mask", "none"] = "top_p_token_ids"
    """How sglang names the ids that top-p and top-k kept: as slime's build does, by its
    return_sampling_mask, or not at all, and log-probs are those among all tokens."""

    rollout_weights_dir: str | None = None
    """Folder that trainer and servers share: new weights are handed over in it before each
    rollout."""

    rollout_update_weights_path: str | None = None
    """Path of the POST that makes a server load new weights; sglang has one of its own."""

    reward: str | None = None
    """What scores a response: exact, math, reasoning-gym:TASK, or module:function."""

    reward_errors: Literal["skip", "error"] = "skip"
    """A response that cannot be scored is counted and left out, or ends the run."""

    reward_time_limit: float = 10.0
    """Seconds for scoring one response."""

    reward_workers: int = 4
    """Processes that score, on each rank that draws."""

    dynamic_sampling: bool = False
    """Leave out prompts whose responses all have the same reward, and draw to further ones."""

    dynamic_sampling_limit: int = 10
    """Times as many prompts as a rollout has that may be drawn to for it."""

    overlong_filtering: bool = False
    """Responses that were cut off train nothing; their reward still counts in its group."""

    overlong_cache_len: int | None = None
    """Last tokens of the longest response in which the reward falls by up to 1."""

    def rules(self) -> Iterator[Rule]:
        """What an engine needs is there, and nothing is there without one."""
        if self.rollout_engine is None:
            names = [field.name for field in fields(self) if field.name != "rollout_engine"]
            yield from self.needs(names, False, "needs rollout_engine")
            return
        one = bool(self.prompt_data) != (self.prompt_task is not None)
        fix = "give one of prompt_data and prompt_task"
        yield one, "prompt_data", "or prompt_task must be given, not both", fix
        of_task = ["prompt_task_parameters", "prompt_task_size"]
        yield from self.needs(of_task, self.prompt_task is not None, "needs prompt_task")
        fix = "add reward NAME; reasoning-gym:TASK is that of a task"
        yield self.reward is not None, "reward", "must be given with rollout_engine", fix
        yield from self._server_rules()
        cache = self.overlong_cache_len
        within = cache is None or 0 < cache <= self.rollout_max_response_len
        rule = "must be in [1, rollout_max_response_len]"
        yield within, "overlong_cache_len", rule, "give fewer tokens"
        for name in ("rollout_native_batch_size", "dynamic_sampling_limit"):
            yield getattr(self, name) > 0, name, "must be positive", "give a positive number"
        yield from self._parts()

    def _server_rules(self) -> Iterator[Rule]:
        is_server = self.rollout_engine != "native"
        fix = "add rollout_url http://host:port"
        given = bool(self.rollout_url) or not is_server
        yield given, "rollout_url", f"must be given with {self.rollout_engine}", fix
        fix = "add rollout_weights_dir DIR"
        given = self.rollout_weights_dir is not None or not is_server
        yield given, "rollout_weights_dir", f"must be given with {self.rollout_engine}", fix
        fix = "name the path of your server"
        given = self.rollout_update_weights_path is not None or self.rollout_engine != "openai"
        yield given, "rollout_update_weights_path", "must be given with openai", fix
        names = [f.name for f in fields(self) if f.name.startswith("rollout_server")]
        names += ["rollout_url", "rollout_weights_dir", "rollout_update_weights_path"]
        yield from self.needs(names, is_server, "needs rollout_engine sglang or openai")
        names = ["rollout_native_batch_size"]
        yield from self.needs(names, not is_server, "needs rollout_engine native")

    def _parts(self) -> Iterator[Rule]:
        """What the configs that are made of these fields refuse, by the fields' names here."""
        parts: list[Callable[[], object]] = [self.prompts, lambda: self.sampling(1.0, 1.0, None)]
        if self.reward is not None:
            parts.append(lambda: self.rewards(None))
        if self.prompt_task is not None:
            parts.append(self.task)
        if self.rollout_url and self.rollout_engine != "native":
            parts.append(self.servers)
        for part in parts:
            try:
                part()
            except ConfigError as error:
                for broken in error.violations:
                    yield False, _OWN_NAMES.get(broken.field, broken.field), broken.rule, broken.fix
            except ValueError as error:
                name, _, rule = str(error).partition(" ")
                yield False, _OWN_NAMES.get(name, name), rule.rpartition(": ")[0], "change it"

    def prompts(self) -> PromptConfig:
        """How prompts are read."""
        return PromptConfig(
            input_key=self.input_key,
            label_key=self.label_key,
            metadata_key=self.metadata_key,
            apply_chat_template=self.apply_chat_template,
            max_prompt_length=self.rollout_max_prompt_len,
        )

    def task(self) -> TaskConfig:
        """Which items of which task."""
        try:
            parameters = json.loads(self.prompt_task_parameters or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"prompt_task_parameters must be JSON ({error}): ") from error
        return TaskConfig(self.prompt_task, parameters, self.prompt_task_size)

    def tokenizer(self, hf_checkpoint: str | None, vocab_size: int) -> TokenizerConfig:
        """Which tokenizer."""
        kind = self.tokenizer_type or "HuggingFaceTokenizer"
        model = self.tokenizer_model
        if model is None and kind == "HuggingFaceTokenizer":
            model = hf_checkpoint
        has_size = kind in ("NullTokenizer", "TikTokenizer")
        return TokenizerConfig(
            kind, model, vocab_size if has_size else None, chat_template=self.chat_template
        )

    def sampling(
        self,
        temperature: float,
        top_p: float,
        max_length: int | None,
        eos_ids: tuple[int, ...] = (),
    ) -> Sampling:
        """How responses are drawn."""
        return Sampling(
            max_response_length=self.rollout_max_response_len,
            temperature=temperature,
            top_p=top_p,
            top_k=self.rollout_top_k,
            stop_token_ids=self.rollout_stop_token_ids or eos_ids,
            max_length=max_length,
        )

    def rewards(self, reward_key: str | None) -> RewardConfig:
        """What scores responses."""
        return RewardConfig(
            self.reward,
            reward_key,
            self.reward_errors,
            time_limit=self.reward_time_limit,
            num_workers=self.reward_workers,
        )

    def servers(self) -> HttpEngineConfig:
        """The servers."""
        return HttpEngineConfig(
            urls=self.rollout_url,
            type=self.rollout_engine,
            model=self.rollout_server_model,
            concurrency=self.rollout_server_concurrency,
            kept_ids=self.rollout_kept_ids,
            weights_dir=self.rollout_weights_dir,
            update_weights_path=self.rollout_update_weights_path,
        )


_OWN_NAMES = {
    "max_prompt_length": "rollout_max_prompt_len",
    "task": "prompt_task",
    "task_parameters": "prompt_task_parameters",
    "size": "prompt_task_size",
    "max_response_length": "rollout_max_response_len",
    "top_k": "rollout_top_k",
    "time_limit": "reward_time_limit",
    "num_workers": "reward_workers",
    "urls": "rollout_url",
    "model": "rollout_server_model",
    "concurrency": "rollout_server_concurrency",
    "kept_ids": "rollout_kept_ids",
    "weights_dir": "rollout_weights_dir",
    "update_weights_path": "rollout_update_weights_path",
}
"""Fields of the parts that are called otherwise here."""
