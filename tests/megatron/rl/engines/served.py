"""The model that the engine servers of tests serve."""

import threading
from typing import Any

import torch
from transformers import LlamaForCausalLM

LOADING = threading.Lock()
"""transformers changes what is global while it loads a model."""


class Model:
    """Weights that draw."""

    def __init__(self, directory: str) -> None:
        with LOADING:
            self.weights = LlamaForCausalLM.from_pretrained(directory).eval()

    def draw(self, prompt: list[int], params: dict[str, Any], log_probs: str) -> dict[str, list]:
        """Tokens of one response, with their log-probs, the kept ids and the likeliest ids."""
        generator = torch.Generator().manual_seed(params["seed"] or 0)
        drawn: dict[str, list] = {"ids": [], "log_probs": [], "kept": [], "likeliest": []}
        while len(drawn["ids"]) < params["num_tokens"]:
            with LOADING, torch.inference_mode():
                logits = self.weights(torch.tensor([prompt + drawn["ids"]])).logits[0, -1].double()
            temperature = params["temperature"] or 1.0
            scaled = logits / temperature
            kept = keep(scaled.softmax(-1), params["top_p"], params["top_k"])
            allowed = torch.full_like(scaled, -torch.inf)
            allowed[kept] = scaled[kept]
            source = {"scaled": scaled, "raw": logits, "processed": allowed}[log_probs]
            said = source.log_softmax(-1)
            probabilities = allowed.softmax(-1)
            if params["temperature"] == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(probabilities, 1, generator=generator))
            top = said.topk(5)
            drawn["ids"].append(token)
            drawn["log_probs"].append(float(said[token]))
            drawn["kept"].append(kept)
            drawn["likeliest"].append(list(zip(*(part.tolist() for part in top), strict=True)))
            if token in params["stops"]:
                break
        return drawn


def keep(probabilities: Any, top_p: float, top_k: int) -> list[int]:
    """Ids of the likeliest tokens before which less than top_p is held, at most top_k of them."""
    total, kept = 0.0, []
    for token in probabilities.argsort(descending=True).tolist():
        if total >= top_p or (top_k > 0 and len(kept) >= top_k):
            break
        kept.append(token)
        total += float(probabilities[token])
    return sorted(kept)
