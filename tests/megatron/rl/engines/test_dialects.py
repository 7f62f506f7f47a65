"""What is posted to servers, and answers that no server should give."""

import base64
import copy
import struct
from typing import Any

import numpy as np
import pytest

from megatron.rl.engines import Completion, Request, Sampling
from megatron.rl.engines.answers import HalfAnswerError
from megatron.rl.engines.calls import PassingError, RefusedError
from megatron.rl.engines.dispatch import Job, Patience, Server
from megatron.rl.engines.http_config import HttpEngineConfig
from megatron.rl.engines.log_prob_kind import LogProbKind, kept_kind, scaled_kind
from megatron.rl.engines.openai import OpenaiDialect
from megatron.rl.engines.sglang import SglangDialect

CONFIG = HttpEngineConfig(urls=("http://host:1",), model="tiny")
MASK = HttpEngineConfig(urls=("http://host:1",), kept_ids="sampling_mask")
REQUEST = Request(3, np.array([5, 6]), seed=(1, 2, 3))
NUCLEUS = Sampling(8, temperature=0.7, top_p=0.9, stop_token_ids=(9, 4))
NATIVE = {
    "output_ids": [11, 9],
    "meta_info": {
        "output_token_logprobs": [[-1.5, 11, None], [0.0005, 9, None]],
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_version": "12",
        "top_p_token_ids": [11, 12, 9],
        "top_p_token_offsets": [0, 2, 3],
        "output_token_sampling_mask": [[11, 12], [9]],
        "output_token_sampling_logprobs": [-0.5, 0.0],
    },
}


def packed(*numbers: int) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()


def with_meta(**changes: Any) -> dict[str, Any]:
    answer = copy.deepcopy(NATIVE)
    answer["meta_info"] |= changes
    return answer


def test_the_body_says_everything_that_decides_the_draw() -> None:
    body = SglangDialect(CONFIG).body(REQUEST, NUCLEUS)
    seed = body["sampling_params"].pop("sampling_seed")
    assert 0 <= seed < 2**31
    assert body == {
        "input_ids": [5, 6],
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [4, 9],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "custom_params": {"return_top_p_token_ids": True},
        },
    }
    body = OpenaiDialect(CONFIG).body(REQUEST, Sampling(8, stop_token_ids=(9, 4)))
    assert body.pop("seed") == seed
    assert body == {
        "model": "tiny",
        "prompt": [5, 6],
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "stream": False,
        "logprobs": 1,
        "stop_token_ids": [4, 9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_every_request_has_its_own_seed_or_none() -> None:
    others = [Request(i, np.array([5]), seed=(1, i)) for i in range(50)]
    bodies = [SglangDialect(CONFIG).body(other, Sampling(1)) for other in others]
    assert len({body["sampling_params"]["sampling_seed"] for body in bodies}) == 50
    unseeded = HttpEngineConfig(urls=("http://host:1",), seeded=False)
    body = SglangDialect(unseeded).body(REQUEST, Sampling(1))
    assert "sampling_seed" not in body["sampling_params"]
    assert "seed" not in OpenaiDialect(unseeded).body(REQUEST, Sampling(1))


@pytest.mark.parametrize(
    "answer",
    [
        NATIVE,
        with_meta(top_p_token_ids=packed(11, 12, 9), top_p_token_offsets=packed(0, 2, 3)),
    ],
    ids=["lists", "packed"],
)
def test_kept_ids_are_read_in_both_forms(answer: dict) -> None:
    completion = SglangDialect(CONFIG, 13).completion(answer, REQUEST, NUCLEUS)
    assert completion.kept_ids.tolist() == [11, 12, 9]
    assert completion.kept_offsets.tolist() == [0, 2, 3]
    assert completion.log_probs.tolist() == [-1.5, 0.0]  # above 0 by rounding alone
    assert (completion.index, completion.weight_version) == (3, 12)
    assert completion.status == "completed"


def test_a_sampling_mask_has_log_probs_of_its_own() -> None:
    completion = SglangDialect(MASK, 13).completion(NATIVE, REQUEST, NUCLEUS)
    assert completion.kept_ids.tolist() == [11, 12, 9]
    assert completion.kept_offsets.tolist() == [0, 2, 3]
    assert completion.log_probs.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIG, {"top_p_token_ids": "!"}, "top_p_token_ids must be base64 of int32"),
        (CONFIG, {"top_p_token_ids": "QUI="}, "top_p_token_ids must be base64 of int32"),
        (CONFIG, {"top_p_token_ids": 5}, "must be of type list: type=int"),
        (CONFIG, {"top_p_token_ids": [11, 12, 13]}, r"top_p_token_ids\[2\]=13"),
        (CONFIG, {"top_p_token_offsets": [0, 3]}, "must be 3 and rise from 0 to 3"),
        (CONFIG, {"top_p_token_offsets": [0, 2, 2]}, "must be 3 and rise from 0 to 3"),
        (CONFIG, {"top_p_token_offsets": [1, 2, 3]}, "must be 3 and rise from 0 to 3"),
        (CONFIG, {"top_p_token_offsets": [0, 2, -1]}, "must be a token id below"),
        (CONFIG, {"output_token_logprobs": [[-1.5], [-0.1, 9]]}, "must hold"),
        (CONFIG, {"finish_reason": None}, "finish_reason must be of type dict"),
        (MASK, {"output_token_sampling_mask": [11, 9]}, "must hold a list for each token"),
        (MASK, {"output_token_sampling_mask": [[11]]}, "must be 3 and rise from 0 to 1"),
        (MASK, {"output_token_sampling_logprobs": [-0.5]}, "2 ids with 1 log-probs"),
    ],
)
def test_answers_that_are_not_whole_are_named(
    config: HttpEngineConfig, changes: dict, message: str
) -> None:
    with pytest.raises(HalfAnswerError, match=message):
        SglangDialect(config, 13).completion(with_meta(**changes), REQUEST, NUCLEUS)


