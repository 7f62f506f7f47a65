"""Flags of rollouts that the run makes: each wrong one is named as the user wrote it."""

from pathlib import Path

import pytest

from megatron.rl.engine_config import EngineConfig
from slime_loss import ConfigError

NATIVE = {"rollout_engine": "native", "prompt_task": "chain_sum", "reward": "exact"}
SERVER = NATIVE | {
    "rollout_engine": "sglang",
    "rollout_url": ("http://localhost:1",),
    "rollout_weights_dir": "weights",
}

BROKEN = [
    ({"reward": "exact"}, "reward needs rollout_engine"),
    ({"rollout_top_k": 3}, "rollout_top_k needs rollout_engine"),
    (NATIVE | {"prompt_task": None}, "prompt_data or prompt_task must be given"),
    (NATIVE | {"prompt_data": ("a",)}, "prompt_data or prompt_task must be given, not both"),
    (
        NATIVE | {"prompt_task": None, "prompt_data": ("a",), "prompt_task_size": 3},
        "prompt_task_size needs prompt_task",
    ),
    (NATIVE | {"reward": None}, "reward must be given with rollout_engine"),
    (NATIVE | {"reward": "best"}, "reward must be one of exact, math"),
    (NATIVE | {"reward_time_limit": -1.0}, "reward_time_limit must be positive"),
    (NATIVE | {"reward_workers": 0}, "reward_workers must be positive"),
    (NATIVE | {"overlong_cache_len": 2000}, "overlong_cache_len must be in"),
    (NATIVE | {"dynamic_sampling_limit": 0}, "dynamic_sampling_limit must be positive"),
    (NATIVE | {"rollout_native_batch_size": 0}, "rollout_native_batch_size must be positive"),
    (NATIVE | {"rollout_max_response_len": 0}, "rollout_max_response_len must be positive"),
    (NATIVE | {"rollout_top_k": -1}, "rollout_top_k must be >= 0"),
    (NATIVE | {"rollout_max_prompt_len": 0}, "rollout_max_prompt_len must be positive"),
    (NATIVE | {"prompt_task_size": 0}, "prompt_task_size must be positive"),
    (NATIVE | {"prompt_task_parameters": "{"}, "prompt_task_parameters must be JSON"),
    (NATIVE | {"input_key": ""}, "input_key must not be empty"),
    (NATIVE | {"rollout_url": ("http://a",)}, "rollout_url needs rollout_engine sglang or"),
    (SERVER | {"rollout_url": ()}, "rollout_url must be given with sglang"),
    (SERVER | {"rollout_url": ("localhost",)}, "rollout_url must each be http"),
    (SERVER | {"rollout_weights_dir": None}, "rollout_weights_dir must be given with sglang"),
    (SERVER | {"rollout_server_concurrency": 0}, "rollout_server_concurrency must be"),
    (SERVER | {"rollout_native_batch_size": 3}, "rollout_native_batch_size needs rollout_engine"),
    (SERVER | {"rollout_engine": "openai"}, "rollout_update_weights_path must be given"),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN)
def test_a_wrong_field_is_named_as_it_was_given(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**fields)
    [found] = [v for v in caught.value.violations if str(v).startswith(message)]
    assert found.fix


def test_what_is_right_is_taken(tmp_path: Path) -> None:
    EngineConfig()
    config = EngineConfig(**NATIVE, rollout_top_k=5)
    assert config.sampling(0.7, 0.9, 99, (3,)).stop_token_ids == (3,)
    assert config.sampling(0.7, 0.9, 99, (3,)).top_k == 5
    assert EngineConfig(**SERVER).servers().urls == ("http://localhost:1",)
    assert config.tokenizer(str(tmp_path), 300).tokenizer_model == str(tmp_path)
    of_ids = EngineConfig(**NATIVE, tokenizer_type="NullTokenizer")
    assert of_ids.tokenizer(str(tmp_path), 300).vocab_size == 300
