"""A tiny real model and rollouts for it, made on the spot."""

import json
import math
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 300

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
"""Of every model here, in Hugging Face's names; weights large enough to matter."""

MODEL_FLAGS = [
    "--num-layers=4",
    "--hidden-size=32",
    "--ffn-hidden-size=48",
    "--num-attention-heads=4",
    "--num-query-groups=2",
    "--normalization=RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    f"--vocab-size={VOCAB_SIZE}",
    "--max-position-embeddings=256",
]
"""The same shape as flags."""

RUN_FLAGS = ["--device=cpu", "--lr=1e-3", "--min-lr=0"]


def write_llama(
    directory: Path, *, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """A Hugging Face directory of a random Llama."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory)
    return directory


def write_qwen3(directory: Path, *, seed: int = 0) -> Path:
    """A Hugging Face directory of a random Qwen3: norms of queries and keys, untied."""
    torch.manual_seed(seed)
    config = Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def rollout_rows(num_groups: int = 4, group_size: int = 4, seed: int = 0) -> list[dict]:
    """Rows of random lengths, one of them masked in part and one whole response masked."""
    draw = random.Random(seed)
    rows = []
    for group in range(num_groups):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 12))]
        for member in range(group_size):
            length = draw.randint(1, 24)
            response = [draw.randrange(VOCAB_SIZE) for _ in range(length)]
            rows.append(
                {
                    "index": len(rows),
                    "group_index": group,
                    "tokens": prompt + response,
                    "response_length": length,
                    "loss_mask": [int(i != 1) for i in range(length)] if member else [1] * length,
                    "rollout_log_probs": [-draw.uniform(0.01, 6.0) for _ in range(length)],
                    "reward": float(draw.random() < 0.5),
                    "status": draw.choice(["completed", "truncated"]),
                }
            )
    rows[-1]["loss_mask"] = [0] * rows[-1]["response_length"]
    return rows


def with_every_field(rows: list[dict] | None = None) -> list[dict]:
    """The rows with reference log-probs, values and rollouts of two samples each as well."""
    draw = random.Random(7)
    return [
        row
        | {
            "ref_log_probs": [min(x + draw.uniform(-1, 1), 0.0) for x in row["rollout_log_probs"]],
            "values": [draw.uniform(-1, 1) for _ in row["rollout_log_probs"]],
            "rollout_index": row["index"] // 2,
        }
        for row in rows or rollout_rows()
    ]


def near_uniform(rows: list[dict]) -> list[dict]:
    """The rows with log-probs of engine and reference model as random weights give them."""
    draw = random.Random(5)

    def drawn(row: dict) -> list[float]:
        mean = -math.log(VOCAB_SIZE)
        return [min(draw.gauss(mean, 0.5), 0.0) for _ in range(row["response_length"])]

    return [row | {"rollout_log_probs": drawn(row), "ref_log_probs": drawn(row)} for row in rows]


def write_rollouts(path: Path, rows: list[dict] | None = None) -> Path:
    """The rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or rollout_rows()))
    return path
