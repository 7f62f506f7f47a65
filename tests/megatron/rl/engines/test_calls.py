"""What a server's status and body say about a call."""

import asyncio
from typing import Any

import httpx2
import pytest

from megatron.rl.engines.calls import OutageError, PassingError, RefusedError, knock, post


def called(response: httpx2.Response) -> dict[str, Any]:
    async def call() -> dict[str, Any]:
        transport = httpx2.MockTransport(lambda _: response)
        async with httpx2.AsyncClient(transport=transport) as client:
            return await post(client, "http://h:1/x", {}, connect_timeout_s=5.0, timeout_s=60.0)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((status, OutageError) for status in (502, 503, 504)),
        *((status, PassingError) for status in (408, 429, 500, 501)),
        *((status, RefusedError) for status in (301, 400, 401, 403, 404, 409, 422)),
    ],
)
def test_a_status_tells_whether_to_ask_again(status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"HTTP {status}: why"):
        called(httpx2.Response(status, text="why"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"error": {"message": "too long", "type": "BadRequest"}}, "too long"),  # OpenAI, vLLM
        ({"object": "error", "message": "too long"}, "too long"),  # older vLLM
        ({"error": "too long"}, "too long"),
        ({"success": False, "message": "too long"}, "too long"),  # SGLang
        ({"detail": [{"loc": ["body"], "msg": "bad"}]}, '[{"loc": ["body"], "msg": "bad"}]'),
        ({"error": {"code": 7}}, '{"code": 7}'),
        ({"error": {"message": "x" * 900}}, "x" * 500 + "..."),
    ],
)
def test_the_message_is_found_in_every_form(content: dict, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        called(httpx2.Response(400, json=content))
    assert str(caught.value) == f"HTTP 400: {message}"


@pytest.mark.parametrize(
    ("header", "wait_s"), [("7", 7.0), ("Tue, 01 Dec 2026 00:00:00 GMT", 0.0), (None, 0.0)]
)
def test_a_server_may_say_how_long_to_wait(header: str | None, wait_s: float) -> None:
    headers = {} if header is None else {"Retry-After": header}
    with pytest.raises(PassingError) as caught:
        called(httpx2.Response(429, headers=headers))
    assert caught.value.wait_s == wait_s


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": ', "<html>"])
def test_an_answer_that_is_no_object_may_be_asked_for_again(text: str) -> None:
    with pytest.raises(PassingError, match="the answer"):
        called(httpx2.Response(200, text=text))


@pytest.mark.parametrize(("status", "is_there"), [(200, True), (404, True), (503, False)])
def test_whoever_answers_a_knock_is_there(status: int, is_there: bool) -> None:
    async def call() -> None:
        transport = httpx2.MockTransport(lambda _: httpx2.Response(status))
        async with httpx2.AsyncClient(transport=transport) as client:
            await knock(client, "http://h:1", timeout_s=60.0)

    if is_there:
        asyncio.run(call())
        return
    with pytest.raises(OutageError, match="HTTP 503"):
        asyncio.run(call())
