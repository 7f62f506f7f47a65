"""An engine for tests, and what a trainer computes for its completions."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from megatron.rl.engines.engine import Completion, Request, Sampling
from megatron.rl.engines.http import HttpEngine
from megatron.rl.engines.http_config import HttpEngineConfig
from slime_loss import log_probs_from_logits
from tests.megatron.rl.engines.server import EngineServers
from tests.megatron.rl.tiny import VOCAB_SIZE

QUICK = {"backoff_s": 0.02, "max_backoff_s": 0.1, "gone_limit_s": 60.0}


def engine_for(servers: EngineServers, *, num_urls: int = 1, **config: Any) -> HttpEngine:
    """An engine that asks the first servers, and does not wait long."""
    return engine_at(servers.urls[:num_urls], **config)


def engine_at(urls: tuple[str, ...], **config: Any) -> HttpEngine:
    """An engine that asks servers at these addresses, and does not wait long."""
    export = config.pop("export", None)
    settings = HttpEngineConfig(urls=urls, **(QUICK | config))
    return HttpEngine(settings, rank=0, export=export, vocab_size=VOCAB_SIZE)


def requests(number: int = 3) -> list[Request]:
    """Requests with prompts of different lengths, numbered from 7."""
    draw = np.random.default_rng(0)
    return [
        Request(7 + i, draw.integers(0, VOCAB_SIZE, 2 + i % 3), seed=(3, i)) for i in range(number)
    ]


def trainer_log_probs(
    model_path: Path, request: Request, completion: Completion, sampling: Sampling
) -> np.ndarray:
    """Log-probs of a completion's tokens as the loss computes them, kept ids replayed."""
    model = _model(model_path)
    tokens = torch.tensor(np.concatenate([request.prompt_ids, completion.tokens]))
    first = len(request.prompt_ids) - 1
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, first:-1]
    mask = None
    if completion.kept_ids is not None:
        mask = torch.zeros(logits.shape, dtype=torch.bool)
        offsets = completion.kept_offsets
        for row in range(len(mask)):
            mask[row, completion.kept_ids[offsets[row] : offsets[row + 1]]] = True
    labels = torch.tensor(completion.tokens)
    temperature = sampling.temperature or 1.0
    return log_probs_from_logits(
        logits, labels, temperature=temperature, keep_mask=mask
    ).log_probs.numpy()


@cache
def _model(path: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path)


def assert_same(completions: list[Completion], others: list[Completion]) -> None:
    """Same tokens, log-probs and states."""
    assert [one.index for one in completions] == [other.index for other in others]
    for one, other in zip(completions, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.log_probs, other.log_probs)
        assert one.status == other.status
