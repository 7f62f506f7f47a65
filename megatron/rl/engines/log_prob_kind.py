"""Which log-probs a server gives, found out by asking instead of believing.

Servers differ, by kind, version and start-up flags, in whether their log-probs are those after the
temperature and whether top-p and top-k leave tokens out of them. Wrong ones look right, so a server
is asked once for numbers that tell, before the first response that depends on the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.rl.engines.answers import Dialect, HalfAnswerError, restricts
from megatron.rl.engines.calls import RefusedError
from megatron.rl.engines.engine import Completion, Request, Sampling

PROBE_TEMPERATURE = 4.0
"""So high that the likeliest tokens do not hold all probability, however sure the model is."""
PROBE_SAMPLING = Sampling(max_response_length=1, temperature=PROBE_TEMPERATURE, top_k=2)
"""Of the one token that tells whether log-probs are those among the kept ones."""
MIN_LEFT_OUT = 1e-3
"""Less probability left out by top_k=2 than this tells nothing."""


@dataclass(frozen=True)
class LogProbKind:
    """What a server's log-probs are of."""

    likeliest: Mapping[str, float]
    """Of the likeliest first tokens at PROBE_TEMPERATURE, nats."""
    is_scaled: bool
    """Whether they are those after the temperature."""
    is_among_kept: bool | None = None
    """Whether they are those among the tokens that top-p and top-k keep; None: not asked."""


def needs_kind(sampling: Sampling, kind: LogProbKind | None) -> bool:
    """Whether something must be found out before these responses can be drawn."""
    if sampling.temperature in (0, 1) and not restricts(sampling):
        return False
    return kind is None or (restricts(sampling) and kind.is_among_kept is None)


def scaled_kind(at_1: Mapping[str, float], at_probe: Mapping[str, float]) -> LogProbKind:
    """The kind, as far as the likeliest first tokens at two temperatures tell it.

    Their spread, most likely less least likely, is divided by the temperature or left as it is.

    Args:
        at_1: Log-probs of the likeliest first tokens at temperature 1, nats.
        at_probe: The same at PROBE_TEMPERATURE.

    Raises:
        HalfAnswerError: Fewer than two tokens are in both.
    """
    common = at_1.keys() & at_probe.keys()
    if len(common) < 2:
        raise HalfAnswerError("the likeliest tokens must be two or more, at any temperature")
    spreads = [
        max(log_probs[name] for name in common) - min(log_probs[name] for name in common)
        for log_probs in (at_1, at_probe)
    ]
    scaled = spreads[0] / PROBE_TEMPERATURE
    is_scaled = abs(spreads[1] - scaled) <= abs(spreads[1] - spreads[0])
    return LogProbKind(at_probe, is_scaled)


def kept_kind(kind: LogProbKind, drawn: Completion) -> LogProbKind:
    """The kind, with what one token tells that was drawn as PROBE_SAMPLING says.

    Its log-prob is one of the likeliest two's among all tokens, or among these two.
    """
    likeliest = np.sort(list(kind.likeliest.values()))[-2:]
    shift = float(np.logaddexp(*likeliest))
    if shift > -MIN_LEFT_OUT:
        return kind
    distances = np.abs(float(drawn.log_probs[0]) - likeliest)
    distances_among_kept = np.abs(float(drawn.log_probs[0]) - (likeliest - shift))
    return replace(kind, is_among_kept=bool(distances_among_kept.min() < distances.min()))


def check_kind(dialect: Dialect, kind: LogProbKind, sampling: Sampling, *, ignores: bool) -> None:
    """Refuse a server whose log-probs are not those that the trainer computes.

    Args:
        dialect: How the server is asked.
        kind: What it answers.
        sampling: What is drawn.
        ignores: Whether kept ids are ignored, so that log-probs must be those among all tokens.

    Raises:
        RefusedError: They differ.
    """
    processed = "serve vLLM with --logprobs-mode processed_logprobs"
    if sampling.temperature not in (0, 1) and not kind.is_scaled:
        raise RefusedError(
            f"the log-probs of {dialect.path} are those before the temperature: "
            f"temperature={sampling.temperature}; {processed}, SGLang without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB, or draw at temperature 1"
        )
    if restricts(sampling) and kind.is_among_kept == ignores:
        among, wanted = ("kept", "all") if ignores else ("all", "kept")
        raise RefusedError(
            f"the log-probs of {dialect.path} are those among {among} tokens, and the trainer's "
            f"among {wanted}: top_p={sampling.top_p}, top_k={sampling.top_k}; choose "
            "kept_ids to fit the server, or draw from all tokens (top_p=1, top_k=0)"
        )


async def ask_kind(
    post_body: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]],
    dialect: Dialect,
    request: Request,
    sampling: Sampling,
    kind: LogProbKind | None,
) -> LogProbKind:
    """Find out by two short requests, or three.

    Args:
        post_body: Posts a body to the server and returns the answer.
        dialect: How the server is asked.
        request: Its prompt is used.
        sampling: What is to be drawn.
        kind: What is known.
    """
    if kind is None:
        answers = [
            dialect.likeliest(await post_body(dialect.likeliest_body(request, temperature)))
            for temperature in (1.0, PROBE_TEMPERATURE)
        ]
        kind = scaled_kind(*answers)
    if restricts(sampling) and kind.is_among_kept is None:
        answer = await post_body(dialect.body(request, PROBE_SAMPLING))
        kind = kept_kind(kind, dialect.completion(answer, request, PROBE_SAMPLING))
    return kind
