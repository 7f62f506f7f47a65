"""The engine's log-probs are the trainer's, or the server is refused."""

from pathlib import Path

import numpy as np
import pytest

from megatron.rl.engines import EngineError, Sampling
from tests.megatron.rl.engines.asking import engine_for, requests, trainer_log_probs
from tests.megatron.rl.engines.server import EngineServers

NATIVE = {"type": "sglang"}
OPENAI = {"type": "openai"}
MASK = NATIVE | {"kept_ids": "sampling_mask"}
IGNORED = NATIVE | {"kept_ids": "none"}
MATCHING = [
    (NATIVE, {}, {}),
    (NATIVE, {}, {"temperature": 0.7}),
    (NATIVE, {}, {"temperature": 0.7, "top_p": 0.9}),
    (NATIVE, {}, {"temperature": 1.3, "top_k": 5}),
    (NATIVE, {}, {"temperature": 0.0, "top_p": 0.9}),
    (MASK, {"kept": "sampling_mask"}, {"temperature": 0.7, "top_p": 0.9}),
    (IGNORED, {"kept": "none"}, {"temperature": 0.7, "top_p": 0.9}),
    (OPENAI, {"log_probs": "raw"}, {}),
    (OPENAI, {"log_probs": "raw"}, {"temperature": 0.0}),
    (OPENAI, {"log_probs": "processed"}, {"temperature": 0.7}),
    (OPENAI, {"log_probs": "processed", "names_ids": "texts"}, {"temperature": 0.7}),
    (OPENAI | {"kept_ids": "none"}, {"log_probs": "raw"}, {"top_p": 0.9}),
]
DIFFERING = [
    (NATIVE, {"log_probs": "raw"}, {"temperature": 0.7}, "before the temperature"),
    (OPENAI, {"log_probs": "raw"}, {"temperature": 0.7}, "--logprobs-mode processed_logprobs"),
    (NATIVE, {"kept": "none"}, {"top_p": 0.9}, "no meta_info.top_p_token_ids"),
    (MASK, {"kept": "none"}, {"top_k": 3}, "no meta_info.output_token_sampling_mask"),
    (OPENAI, {"log_probs": "processed"}, {"top_p": 0.9}, "does not name the tokens"),
    (
        OPENAI | {"kept_ids": "none"},
        {"log_probs": "processed"},
        {"temperature": 0.7, "top_p": 0.9},
        "are those among kept tokens",
    ),
    (OPENAI, {"log_probs": "raw", "names_ids": "nothing"}, {}, "no token ids"),
]


@pytest.mark.parametrize(("config", "settings", "drawn"), MATCHING)
def test_log_probs_are_those_that_the_trainer_computes(
    servers: EngineServers, model_path: Path, config: dict, settings: dict, drawn: dict
) -> None:
    servers.tell(0, settings=settings)
    sampling = Sampling(max_response_length=6, **drawn)
    asked = requests(2)
    for request, completion in zip(
        asked, engine_for(servers, **config).generate(asked, sampling), strict=True
    ):
        expected = trainer_log_probs(model_path, request, completion, sampling)
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-4)
        is_replayed = not sampling.keeps_all and sampling.temperature > 0
        assert (completion.kept_ids is not None) == (
            is_replayed and config.get("kept_ids") != "none"
        )
        assert completion.log_probs.dtype == np.float32
        assert completion.tokens.dtype == np.int64


@pytest.mark.parametrize(("config", "settings", "drawn", "message"), DIFFERING)
def test_a_server_with_other_log_probs_is_refused(
    servers: EngineServers, config: dict, settings: dict, drawn: dict, message: str
) -> None:
    servers.tell(0, settings=settings)
    with pytest.raises(EngineError, match=message) as caught:
        engine_for(servers, **config).generate(requests(1), Sampling(6, **drawn))
    assert servers.urls[0] in str(caught.value)


def test_a_server_is_examined_once(servers: EngineServers) -> None:
    engine, sampling = engine_for(servers), Sampling(2, temperature=0.7, top_p=0.9)
    engine.generate(requests(3), sampling)
    engine.generate(requests(3), sampling)
    assert servers.tell(0)["calls"] == 3 + 2 * 3
