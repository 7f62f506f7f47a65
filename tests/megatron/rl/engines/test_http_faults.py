"""Servers that fail: by themselves, for a while, or for good."""

import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from megatron.rl.engines import EngineError, Sampling
from tests.megatron.rl.engines.asking import assert_same, engine_at, engine_for, requests
from tests.megatron.rl.engines.server import EngineServers
from tests.megatron.rl.tiny import write_llama

FIRST = "meta_info.output_token_logprobs.0"
CHOICE = "choices.0"
PASSING = {
    "status 500": ({"kind": "status", "status": 500, "message": "boom"}, "HTTP 500: boom"),
    "status 429": ({"kind": "status", "status": 429, "message": "busy"}, "HTTP 429: busy"),
    "reset": ({"kind": "reset"}, "the connection was lost"),
    "truncated": ({"kind": "truncated"}, "the answer is no JSON"),
    "slow": ({"kind": "slow", "seconds": 1.5}, "no answer within 0.5 s"),
}
HALF_NATIVE = {
    "aborted": ({"set": {"meta_info.finish_reason.type": "abort"}}, "finish_reason='abort'"),
    "nan": ({"set": {f"{FIRST}.0": float("nan")}}, r"log_probs\[0\]=nan"),
    "null": ({"set": {f"{FIRST}.0": None}}, r"log_probs\[0\]=None"),
    "positive": ({"set": {f"{FIRST}.0": 0.5}}, r"log_probs\[0\]=0.5"),
    "range": ({"set": {f"{FIRST}.1": 300}}, r"token id below 300: .*\[0\]=300"),
    "fraction": ({"set": {f"{FIRST}.1": 1.5}}, r"token id below 300: .*\[0\]=1.5"),
    "missing": ({"set": {"meta_info.output_token_logprobs": "missing"}}, "lacks output_token_log"),
    "no meta": ({"set": {"meta_info": "missing"}}, "lacks meta_info"),
    "type": ({"set": {"meta_info": 5}}, "meta_info must be of type dict: type=int"),
    "fewer ids": ({"cut": ["output_ids"]}, "output_ids is not that of the 4 log-probs"),
    "fewer log-probs": ({"cut": ["meta_info.output_token_logprobs"]}, "output_ids is not that"),
    "empty": (
        {"set": {"meta_info.output_token_logprobs": [], "output_ids": []}},
        "completion_tokens is not that of the 0 log-probs",
    ),
}
HALF_OPENAI = {
    "aborted": ({"set": {f"{CHOICE}.finish_reason": "abort"}}, "finish_reason='abort'"),
    "unfinished": ({"set": {f"{CHOICE}.finish_reason": None}}, "finish_reason must be of type"),
    "fewer ids": ({"cut": [f"{CHOICE}.token_ids"]}, "3 ids with 4 log-probs"),
    "fewer log-probs": ({"cut": [f"{CHOICE}.logprobs.token_logprobs"]}, "4 ids with 3 log-probs"),
    "null": ({"set": {f"{CHOICE}.logprobs": None}}, "logprobs must be of type dict"),
    "range": ({"set": {f"{CHOICE}.token_ids.1": -1}}, r"token_ids\[1\]=-1"),
    "no choice": ({"set": {"choices": []}}, "choices must hold one choice: choices=0"),
}
EVERY = [
    (kind, name, {"kind": "spoiled"} | fault, message)
    for kind, half in (("sglang", HALF_NATIVE), ("openai", HALF_OPENAI))
    for name, (fault, message) in (half | PASSING).items()
]
SAMPLING = Sampling(4)
export_other = partial(write_llama, seed=1)


