"""A small run's command line, for tests that change one thing of it."""

import json
from pathlib import Path

from megatron.rl.arguments import FlagError, resolve
from megatron.rl.config import RunConfig
from megatron.rl.flags.rule import Violation

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def rollouts(directory: Path) -> str:
    """An empty rollout file: flags look at its name only."""
    file = directory / "rollouts.jsonl"
    file.touch()
    return str(file)


def hf_directory(directory: Path) -> str:
    """A Hugging Face directory without weights."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return str(directory)


def small_run(directory: Path, flags: str = "", model: str = MODEL) -> list[str]:
    """The words of a run that breaks no rule, and `flags` after them.

    Flags that name --rollout-watch or --rollout-engine stand in for --rollout-data.
    """
    comes_later = "--rollout-watch" in flags or "--rollout-engine" in flags
    data = [] if comes_later else ["--rollout-data", rollouts(directory)]
    return [
        *data,
        *["--lr", "1e-6"],
        *model.split(),
        *flags.split(),
    ]


def resolved(directory: Path, flags: str = "", world_size: int = 1, **others: object) -> RunConfig:
    """The small run with `flags`, on a machine without a GPU unless told otherwise."""
    return resolve(small_run(directory, flags), world_size, **{"has_driver": False, **others})


def violations(
    argv: list[str], world_size: int = 1, *, has_driver: bool = False
) -> list[Violation]:
    """What is wrong with a command line."""
    try:
        resolve(argv, world_size, has_driver=has_driver)
    except FlagError as error:
        return list(error.violations)
    return []