def test_a_response_that_goes_on_after_a_stop_token_is_refused() -> None:
    with pytest.raises(HalfAnswerError, match="must end with its first stop token"):
        SglangDialect(CONFIG).completion(NATIVE, REQUEST, Sampling(8, stop_token_ids=(11,)))


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(HalfAnswerError, match="must have 1 to 1 tokens: tokens=2"):
        SglangDialect(CONFIG).completion(NATIVE, REQUEST, Sampling(1))


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (["token_id:5", "token_id:12"], None, ""),
        (["token_id:5", "token_id:13"], HalfAnswerError, r"tokens\[1\]=13"),
        (["token_id:5", "token_id:x"], HalfAnswerError, r"tokens\[1\]='x'"),
        (["token_id:5", " a"], RefusedError, "no token ids"),
    ],
)
def test_ids_are_read_from_texts_that_name_them(
    texts: list[str], error: type[Exception] | None, message: str
) -> None:
    logprobs = {"tokens": texts, "token_logprobs": [-1.0, -2.0]}
    answer = {"choices": [{"logprobs": logprobs, "finish_reason": "length"}]}
    dialect = OpenaiDialect(CONFIG, 13)
    if error is None:
        assert dialect.completion(answer, REQUEST, Sampling(2)).tokens.tolist() == [5, 12]
        return
    with pytest.raises(error, match=message):
        dialect.completion(answer, REQUEST, Sampling(2))


def test_a_prompt_that_was_read_differently_is_refused() -> None:
    choice = {"logprobs": {"token_logprobs": [-1.0]}, "token_ids": [5], "finish_reason": "length"}
    answer = {"choices": [choice | {"prompt_token_ids": [1, 5, 6]}]}
    with pytest.raises(RefusedError, match="2 tokens sent, 3 read"):
        OpenaiDialect(CONFIG).completion(answer, REQUEST, Sampling(2))


def test_the_spread_of_the_likeliest_tells_the_temperature() -> None:
    at_1 = {"a": -0.1, "b": -4.1, "c": -8.1}
    assert scaled_kind(at_1, {"a": -3.0, "b": -4.0, "x": -4.5}).is_scaled
    assert not scaled_kind(at_1, {"a": -0.1, "b": -4.1, "x": -4.5}).is_scaled
    with pytest.raises(HalfAnswerError, match="two or more"):
        scaled_kind(at_1, {"a": -3.0})


def test_one_of_two_tokens_tells_whether_others_are_left_out() -> None:
    def drawn(log_prob: float) -> Completion:
        return Completion(0, np.array([1]), np.array([log_prob], np.float32), "truncated")

    kind = LogProbKind({"a": np.log(0.3), "b": np.log(0.1), "c": np.log(0.05)}, is_scaled=True)
    for log_prob, is_among_kept in ((0.3, False), (0.1, False), (0.75, True), (0.25, True)):
        assert kept_kind(kind, drawn(np.log(log_prob))).is_among_kept is is_among_kept
    sure = LogProbKind({"a": np.log(0.9), "b": np.log(0.0999)}, is_scaled=True)
    assert kept_kind(sure, drawn(np.log(0.9))).is_among_kept is None


def test_waits_double_up_to_a_bound_and_obey_the_server() -> None:
    config = HttpEngineConfig(urls=("http://host:1",), backoff_s=1.0, max_backoff_s=5.0, retries=99)
    server = Server("http://host:1")
    patience = Patience(config, [server])
    for num_failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (2000, 5.0)):
        waits = [patience.backoff_s(num_failures) for _ in range(20)]
        assert longest / 2 <= min(waits) < max(waits) <= longest
    error = PassingError("HTTP 429: busy", wait_s=17.0)
    assert patience.next_try_s(server, Job(0, "request 0"), error) == 17.0
