"""Many jobs for several servers: bounded, balanced, repeated; and patience with one that is gone.

Every server has as many workers as it takes requests; they take jobs from one queue, so the faster
server gets more of them, and what does not fit waits here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from megatron.rl.engines.calls import OutageError, PassingError, RefusedError
from megatron.rl.engines.engine import EngineError
from megatron.rl.logging import log_info

if TYPE_CHECKING:
    from megatron.rl.engines.engine import Completion, Request
    from megatron.rl.engines.http_config import HttpEngineConfig
    from megatron.rl.engines.log_prob_kind import LogProbKind


@dataclass(eq=False)
class Server:
    """What is known of one server."""

    url: str
    down_since: float | None = None
    """When it was first found gone, by the monotonic clock, in seconds; None: it is there."""
    resume_at: float = 0.0
    """When it may be called again, in seconds."""
    last_error: str = ""
    num_outages: int = 0
    """Calls in a row, one wave of parallel ones counted once, that found it gone."""
    is_stale: bool = False
    """Whether it may hold other weights than the last ones: it was gone, so started again."""
    kind: LogProbKind | None = None
    """What its log-probs are; None: not known."""

    def gone_s(self, now: float) -> float:
        """For how long it has been gone, in seconds."""
        return 0.0 if self.down_since is None else now - self.down_since


@dataclass(order=True)
class Job:
    """Something that is wanted of a server, and how often it failed."""

    position: int
    """In the order of the requests; of those that wait, the first is next."""
    what: str = field(compare=False)
    """For messages."""
    num_failures: int = field(default=0, compare=False)


class Patience:
    """How long to wait, what to say meanwhile, and when to give up."""

    def __init__(self, config: HttpEngineConfig, servers: Sequence[Server]) -> None:
        self._config = config
        self._servers = servers
        self._random = Random()  # not the trainer's: waiting must not change what is trained
        self._last_said = -float("inf")

    def backoff_s(self, num_failures: int) -> float:
        """Wait before the next call after so many failures, in seconds."""
        exponent = min(num_failures - 1, 30)
        longest = min(self._config.max_backoff_s, self._config.backoff_s * 2**exponent)
        return longest * self._random.uniform(0.5, 1.0)

    def found_gone(self, server: Server, started: float, error: Exception) -> None:
        """Note that a call, begun at `started`, found the server gone.

        Raises:
            EngineError: All servers were gone for too long.
        """
        now = time.monotonic()
        server.last_error = str(error)
        if isinstance(error, OutageError) and error.no_connection:
            server.is_stale, server.kind = True, None
        if server.down_since is None:
            server.down_since = now
        if started >= server.resume_at:
            server.num_outages += 1
            server.resume_at = now + self.backoff_s(server.num_outages)
        limit = self._config.gone_limit_s
        gone_s = min(other.gone_s(now) for other in self._servers)
        if gone_s > limit:
            errors = "; ".join(f"{other.url}: {other.last_error}" for other in self._servers)
            raise EngineError(
                f"all servers have been gone for {gone_s:.0f} s, over gone_limit_s={limit:g}; "
                f"{errors}; start them again, correct the URLs, or raise gone_limit_s"
            )
        if now - self._last_said > self._config.progress_interval_s:
            self._last_said = now
            log_info(
                f"waiting for {server.url}, gone {server.gone_s(now):.0f} s of at most {limit:g}: "
                f"{server.last_error}"
            )

    def found_there(self, server: Server) -> None:
        """Note that the server has answered."""
        if server.down_since is not None:
            log_info(f"{server.url} is back after {server.gone_s(time.monotonic()):.0f} s")
        server.down_since, server.num_outages, server.resume_at = None, 0, 0.0

    def next_try_s(self, server: Server, job: Job, error: Exception) -> float:
        """Wait before a job that failed is tried again, in seconds.

        Raises:
            EngineError: It failed too often.
        """
        job.num_failures += 1
        if job.num_failures > self._config.retries:
            raise EngineError(
                f"{server.url}: {job.what} failed {job.num_failures} times, at last: {error}; "
                f"see the server's log, or raise retries={self._config.retries}"
            )
        asked = error.wait_s if isinstance(error, PassingError) else 0.0
        return max(self.backoff_s(job.num_failures), asked)


class Dispatcher:
    """Draws the responses of one call.

    Args:
        config: Bounds and patience.
        servers: At least one.
        ask: Draws one response; may raise OutageError, PassingError and RefusedError.
        knock: Returns where the server is there; may raise OutageError and PassingError.
    """

    def __init__(
        self,
        config: HttpEngineConfig,
        servers: Sequence[Server],
        ask: Callable[[Server, Request], Awaitable[Completion]],
        knock: Callable[[Server], Awaitable[None]],
    ) -> None:
        self._config = config
        self._servers = servers
        self._ask = ask
        self._knock = knock
        self._patience = Patience(config, servers)
        self._gates = {server.url: asyncio.Lock() for server in servers}
        self._queue: asyncio.PriorityQueue[Job] = asyncio.PriorityQueue()
        self._all_done = asyncio.Event()
        self._requests: Sequence[Request] = ()
        self._completions: dict[int, Completion] = {}
        self._num_tokens = 0

    async def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Draw one response to each request.

        Raises:
            EngineError: A request could not be answered; the others are then given up.
        """
        self._requests = requests
        for position, request in enumerate(requests):
            what = f"request {request.index} ({len(request.prompt_ids)} prompt tokens)"
            self._queue.put_nowait(Job(position, what))
        num_workers = min(self._config.concurrency, len(requests))
        works = [self._work(server) for server in self._servers for _ in range(num_workers)]
        tasks = [asyncio.create_task(work) for work in (*works, self._report())]
        tasks.append(asyncio.create_task(self._wait_for_all()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # raises what a worker raised
        return [self._completions[position] for position in range(len(requests))]

    async def _work(self, server: Server) -> None:
        while True:
            if server.down_since is not None:
                await self._until_there(server)
            job = await self._queue.get()
            if server.down_since is None:
                await self._try(server, job)
            else:  # found gone while this worker waited for a job
                self._queue.put_nowait(job)

    async def _until_there(self, server: Server) -> None:
        """Wait for a server that is gone; one worker knocks for all."""
        async with self._gates[server.url]:
            while server.down_since is not None:
                await asyncio.sleep(max(server.resume_at - time.monotonic(), 0.0))
                started = time.monotonic()
                try:
                    await self._knock(server)
                except (OutageError, PassingError) as error:
                    self._patience.found_gone(server, started, error)
                else:
                    self._patience.found_there(server)

    async def _try(self, server: Server, job: Job) -> None:
        started = time.monotonic()
        request = self._requests[job.position]
        try:
            completion = await self._ask(server, request)
        except OutageError as error:
            was_there = server.down_since is None
            self._patience.found_gone(server, started, error)
            if was_there:  # a request that always makes its server look gone must end, too
                self._patience.next_try_s(server, job, error)
            self._queue.put_nowait(job)
        except PassingError as error:
            await asyncio.sleep(self._patience.next_try_s(server, job, error))
            self._queue.put_nowait(job)
        except RefusedError as error:
            raise EngineError(f"{server.url}: {job.what}: {error}") from error
        else:
            self._completions[job.position] = completion
            self._num_tokens += len(completion.tokens)
            if len(self._completions) == len(self._requests):
                self._all_done.set()

    async def _wait_for_all(self) -> None:
        await self._all_done.wait()

    async def _report(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(self._config.progress_interval_s)
            seconds = time.monotonic() - started
            log_info(
                f"drawing responses: {len(self._completions)} of {len(self._requests)} in "
                f"{seconds:.0f} s, {self._num_tokens / seconds:.0f} tokens/s"
            )
