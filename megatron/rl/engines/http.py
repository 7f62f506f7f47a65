"""Rollouts from servers that run beside the trainer, asked over HTTP by rank 0 alone.

The wire formats are in `sglang` and `openai`, retries and back-pressure in `dispatch`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.rl.engines.answers import Dialect, max_new_tokens
from megatron.rl.engines.calls import (
    OutageError,
    PassingError,
    RefusedError,
    check_library,
    knock,
    open_client,
    post,
)
from megatron.rl.engines.dispatch import Dispatcher, Job, Patience, Server
from megatron.rl.engines.engine import Completion, EngineError, Request, Sampling
from megatron.rl.engines.log_prob_kind import ask_kind, check_kind, needs_kind
from megatron.rl.engines.openai import OpenaiDialect
from megatron.rl.engines.sglang import SglangDialect
from megatron.rl.logging import log_info, log_warning

if TYPE_CHECKING:
    import httpx2

    from megatron.rl.engines.http_config import HttpEngineConfig

WEIGHTS_NAME = re.compile(r"weights_\d+|\.weights_\d+\.partial")
DIALECTS: Mapping[str, type[SglangDialect | OpenaiDialect]] = {
    "sglang": SglangDialect,
    "openai": OpenaiDialect,
}


class HttpEngine:
    """An `Engine` over HTTP servers.

    Rank 0 asks the servers; the other ranks get nothing to do and return at once, so what follows
    must wait for rank 0, and learn from it of an `EngineError`, by a collective of the caller's.

    Args:
        config: The servers.
        rank: This process's.
        export: Writes the model in training as a Hugging Face directory that does not exist yet;
            every rank calls it with the same path, and rank 0 writes. None: weights are never sent.
        vocab_size: Ids at and above it are refused; None: unknown.

    Raises:
        ImportError: httpx2 is not installed.
    """

    def __init__(
        self,
        config: HttpEngineConfig,
        *,
        rank: int,
        export: Callable[[Path], None] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        check_library()
        self._config = config
        self._rank = rank
        self._export = export
        self._dialect: Dialect = DIALECTS[config.type](config, vocab_size)
        self._servers = [Server(url) for url in config.urls]
        self._weights: Path | None = None
        self._version: int | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one response to each request; see `Engine`.

        A prompt that leaves no room for a response is answered by an aborted completion.

        Raises:
            EngineError: On rank 0, where a request could not be answered.
        """
        if self._rank != 0:
            return []
        fitting = [request for request in requests if max_new_tokens(request, sampling) > 0]
        drawn = asyncio.run(self._generate(fitting, sampling)) if fitting else []
        answered = {id(request): answer for request, answer in zip(fitting, drawn, strict=True)}
        return [answered.get(id(request)) or _no_room(request) for request in requests]

    def refresh(self, weight_version: int) -> None:
        """Give the servers the weights that the model in training has now; see `Engine`.

        The weights are written to a new directory below `weights_dir`, every server loads them,
        then older directories are removed: none is ever changed. A server that is gone is waited
        for as `generate` does; where another one is there, it gets them when it is back. After an
        error the servers may hold different weights: the run must end.

        Raises:
            EngineError: No way to send weights, on every rank; or no server took them, or one
                refused, on rank 0.
        """
        if weight_version == self._version:
            return
        export, parent = self._ways_to_send()
        directory = parent / f"weights_{weight_version:07d}"
        if self._rank == 0:
            parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)  # of a run that ended here
        export(directory)
        self._weights, self._version = directory, weight_version
        if self._rank == 0:
            asyncio.run(self._send_to_all())
            for other in parent.iterdir():
                if other != directory and WEIGHTS_NAME.fullmatch(other.name):
                    shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Nothing is held between calls; the last weights stay, for servers that read them late."""

    async def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        async with open_client(self._config) as client:
            locks = {server.url: asyncio.Lock() for server in self._servers}

            async def ask(server: Server, request: Request) -> Completion:
                async with locks[server.url]:
                    await self._prepare(client, server, request, sampling)
                body = self._dialect.body(request, sampling)
                answer = await self._post(client, server, body)
                self._check_version(server, answer)
                return self._dialect.completion(answer, request, sampling)

            async def knock_at(server: Server) -> None:
                await knock(client, server.url, timeout_s=self._config.connect_timeout_s)

            return await Dispatcher(self._config, self._servers, ask, knock_at).run(requests)

    async def _prepare(
        self, client: httpx2.AsyncClient, server: Server, request: Request, sampling: Sampling
    ) -> None:
        """Bring a server that was started again up to date, and learn what its log-probs are."""
        if server.is_stale and self._weights is not None:
            await self._send(client, server)
        if not needs_kind(sampling, server.kind):
            return

        async def post_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
            return await self._post(client, server, body)

        server.kind = await ask_kind(post_body, self._dialect, request, sampling, server.kind)
        ignores = self._config.kept_ids == "none"
        check_kind(self._dialect, server.kind, sampling, ignores=ignores)

    def _check_version(self, server: Server, answer: Mapping[str, Any]) -> None:
        version = self._dialect.version(answer)
        if None not in (version, self._version) and version != str(self._version):
            server.is_stale = True
            raise PassingError(f"drawn with weights {version!r} and not {self._version}")

    async def _post(
        self, client: httpx2.AsyncClient, server: Server, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        return await post(
            client,
            server.url + self._dialect.path,
            body,
            connect_timeout_s=self._config.connect_timeout_s,
            timeout_s=self._config.request_timeout_s,
        )

    def _ways_to_send(self) -> tuple[Callable[[Path], None], Path]:
        """The export and the directory below which it writes."""
        urls = ", ".join(self._config.urls)
        if self._config.update_path is None:
            raise EngineError(
                f"{urls}: a server of type openai has no POST that loads weights: "
                "update_weights_path=None; name one that the server was given, or use type sglang"
            )
        if self._export is None or self._config.weights_dir is None:
            raise EngineError(
                f"{urls}: weights are sent through a directory that the servers can read: "
                f"weights_dir={self._config.weights_dir}, export={self._export}; give both"
            )
        return self._export, Path(self._config.weights_dir)

    async def _send_to_all(self) -> None:
        started = time.monotonic()
        for server in self._servers:
            server.is_stale = True
        patience = Patience(self._config, self._servers)
        async with open_client(self._config) as client:
            sends = [self._send_patiently(client, server, patience) for server in self._servers]
            await asyncio.gather(*sends)
        late = [server.url for server in self._servers if server.is_stale]
        if late:
            log_warning(f"gone, so without the new weights until they are back: {', '.join(late)}")
        seconds = time.monotonic() - started
        log_info(f"servers have weights {self._version} after {seconds:.1f} s: {self._weights}")

    async def _send_patiently(
        self, client: httpx2.AsyncClient, server: Server, patience: Patience
    ) -> None:
        """Send the weights, or leave the server stale where it is gone and another is not."""
        job = Job(0, f"loading weights {self._version}")
        while server.is_stale:
            started = time.monotonic()
            try:
                await self._send(client, server)
            except OutageError as error:
                patience.found_gone(server, started, error)
                if server.gone_s(time.monotonic()) > self._config.gone_limit_s:
                    return
                await asyncio.sleep(max(server.resume_at - time.monotonic(), 0.0))
            except PassingError as error:
                await asyncio.sleep(patience.next_try_s(server, job, error))
            except RefusedError as error:
                raise EngineError(f"{server.url}: {job.what}: {error}") from error
            else:
                patience.found_there(server)

    async def _send(self, client: httpx2.AsyncClient, server: Server) -> None:
        assert self._weights is not None
        assert self._version is not None
        directory = self._config.seen_by_servers(self._weights)
        answer = await post(
            client,
            f"{server.url}{self._config.update_path}",
            self._dialect.update_body(directory, self._version),
            connect_timeout_s=self._config.connect_timeout_s,
            timeout_s=self._config.update_timeout_s,
        )
        if answer.get("success") is False:
            raise RefusedError(f"{directory} was not loaded: {answer.get('message')}")
        server.is_stale, server.kind = False, None


def _no_room(request: Request) -> Completion:
    """The answer to a prompt that is as long as prompt and response together may be."""
    none = np.zeros(0)
    return Completion(request.index, none.astype(np.int64), none.astype(np.float32), "aborted")
