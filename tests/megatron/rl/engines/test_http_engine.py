"""Requests, bounds, stops and weights over HTTP."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron.rl.engines import EngineError, Sampling
from megatron.rl.engines.http import HttpEngine
from megatron.rl.engines.http_config import HttpEngineConfig
from tests.megatron.rl.engines.asking import (
    QUICK,
    assert_same,
    engine_for,
    requests,
    trainer_log_probs,
)
from tests.megatron.rl.engines.server import EngineServers
from tests.megatron.rl.tiny import write_llama

write_other = partial(write_llama, seed=1)


@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_a_response_ends_with_a_stop_token_or_at_a_limit(servers: EngineServers, kind: str) -> None:
    engine, asked = engine_for(servers, type=kind), requests(3)
    free = engine.generate(asked, Sampling(6))
    stops = tuple(sorted({int(completion.tokens[2]) for completion in free}))
    stopped = engine.generate(asked, Sampling(6, stop_token_ids=stops))
    for one, other in zip(free, stopped, strict=True):
        first = next(i for i, token in enumerate(one.tokens) if int(token) in stops)
        np.testing.assert_array_equal(other.tokens, one.tokens[: first + 1])
        assert (one.status, other.status) == ("truncated", "completed")
    shortest = min(len(completion.tokens) for completion in stopped)
    at_the_limit = engine.generate(asked, Sampling(shortest, stop_token_ids=stops))
    for one, other in zip(stopped, at_the_limit, strict=True):
        is_whole = len(one.tokens) == shortest
        assert other.status == ("completed" if is_whole else "truncated")
    limited = engine.generate(asked, Sampling(6, max_length=4))
    lengths = [len(completion.tokens) for completion in limited]
    assert lengths == [2, 1, 0]
    assert [completion.status for completion in limited] == ["truncated", "truncated", "aborted"]


def test_the_models_own_end_token_stops_only_beside_stop_tokens(servers: EngineServers) -> None:
    engine, asked = engine_for(servers), requests(1)
    free = engine.generate(asked, Sampling(6))[0]
    servers.tell(0, settings={"end_token": int(free.tokens[1])})
    assert_same(engine.generate(asked, Sampling(6)), [free])
    other = next(i for i in range(300) if i not in free.tokens)
    stopped = engine.generate(asked, Sampling(6, stop_token_ids=(other,)))[0]
    np.testing.assert_array_equal(stopped.tokens, free.tokens[:2])
    assert stopped.status == "completed"


def test_requests_are_spread_over_the_servers_and_bounded(servers: EngineServers) -> None:
    alone = engine_for(servers).generate(requests(12), Sampling(2))
    for port in range(2):
        servers.tell(port, reset=True, faults=[{"kind": "slow", "seconds": 0.1, "count": 100}])
    both = engine_for(servers, num_urls=2, concurrency=2).generate(requests(12), Sampling(2))
    assert_same(both, alone)
    seen = [servers.tell(port) for port in range(2)]
    assert sum(port["calls"] for port in seen) == 12
    assert [port["most"] for port in seen] == [2, 2]


def test_only_rank_0_asks(servers: EngineServers, tmp_path: Path) -> None:
    written: list[Path] = []
    config = HttpEngineConfig(urls=servers.urls, weights_dir=str(tmp_path))
    engine = HttpEngine(config, rank=1, export=written.append)
    assert engine.generate(requests(3), Sampling(2)) == []
    engine.refresh(5)
    assert written == [tmp_path / "weights_0000005"]
    assert [servers.tell(port)["calls"] for port in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "config", [{"type": "sglang"}, {"type": "openai", "update_weights_path": "/load"}]
)
def test_refresh_sends_the_weights_and_removes_older_ones(
    servers: EngineServers, tmp_path: Path, config: dict
) -> None:
    for left_over in ("weights_0000003", "weights_0000009", ".weights_0000008.partial"):
        (tmp_path / left_over).mkdir()  # by a run that was killed
    (tmp_path / "mine").mkdir()
    engine = engine_for(
        servers, num_urls=2, export=write_other, weights_dir=str(tmp_path), **config
    )
    engine.refresh(3)
    assert [servers.tell(port)["version"] for port in range(2)] == ["3", "3"]
    asked, sampling = requests(3), Sampling(4)
    drawn = engine.generate(asked, sampling)
    for request, completion in zip(asked, drawn, strict=True):
        expected = trainer_log_probs(tmp_path / "weights_0000003", request, completion, sampling)
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-4)
        assert completion.weight_version == (3 if config["type"] == "sglang" else None)
    engine.refresh(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "weights_0000004"]


def test_a_server_that_forgot_the_weights_gets_them_again(
    servers: EngineServers, tmp_path: Path
) -> None:
    engine = engine_for(servers, export=write_other, weights_dir=str(tmp_path))
    engine.refresh(3)
    before = engine.generate(requests(3), Sampling(4))
    servers.tell(0, reset=True)
    after = engine.generate(requests(3), Sampling(4))
    assert_same(after, before)
    assert [completion.weight_version for completion in after] == [3, 3, 3]


def test_weights_that_a_server_cannot_load_are_named(
    servers: EngineServers, tmp_path: Path
) -> None:
    elsewhere = {"weights_dir": str(tmp_path), "weights_dir_on_servers": "/nowhere"}
    engine = engine_for(servers, export=write_other, **elsewhere)
    message = rf"{servers.urls[0]}: loading weights 2: HTTP 400: .*/nowhere/weights_0000002"
    with pytest.raises(EngineError, match=message):
        engine.refresh(2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "openai", "weights_dir": "x"}, "update_weights_path=None; name one"),
        ({"type": "sglang"}, "weights_dir=None"),
    ],
)
def test_weights_without_a_way_are_refused_on_every_rank(config: dict, message: str) -> None:
    for rank in range(2):
        engine = HttpEngine(
            HttpEngineConfig(urls=("http://h:1",), **QUICK, **config), rank=rank, export=print
        )
        with pytest.raises(EngineError, match=message):
            engine.refresh(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("urls", ()),
        ("urls", ("localhost:30000",)),
        ("urls", ("http://host:1/v1",)),
        ("urls", ("http://host:x",)),
        ("urls", ("http://host:1", "http://host:1")),
        ("type", "vllm"),
        ("concurrency", 0),
        ("retries", -1),
        ("request_timeout_s", 0.0),
        ("gone_limit_s", float("inf")),
        ("max_backoff_s", 0.5),
        ("kept_ids", "all"),
        ("update_weights_path", "load"),
        ("weights_dir_on_servers", "/x"),
    ],
)
def test_settings_that_cannot_be_are_refused(field: str, value: object) -> None:
    settings = {"urls": ("http://host:1",), field: value}
    with pytest.raises(ValueError, match=f"^{field} .*: {field}="):
        HttpEngineConfig(**settings)


def test_a_key_is_sent_and_not_shown(servers: EngineServers) -> None:
    assert "secret" not in repr(HttpEngineConfig(urls=servers.urls, api_key="secret"))
    engine_for(servers, api_key="secret").generate(requests(1), Sampling(1))
    assert [body["key"] for body in servers.tell(0)["bodies"]] == ["Bearer secret"]


def test_a_proxy_of_the_environment_is_not_asked(
    servers: EngineServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert len(engine_for(servers).generate(requests(1), Sampling(1))) == 1


def test_a_missing_library_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ImportError, match=r"need httpx2: pip install 'megatron-slime\[engine\]'"):
        HttpEngine(HttpEngineConfig(urls=("http://host:1",)), rank=0)
