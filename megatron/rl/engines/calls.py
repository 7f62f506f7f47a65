"""One POST to a server, and the ways in which it can fail."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    import httpx2

    from megatron.rl.engines.http_config import HttpEngineConfig

GONE_STATUSES = (502, 503, 504)
"""A gateway without a server behind it, or a server that still loads or has too much to do."""
PASSING_STATUSES = (408, 429)
"""Refusals that pass: too slow, too many."""
MAX_SHOWN = 500
"""Characters shown of what a server says."""


class OutageError(Exception):
    """The server is not there; it is no fault of the request.

    Args:
        what: What happened.
        no_connection: Nobody took the connection, so that the server will be another process when
            it is back; otherwise one said that it cannot serve now.
    """

    def __init__(self, what: str, *, no_connection: bool) -> None:
        super().__init__(what)
        self.no_connection = no_connection


class PassingError(Exception):
    """This call failed; the next may not.

    Args:
        what: What happened.
        wait_s: Seconds that the server asks to wait before the next call.
    """

    def __init__(self, what: str, *, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class RefusedError(Exception):
    """The server will say the same again: a mistake in the request, or a server of another kind."""


def check_library() -> None:
    """Refuse an installation without the library that calls are made with.

    Raises:
        ImportError: It is not installed.
    """
    if find_spec("httpx2") is None:
        raise ImportError("rollouts over HTTP need httpx2: pip install 'megatron-slime[engine]'")


def open_client(config: HttpEngineConfig) -> httpx2.AsyncClient:
    """A client for all servers, in the event loop that runs.

    Servers are asked directly: a proxy that the environment names leads away from the cluster.
    """
    import httpx2

    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(headers=headers, limits=limits, trust_env=False)


async def post(
    client: httpx2.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    connect_timeout_s: float,
    timeout_s: float,
) -> dict[str, Any]:
    """Send JSON, get JSON.

    Args:
        client: Of the running event loop.
        url: With the path.
        body: The request.
        connect_timeout_s: For the connection, in seconds.
        timeout_s: From the request to the whole answer, in seconds.

    Returns:
        The answer.

    Raises:
        OutageError: Nobody listens.
        PassingError: Worth another call.
        RefusedError: Not worth another call.
    """
    import httpx2

    timeout = httpx2.Timeout(None, connect=connect_timeout_s)
    response = await _response(client.post(url, json=body, timeout=timeout), timeout_s)
    if response.is_success:
        return _object(response)
    what = f"HTTP {response.status_code}: {_message(response)}"
    if response.status_code in PASSING_STATUSES or response.status_code >= 500:
        raise PassingError(what, wait_s=_seconds(response.headers.get("retry-after")))
    raise RefusedError(what)


async def knock(client: httpx2.AsyncClient, url: str, *, timeout_s: float) -> None:
    """Return where somebody answers at `url`, whatever the answer is.

    Raises:
        OutageError: Nobody does.
        PassingError: Nobody does in time.
    """
    await _response(client.get(f"{url}/health", timeout=None), timeout_s)


def shown(text: str) -> str:
    """A text on one line, its end cut off where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


async def _response(call: Awaitable[httpx2.Response], timeout_s: float) -> httpx2.Response:
    """Of a call; that of a gateway without a server behind it is none."""
    import httpx2

    try:
        async with asyncio.timeout(timeout_s):
            response = await call
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise OutageError(f"no connection: {_named(error)}", no_connection=True) from error
    except TimeoutError as error:
        raise PassingError(f"no answer within {timeout_s:g} s") from error
    except httpx2.TransportError as error:
        raise PassingError(f"the connection was lost: {_named(error)}") from error
    if response.status_code in GONE_STATUSES:
        what = f"HTTP {response.status_code}: {_message(response)}"
        raise OutageError(what, no_connection=False)
    return response


def _object(response: httpx2.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError as error:
        what = f"the answer is no JSON ({shown(str(error))}): {shown(response.text[-200:])!r}"
        raise PassingError(what) from error
    if not isinstance(answer, dict):
        raise PassingError(f"the answer must be a JSON object: type={type(answer).__name__}")
    return answer


def _message(response: httpx2.Response) -> str:
    """What the server says is wrong, out of the several forms in which servers say it."""
    try:
        content = response.json()
    except ValueError:
        return shown(response.text) or response.reason_phrase
    while isinstance(content, dict):
        inner = [content[key] for key in ("error", "message", "detail") if content.get(key)]
        if not inner:
            break
        content = inner[0]
    return shown(content if isinstance(content, str) else json.dumps(content))


def _named(error: Exception) -> str:
    return shown(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _seconds(header: str | None) -> float:
    """Of a Retry-After header; its other form, a date, is not read."""
    return float(header) if header is not None and header.isdecimal() else 0.0
