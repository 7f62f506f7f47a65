"""Rollout files for measurements: ids, log-probs, rewards and text, drawn."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np


def write_rollouts(
    path: Path,
    lengths: Sequence[int],
    *,
    prompt_length: int,
    vocab: int,
    group_size: int = 8,
    seed: int = 0,
) -> Path:
    """One sample a line, of these lengths in tokens.

    Args:
        path: JSONL, written anew.
        lengths: Tokens of each sample, prompt and response, more than `prompt_length`.
        prompt_length: Tokens of every prompt.
        vocab: Ids are below it.
        group_size: Consecutive samples of one prompt.
        seed: Decides what is drawn.

    Returns:
        The path.
    """
    draw = np.random.default_rng(seed)
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for index, length in enumerate(lengths):
            response = length - prompt_length
            row = {
                "index": index,
                "group_index": index // group_size,
                "tokens": draw.integers(0, vocab, length).tolist(),
                "response_length": response,
                "rollout_log_probs": np.round(-draw.exponential(0.5, response), 6).tolist(),
                "reward": float(draw.integers(0, 2)),
                "status": "completed",
                "prompt": "abc " * prompt_length,
                "response": "abc " * response,
            }
            file.write(encoder.encode(row) + b"\n")
    return path
