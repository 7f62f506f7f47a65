"""Log-probs of responses by the model of a Hugging Face directory, on the CPU, by transformers.

An implementation that shares nothing with the trainer's model, to compare rollouts with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.rl.extras import import_extra
from megatron.rl.samples import Sample
from slime_loss import log_probs_from_logits


class HuggingFaceLogProbs:
    """Gives the log-probs of one sample's response at a time, in float32.

    Args:
        directory: config.json and safetensors; nothing is downloaded.
        temperature: divides the logits, > 0.

    Raises:
        ValueError: the temperature is not positive.
        OSError: transformers cannot read the directory.
        ModuleNotFoundError: transformers is not installed.
    """

    def __init__(self, directory: Path, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"rollout_temperature must be > 0: rollout_temperature={temperature}")
        if not directory.is_dir():
            raise OSError(f"no such directory: {directory}")
        transformers: Any = import_extra("transformers", "hf", "--model-log-probs")
        self._temperature = temperature
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def __call__(self, sample: Sample) -> Tensor:
        """Log-probs of the response tokens, fp32 [R], nats.

        Raises:
            ValueError: a token is not in the model's vocabulary.
        """
        tokens = torch.from_numpy(sample.tokens).long()
        size = self._model.config.vocab_size
        if int(tokens.max()) >= size:
            raise ValueError(
                f"{sample.origin}: tokens must be below the model's vocab_size {size}: "
                f"tokens={int(tokens.max())}; fix: give the model that sampled the rollouts"
            )
        logits = self._model(tokens[None], logits_to_keep=sample.response_length + 1).logits[0, :-1]
        labels = tokens[sample.prompt_length :]
        return log_probs_from_logits(
            logits.float(), labels, temperature=self._temperature
        ).log_probs
