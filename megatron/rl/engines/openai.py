"""`POST /v1/completions` of a server that takes and gives token ids, as vLLM does.

The format is that of vLLM 0.10.2 and newer (for `return_token_ids`; older ones name ids as texts
"token_id:7" under `return_tokens_as_token_ids`), read in its sources; no such server has been asked
yet. In it:

* A prompt may be a list of ids. `choices[0].token_ids` are the response's, the stop token included;
  `logprobs.token_logprobs` their log-probs; `finish_reason` is stop, length or abort.
* Log-probs are those of the model's own logits, before temperature, top-p and top-k. After
  `vllm serve --logprobs-mode processed_logprobs` they are those after them: at the temperature,
  among the tokens kept. Which those are is not said. Requests of temperature 0 have them at 1.
* There is no POST that loads weights; `update_weights_path` names one that a server was given. It
  gets {"model_path": ..., "weight_version": ...}, and must forget cached prefixes as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.rl.engines.answers import (
    NUM_LIKELIEST,
    Drawn,
    HalfAnswerError,
    completion_of,
    ids_of,
    log_probs_of,
    max_new_tokens,
    part,
    restricts,
    seed_of,
)
from megatron.rl.engines.calls import RefusedError
from megatron.rl.engines.engine import Completion, Request, Sampling
from megatron.rl.engines.http_config import HttpEngineConfig

ID_PREFIX = "token_id:"


@dataclass(frozen=True)
class OpenaiDialect:
    """Requests and answers of /v1/completions."""

    config: HttpEngineConfig
    vocab_size: int | None = None
    """Ids at and above it are refused; None: unknown."""
    path: str = "/v1/completions"

    def body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """What is posted to draw one response."""
        body = self._body(request, sampling.temperature, max_new_tokens(request, sampling))
        body["stop_token_ids"] = sorted(sampling.stop_token_ids)
        if restricts(sampling):
            if self.config.kept_ids != "none":
                raise RefusedError(
                    "/v1/completions does not name the tokens that top-p or top-k kept: "
                    f"top_p={sampling.top_p}, top_k={sampling.top_k}; draw from all tokens "
                    "(top_p=1, top_k=0), use type sglang, or compare log-probs "
                    "among all tokens (kept_ids=none)"
                )
            body |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1}
        return body

    def completion(
        self, answer: Mapping[str, Any], request: Request, sampling: Sampling
    ) -> Completion:
        """The answer, checked."""
        choice = _choice(answer)
        read = choice.get("prompt_token_ids")
        if read is not None and read != request.prompt_ids.tolist():
            raise RefusedError(
                f"the prompt was changed: {len(request.prompt_ids)} tokens sent, {len(read)} read, "
                "or others"
            )
        log_probs = part(part(choice, "logprobs", dict), "token_logprobs", list)
        drawn = Drawn(
            self._tokens(choice),
            log_probs_of(log_probs, "token_logprobs"),
            part(choice, "finish_reason", str),
        )
        return completion_of(drawn, request, sampling, self.version(answer))

    def likeliest_body(self, request: Request, temperature: float) -> dict[str, Any]:
        """What is posted to learn the log-probs of the likeliest first tokens."""
        return self._body(request, temperature, 1) | {"logprobs": NUM_LIKELIEST}

    def likeliest(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Log-probs of the likeliest first tokens, by text."""
        positions = part(part(_choice(answer), "logprobs", dict), "top_logprobs", list)
        if not positions or not isinstance(positions[0], dict):
            raise HalfAnswerError("top_logprobs must hold log-probs for each token")
        names = list(positions[0])
        values = log_probs_of(list(positions[0].values()), "top_logprobs").tolist()
        return dict(zip(names, values, strict=True))

    def version(self, answer: Mapping[str, Any]) -> str | None:
        """None: these answers do not say."""
        del answer
        return None

    def update_body(self, directory: str, version: int) -> dict[str, Any]:
        """What is posted to make the server load weights."""
        return {"model_path": directory, "weight_version": str(version)}

    def _body(self, request: Request, temperature: float, num_tokens: int) -> dict[str, Any]:
        """Everything that a server may have other defaults for is said."""
        body = {
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": num_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "n": 1,
            "stream": False,
            "logprobs": 1,
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        body |= {"seed": seed_of(request)} if self.config.seeded else {}
        return body | ({} if self.config.model is None else {"model": self.config.model})

    def _tokens(self, choice: Mapping[str, Any]) -> np.ndarray:
        """The response's ids, never made from its text."""
        if choice.get("token_ids") is not None:
            return ids_of(part(choice, "token_ids", list), "token_ids", self.vocab_size)
        texts = part(part(choice, "logprobs", dict), "tokens", list)
        if not all(isinstance(text, str) and text.startswith(ID_PREFIX) for text in texts):
            raise RefusedError(
                "the answer has texts and no token ids, and text is not tokenised again: serve "
                "with vLLM 0.10.2 or newer, which knows return_token_ids, or use type sglang"
            )
        numbers = [text.removeprefix(ID_PREFIX) for text in texts]
        ids = [int(number) if number.isdecimal() else number for number in numbers]
        return ids_of(ids, "tokens", self.vocab_size)


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = part(answer, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise HalfAnswerError(f"choices must hold one choice: choices={len(choices)}")
    return choices[0]
