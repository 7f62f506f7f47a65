"""SGLang's own `POST /generate`: ids in, ids and log-probs out.

The format is that of SGLang 0.5.3 and newer (for `sampling_seed` and `weight_version`), read in its
sources and in slime's client and patches; no such server has been asked yet. In it:

* `meta_info.output_token_logprobs` holds [log-prob, id, text] for each token, the stop token
  included; `finish_reason` is {"type": "stop" | "length" | "abort", ...}; `weight_version` is a
  text, "default" until weights were loaded under another name.
* Log-probs are those after the temperature, among ALL tokens, whatever top-p and top-k are; with
  SGLANG_RETURN_ORIGINAL_LOGPROB set on the server, those before it. At temperature 0 they are those
  at 1.
* Kept ids have two sources. slime's build answers `custom_params.return_top_p_token_ids` by
  `meta_info.top_p_token_ids` and `top_p_token_offsets` (base64 of int32, or lists), and its
  log-probs are then among the kept ids and the token itself. Newer builds of SGLang answer
  `return_sampling_mask` by `output_token_sampling_mask`, a list of ids for each token, and
  `output_token_sampling_logprobs`.
* The model's own end token ends a response beside `stop_token_ids`; `ignore_eos` switches off both.
  A stop token at the longest length is "length".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from megatron.rl.engines.answers import (
    NUM_LIKELIEST,
    Drawn,
    HalfAnswerError,
    check_offsets,
    completion_of,
    ids_of,
    integers_of,
    log_probs_of,
    max_new_tokens,
    part,
    restricts,
    seed_of,
)
from megatron.rl.engines.calls import RefusedError
from megatron.rl.engines.engine import Completion, Request, Sampling
from megatron.rl.engines.http_config import HttpEngineConfig


@dataclass(frozen=True)
class SglangDialect:
    """Requests and answers of SGLang."""

    config: HttpEngineConfig
    vocab_size: int | None = None
    """Ids at and above it are refused; None: unknown."""
    path: str = "/generate"

    def body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """What is posted to draw one response."""
        stops = sorted(sampling.stop_token_ids)
        params = self._params(request, sampling.temperature, max_new_tokens(request, sampling))
        params |= {"stop_token_ids": stops, "ignore_eos": not stops}
        body = self._body(request, params)
        if not restricts(sampling):
            return body
        params |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1}
        if self.config.kept_ids == "top_p_token_ids":
            params["custom_params"] = {"return_top_p_token_ids": True}
        elif self.config.kept_ids == "sampling_mask":
            body["return_sampling_mask"] = True
        return body

    def completion(
        self, answer: Mapping[str, Any], request: Request, sampling: Sampling
    ) -> Completion:
        """The answer, checked."""
        meta = part(answer, "meta_info", dict)
        rows = part(meta, "output_token_logprobs", list)
        if not all(map(_is_row, rows)):
            raise HalfAnswerError(
                "output_token_logprobs must hold [log-prob, id, ...] for each token"
            )
        tokens = ids_of([row[1] for row in rows], "output_token_logprobs", self.vocab_size)
        for name, found in (
            ("output_ids", answer.get("output_ids", tokens.tolist()) == tokens.tolist()),
            ("completion_tokens", meta.get("completion_tokens", len(tokens)) == len(tokens)),
        ):
            if not found:
                raise HalfAnswerError(f"{name} is not that of the {len(tokens)} log-probs")
        num_read = meta.get("prompt_tokens", len(request.prompt_ids))
        if num_read != len(request.prompt_ids):
            raise RefusedError(
                f"the prompt was changed: {len(request.prompt_ids)} tokens sent, {num_read} read"
            )
        log_probs = [row[0] for row in rows]
        kept_ids = kept_offsets = None
        if restricts(sampling) and self.config.kept_ids != "none":
            log_probs, kept_ids, kept_offsets = self._kept(meta, log_probs)
            check_offsets(kept_offsets, len(tokens), len(kept_ids))
        finish = part(part(meta, "finish_reason", dict), "type", str)
        drawn = Drawn(tokens, log_probs_of(log_probs, "log_probs"), finish, kept_ids, kept_offsets)
        return completion_of(drawn, request, sampling, self.version(answer))

    def likeliest_body(self, request: Request, temperature: float) -> dict[str, Any]:
        """What is posted to learn the log-probs of the likeliest first tokens."""
        params = self._params(request, temperature, 1) | {"ignore_eos": True}
        top = {"top_logprobs_num": NUM_LIKELIEST, "return_text_in_logprobs": True}
        return self._body(request, params) | top

    def likeliest(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Log-probs of the likeliest first tokens, by id."""
        positions = part(part(answer, "meta_info", dict), "output_top_logprobs", list)
        rows = positions[0] if positions else None
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise HalfAnswerError(
                "output_top_logprobs must hold [log-prob, id] in each token's list"
            )
        log_probs = log_probs_of([row[0] for row in rows], "output_top_logprobs").tolist()
        return {str(row[1]): log_prob for row, log_prob in zip(rows, log_probs, strict=True)}

    def version(self, answer: Mapping[str, Any]) -> str | None:
        """The name of the weights that the answer was drawn with."""
        version = part(answer, "meta_info", dict).get("weight_version")
        return None if version is None else str(version)

    def update_body(self, directory: str, version: int) -> dict[str, Any]:
        """What is posted to make the server load weights."""
        return {
            "model_path": directory,
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": True,
        }

    def _body(self, request: Request, params: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }

    def _params(self, request: Request, temperature: float, num_tokens: int) -> dict[str, Any]:
        """Everything that a server may have other defaults for is said."""
        params = {
            "max_new_tokens": num_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }
        return params | ({"sampling_seed": seed_of(request)} if self.config.seeded else {})

    def _kept(
        self, meta: Mapping[str, Any], log_probs: list[Any]
    ) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """Log-probs among the kept ids, the kept ids, their offsets."""
        is_mask = self.config.kept_ids == "sampling_mask"
        ids_name = "output_token_sampling_mask" if is_mask else "top_p_token_ids"
        if ids_name not in meta:
            raise RefusedError(
                "top-p or top-k left tokens out, and the answer names none of those kept: no "
                f"meta_info.{ids_name}; serve slime's build of SGLang (kept_ids=top_p_token_ids), "
                "one with return_sampling_mask (kept_ids=sampling_mask), draw from all tokens "
                "(top_p=1, top_k=0), or compare log-probs among all tokens (kept_ids=none)"
            )
        if not is_mask:
            ids = integers_of(meta[ids_name], ids_name)
            offsets = integers_of(part(meta, "top_p_token_offsets", object), "top_p_token_offsets")
        else:
            sets = part(meta, ids_name, list)
            if not all(isinstance(kept, list) for kept in sets):
                raise HalfAnswerError(f"{ids_name} must hold a list for each token")
            ids = [token for kept in sets for token in kept]
            offsets = list(accumulate(map(len, sets), initial=0))
            log_probs = part(meta, "output_token_sampling_logprobs", list)
        kept_offsets = ids_of(offsets, "offsets of kept ids", None)
        return log_probs, ids_of(ids, ids_name, self.vocab_size), kept_offsets


def _is_row(row: object) -> bool:
    """Whether it can be [log-prob, id, text]."""
    return isinstance(row, list) and len(row) >= 2
