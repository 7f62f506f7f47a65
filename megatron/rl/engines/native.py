"""The model in training as its own engine: for small models and tests.

Every replica draws its share of the responses with the weights it trains, a batch at a time, with a
cache of keys and values. Tensor-parallel ranks draw together; context-parallel ranks each draw a
share of their own, since each holds the whole model. Large models want an engine of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megatron.rl.attention import PackedRows
from megatron.rl.engines.cache import KeyValueCache, PromptRows, TokenRows
from megatron.rl.engines.draw import Drawn, draw, uniforms
from megatron.rl.engines.engine import Completion, EngineError, Request, Sampling
from megatron.rl.logging import progress
from megatron.rl.model import on_hidden, rotary_of, unwrap
from megatron.rl.step import Trainee
from slime_loss import ContiguousLayout
from slime_loss.collectives import all_gather_rows

COMPACT_BELOW = 0.75
"""Ended responses leave the batch when fewer than this share of its rows is still being drawn:
to leave at once would copy the cache for each."""


@dataclass
class NativeEngine:
    """Draws with the model in training.

    Args:
        trainee: the model; one pipeline stage.
        batch_size: responses that a replica draws at a time; bounds the cache.
    """

    trainee: Trainee
    batch_size: int = 64
    _weight_version: int | None = field(default=None, init=False)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw this replica's share; see `Engine.generate`.

        Communicates over the tensor-parallel group, whose first rank returns the responses.
        """
        grid = self.trainee.grid
        replica, replicas = grid.groups.dp_cp.rank(), grid.groups.dp_cp.size()
        first, last = (len(requests) * part // replicas for part in (replica, replica + 1))
        own = requests[first:last]
        chunk = unwrap(self.trainee.chunks[0])
        completions: list[Completion] = []
        chunk.eval()
        with (
            torch.no_grad(),
            progress(
                desc="rollout", total=len(own), unit="sample", is_writer=grid.is_writer
            ) as bar,
        ):
            for start in range(0, len(own), self.batch_size):
                batch = _Batch(own[start : start + self.batch_size], sampling, self.trainee)
                completions += batch.run(bar, self._weight_version)
        chunk.train()
        return completions if grid.groups.tp.rank() == 0 else []

    def refresh(self, weight_version: int) -> None:
        """The weights are the model's own already."""
        self._weight_version = weight_version

    def close(self) -> None:
        """Nothing outlives a call."""


class _Batch:
    """Responses that are drawn together, a token of each at a time."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, trainee: Trainee) -> None:
        self._sampling = sampling
        self._trainee = trainee
        self._responses = [_Response.to(request, sampling) for request in requests]
        self._cache = KeyValueCache(max(response.longest for response in self._responses))
        # whose tokens the rows of cache and logits are
        self._rows = list(self._responses)

    def run(self, bar: tqdm, weight_version: int | None) -> list[Completion]:
        """Draw every response to its end."""
        logits = self._read_prompts()
        while self._rows:
            uniform = [response.next_uniform() for response in self._rows]
            drawn = draw(logits, torch.tensor(uniform, device=logits.device), self._sampling)
            bar.update(self._take(drawn))
            self._drop_ended()
            if self._rows:
                logits = self._read_tokens()
        return [response.completion(weight_version) for response in self._responses]

    def _read_prompts(self) -> Tensor:
        """The first pass, over each distinct prompt once; the logits [responses, V] behind it."""
        config, grid = self._trainee.config, self._trainee.grid
        numbers: dict[bytes, int] = {}
        of_response = [
            numbers.setdefault(response.request.prompt_ids.tobytes(), len(numbers))
            for response in self._responses
        ]
        prompts = [torch.frombuffer(bytearray(prompt), dtype=torch.int64) for prompt in numbers]
        layout = ContiguousLayout(
            [len(prompt) for prompt in prompts], pad_to_multiple_of=config.layout.row_multiple
        )
        positions = layout.shard(torch.cat([torch.arange(len(prompt)) for prompt in prompts]))
        tables = rotary_of(config).table(positions)
        rows = PromptRows.of(layout, "thd", tables, grid.device)
        rows.cache = self._cache
        ends = layout.cu_seqlens[1:].long() - 1
        logits = self._logits(layout.shard(torch.cat(prompts)), positions, rows, ends)
        index = torch.tensor(of_response, device=grid.device)
        self._cache.select(index)
        return logits[index]

    def _read_tokens(self) -> Tensor:
        """A pass over the newest token of each row; the logits [rows, V] behind it."""
        config, device, count = self._trainee.config, self._trainee.grid.device, len(self._rows)
        padding = [0] * (-count % config.layout.row_multiple)
        ids = torch.tensor([response.tokens[-1] for response in self._rows] + padding)
        positions = torch.tensor([response.length - 1 for response in self._rows] + padding)
        cosines, sines = rotary_of(config).table(positions)
        rows = TokenRows(
            qkv_format="thd",
            cosines=cosines.to(device),
            sines=sines.to(device),
            cache=self._cache,
            positions=positions[:count].to(device),
        )
        return self._logits(ids, positions, rows, torch.arange(count))

    def _logits(self, ids: Tensor, positions: Tensor, rows: PackedRows, wanted: Tensor) -> Tensor:
        """The logits [wanted, V] of some rows, whole on every tensor-parallel rank."""
        grid, config = self._trainee.grid, self._trainee.config

        def project(hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
            if config.transformer.sequence_parallel:
                hidden = all_gather_rows(hidden, grid.groups.tp)
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            columns = weight.to(dtype) @ hidden[wanted].to(dtype).T
            return all_gather_rows(columns, grid.groups.tp)[: config.model.vocab_size].T

        return unwrap(self._trainee.chunks[0])(
            ids[None].to(grid.device),
            positions[None].to(grid.device),
            None,
            packed_seq_params=rows,
            output_processor=on_hidden(project),
            output_processor_context=wanted.to(grid.device),
        )

    def _take(self, drawn: Drawn) -> int:
        """Append what was drawn; how many responses ended with it."""
        tokens, log_probs = drawn.tokens.tolist(), drawn.log_probs.tolist()
        before = sum(response.is_drawing for response in self._rows)
        for row, response in enumerate(self._rows):
            if response.is_drawing:
                response.take(tokens[row], log_probs[row], drawn.kept_of(row))
        return before - sum(response.is_drawing for response in self._rows)

    def _drop_ended(self) -> None:
        alive = [row for row, response in enumerate(self._rows) if response.is_drawing]
        if len(alive) < COMPACT_BELOW * len(self._rows):
            self._cache.select(torch.tensor(alive, device=self._trainee.grid.device).long())
            self._rows = [self._rows[row] for row in alive]


@dataclass
class _Response:
    """One response while it is drawn.

    Args:
        request: what it answers.
        limit: most tokens of it.
        stop_token_ids: what ends it.
        draws: float64 [limit] in [0, 1).
    """

    request: Request
    limit: int
    stop_token_ids: tuple[int, ...]
    draws: np.ndarray
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def to(cls, request: Request, sampling: Sampling) -> _Response:
        """The response to a request, not begun.

        Raises:
            EngineError: The prompt leaves no room for it.
        """
        limit, length = sampling.max_response_length, len(request.prompt_ids)
        if sampling.max_length is not None:
            limit = min(limit, sampling.max_length - length)
        if limit < 1:
            raise EngineError(
                f"the prompt of sample {request.index} must be shorter than "
                f"{sampling.max_length} tokens: {length}"
            )
        return cls(request, limit, sampling.stop_token_ids, uniforms(request.seed, limit))

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens it may come to, prompt included."""
        return len(self.request.prompt_ids) + self.limit

    @property
    def is_stopped(self) -> bool:
        """Whether a stop token ended it."""
        return bool(self.tokens) and self.tokens[-1] in self.stop_token_ids

    @property
    def is_drawing(self) -> bool:
        """Whether it wants another token."""
        return not self.is_stopped and len(self.tokens) < self.limit

    def next_uniform(self) -> float:
        """What its next token is drawn with; anything once it has ended."""
        return self.draws[min(len(self.tokens), self.limit - 1)]

    def take(self, token: int, log_prob: float, kept: np.ndarray | None) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if kept is not None:
            self.kept.append(kept)

    def completion(self, weight_version: int | None) -> Completion:
        """The whole of it."""
        counts = [len(ids) for ids in self.kept]
        return Completion(
            index=self.request.index,
            tokens=np.array(self.tokens, np.int64),
            log_probs=np.array(self.log_probs, np.float32),
            status="completed" if self.is_stopped else "truncated",
            kept_ids=np.concatenate(self.kept) if self.kept else None,
            kept_offsets=np.cumsum([0, *counts]) if self.kept else None,
            weight_version=weight_version,
        )