@contextmanager
def closed_port() -> Iterator[str]:
    """The address of a port that nobody listens on, and nobody else can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_what_passes_changes_nothing(servers: EngineServers, kind: str) -> None:
    expected = engine_for(servers, type=kind).generate(requests(6), SAMPLING)
    half = HALF_NATIVE if kind == "sglang" else HALF_OPENAI
    faults = [{"kind": "spoiled"} | fault for fault, _ in half.values()]
    faults += [fault for name, (fault, _) in PASSING.items() if name != "slow"]
    servers.tell(0, faults=faults)
    # Any request may meet most of the faults.
    engine = engine_for(servers, type=kind, retries=len(faults))
    assert_same(engine.generate(requests(6), SAMPLING), expected)
    assert servers.tell(0)["calls"] == 6 + len(faults) + 6


@pytest.mark.parametrize(
    ("kind", "name", "fault", "message"), EVERY, ids=[f"{kind}: {name}" for kind, name, *_ in EVERY]
)
def test_what_does_not_pass_is_named(
    servers: EngineServers, kind: str, name: str, fault: dict, message: str
) -> None:
    servers.tell(0, faults=[fault | {"count": 100}])
    timeout_s = 0.5 if name == "slow" else 60.0
    engine = engine_for(servers, type=kind, retries=1, request_timeout_s=timeout_s)
    with pytest.raises(EngineError, match=message) as caught:
        engine.generate(requests(1), SAMPLING)
    start = f"{servers.urls[0]}: request 7 (2 prompt tokens) failed 2 times, at last: "
    assert str(caught.value).startswith(start)
    assert servers.tell(0)["calls"] == 2


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_shown_and_not_asked_for_again(servers: EngineServers, status: int) -> None:
    fault = {"kind": "status", "status": status, "message": "the prompt is too long", "count": 9}
    servers.tell(0, faults=[fault])
    with pytest.raises(EngineError, match=f"request 7.*HTTP {status}: the prompt is too long"):
        engine_for(servers).generate(requests(1), SAMPLING)
    assert servers.tell(0)["calls"] == 1


def test_a_prompt_that_the_server_changes_is_refused(servers: EngineServers) -> None:
    fault = {"kind": "spoiled", "set": {"meta_info.prompt_tokens": 3}}
    servers.tell(0, faults=[fault])
    with pytest.raises(EngineError, match="2 tokens sent, 3 read"):
        engine_for(servers).generate(requests(1), SAMPLING)


def test_a_server_that_is_gone_for_a_while_is_waited_for(
    servers: EngineServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_for(servers, export=export_other, weights_dir=str(tmp_path), retries=3)
    engine.refresh(3)
    expected = engine.generate(requests(6), SAMPLING)
    with caplog.at_level(logging.INFO, logger="megatron.rl"):
        servers.tell(0, gone_s=1.0)
        assert_same(engine.generate(requests(6), SAMPLING), expected)
    # It came back with its first weights, and was given the others.
    assert servers.tell(0)["version"] == "3"
    waits = [message for message in caplog.messages if message.startswith("waiting for")]
    assert len(waits) == 1
    assert f"waiting for {servers.urls[0]}, gone 0 s of at most 60: no connection" in waits[0]
    assert any(f"{servers.urls[0]} is back after" in message for message in caplog.messages)


def test_a_server_that_says_it_is_busy_keeps_its_weights(
    servers: EngineServers, tmp_path: Path
) -> None:
    engine = engine_for(servers, export=export_other, weights_dir=str(tmp_path))
    engine.refresh(3)
    fault = {"kind": "status", "status": 503, "message": "the queue is full", "count": 2}
    servers.tell(0, faults=[fault])
    engine.generate(requests(3), SAMPLING)
    paths = [body["path"] for body in servers.tell(0)["bodies"]]
    assert paths.count("/update_weights_from_disk") == 1


@pytest.mark.slow
def test_two_servers_may_be_gone_for_a_minute(servers: EngineServers, tmp_path: Path) -> None:
    engine = engine_for(
        servers,
        num_urls=2,
        export=export_other,
        weights_dir=str(tmp_path),
        max_backoff_s=10.0,
        gone_limit_s=300.0,
    )
    engine.refresh(3)
    expected = engine.generate(requests(6), SAMPLING)
    for port in range(2):
        servers.tell(port, gone_s=60.0)
    assert_same(engine.generate(requests(6), SAMPLING), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "openai"])
@pytest.mark.parametrize("seed", range(3))
def test_no_mixture_of_faults_changes_what_is_drawn(
    servers: EngineServers, kind: str, seed: int
) -> None:
    expected = engine_for(servers, type=kind).generate(requests(40), SAMPLING)
    draw = random.Random(seed)
    half = HALF_NATIVE if kind == "sglang" else HALF_OPENAI
    kinds = [{"kind": "spoiled"} | fault for fault, _ in half.values()]
    kinds += [fault for fault, _ in PASSING.values()]
    kinds += [{"kind": "status", "status": 503, "message": "loading"}, {"kind": "none"}]
    for port in range(2):
        faults = [draw.choice(kinds) | {"count": draw.randint(1, 3)} for _ in range(30)]
        servers.tell(port, faults=faults)
    engine = engine_for(
        servers, num_urls=2, type=kind, concurrency=4, retries=60, request_timeout_s=1.0
    )
    leave = threading.Timer(draw.uniform(0, 2), servers.tell, [0], {"gone_s": 1.0})
    leave.start()
    assert_same(engine.generate(requests(40), SAMPLING), expected)
    leave.join()
    # The next test finds it there again.
    engine_for(servers).generate(requests(1), SAMPLING)


@pytest.mark.slow
def test_a_server_process_may_be_killed_and_started_again(model_path: Path) -> None:
    first = EngineServers(model_path, num_ports=1)
    sampling = Sampling(100)
    expected = engine_for(first).generate(requests(8), sampling)
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(engine_for(first, concurrency=4).generate, requests(8), sampling)
        while first.tell(0)["calls"] < 8 + 5:  # one is done, others are under way
            time.sleep(0.01)
        first.close()
        with EngineServers(model_path, num_ports=1, at=first.ports[0]):
            assert_same(drawn.result(timeout=120), expected)


def test_the_other_server_works_while_one_is_gone(servers: EngineServers) -> None:
    expected = engine_for(servers).generate(requests(6), SAMPLING)
    with closed_port() as url:
        engine = engine_at((url, servers.urls[1]), gone_limit_s=0.1)
        assert_same(engine.generate(requests(6), SAMPLING), expected)


def test_gone_for_too_long_names_servers_error_and_fix() -> None:
    with closed_port() as url:
        engine = engine_at((url,), gone_limit_s=0.3)
        message = rf"over gone_limit_s=0.3; {url}: no connection: ConnectError.*start them again"
        with pytest.raises(EngineError, match=message):
            engine.generate(requests(2), SAMPLING)


def test_a_server_without_weights_is_left_behind_while_another_has_them(
    servers: EngineServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as url, caplog.at_level(logging.INFO, logger="megatron.rl"):
        engine = engine_at(
            (url, servers.urls[1]), gone_limit_s=0.2, export=export_other, weights_dir=str(tmp_path)
        )
        engine.refresh(2)
    assert f"gone, so without the new weights until they are back: {url}" in caplog.messages
    assert servers.tell(1)["version"] == "2"


def test_a_request_that_always_makes_its_server_look_gone_ends(servers: EngineServers) -> None:
    fault = {"kind": "status", "status": 503, "message": "loading", "count": 1000}
    servers.tell(0, faults=[fault])
    with pytest.raises(
        EngineError, match=r"request 7.* failed 3 times, at last: HTTP 503: loading"
    ):
        engine_for(servers, retries=2).generate(requests(1), SAMPLING)


def test_long_work_says_how_far_it_is(
    servers: EngineServers, caplog: pytest.LogCaptureFixture
) -> None:
    servers.tell(0, faults=[{"kind": "slow", "seconds": 0.3, "count": 4}])
    engine = engine_for(servers, concurrency=1, progress_interval_s=0.5)
    with caplog.at_level(logging.INFO, logger="megatron.rl"):
        engine.generate(requests(4), SAMPLING)
    assert caplog.messages[0].startswith("drawing responses: ")
    assert " of 4 in " in caplog.messages[0]
    assert caplog.messages[0].endswith(" tokens/s")
