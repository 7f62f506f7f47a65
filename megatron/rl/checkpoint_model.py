"""The model's part of a checkpoint: its weights, and the architecture that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import CheckpointException

from megatron.rl.checkpoint_files import CheckpointError
from megatron.rl.checkpoint_manifest import garbled
from megatron.rl.checkpoint_pickles import cause, check_metadata, plain_values_only
from megatron.rl.config import RunConfig
from megatron.rl.model import RLModel

ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "num_moe_experts",
    "moe_router_topk",
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "swiglu",
    "squared_relu",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
)
"""Fields of the model that its weights belong to; shapes show few of them."""
COMMON = frozenset(
    {
        "architecture",
        "contents",
        "data",
        "old_outputs",
        "optimizer_format",
        "optimizer_kind",
        "progress",
        "topology",
    }
)
"""What every checkpoint says of itself."""
IS_CRITIC = "is_critic"
OUTPUT_LAYER = "output_layer.weight"


def load_model_weights(config: RunConfig, chunks: Sequence[RLModel], checkpoint: Path) -> None:
    """Fill models of any layout with the weights of a checkpoint, and nothing else.

    The value head of a critic stays as it is where the checkpoint is a policy's.

    Args:
        config: what the models are built from.
        chunks: this rank's model chunks, not wrapped.
        checkpoint: as `find_checkpoint` gives it.

    Raises:
        CheckpointError: the architecture differs, or a tensor does not fit.
    """
    if (complaint := contents_complaint(checkpoint)) is not None:
        raise CheckpointError(complaint)
    common = load_common(checkpoint)
    architecture = architecture_of(config)
    adds_value_head = architecture[IS_CRITIC] and not common["architecture"].get(IS_CRITIC)
    if adds_value_head:
        del architecture[IS_CRITIC]
    # equal shapes do not make equal models: 8 heads of 16 and 4 heads of 32 load into each other
    check_architecture(common, checkpoint, architecture)
    wanted = sharded(chunks)
    own_heads = [
        of_chunk.pop(OUTPUT_LAYER, None) for of_chunk in wanted["model"] if adds_value_head
    ]
    state = load_strictly(wanted, checkpoint, whole=False)
    for of_chunk, head in zip(state["model"], own_heads, strict=bool(own_heads)):
        if head is not None:
            of_chunk[OUTPUT_LAYER] = head.data
    fill(chunks, state)


def sharded(chunks: Sequence[RLModel]) -> dict[str, Any]:
    """What of the model is read or written, under names that know no layout."""
    return {"model": [chunk.sharded_state_dict() for chunk in chunks]}


def fill(chunks: Sequence[RLModel], state: Mapping[str, Any]) -> None:
    """Put what was read into the model."""
    for chunk, of_chunk in zip(chunks, state["model"], strict=True):
        chunk.load_state_dict(of_chunk, strict=True)


def load_strictly(state: dict[str, Any], directory: Path, *, whole: bool) -> dict[str, Any]:
    """Read what `state` asks for: all of it must be there, and with `whole` nothing more."""
    strict = StrictHandling.RAISE_ALL if whole else StrictHandling.RAISE_UNEXPECTED
    with _named(directory), plain_values_only():
        return dist_checkpointing.load(state, str(directory), strict=strict)


def load_common(directory: Path) -> dict[str, Any]:
    """What is the same for all ranks: progress, architecture, topology, data.

    Raises:
        CheckpointError: it cannot be read, would run code, or another program has written it.
    """
    check_metadata(directory)
    with _named(directory), plain_values_only():
        common = dist_checkpointing.load_common_state_dict(str(directory))
    missing = sorted(COMMON.difference(common if isinstance(common, dict) else ()))
    if missing:
        raise CheckpointError(
            f"{directory} must be a checkpoint of this trainer: it has no {', '.join(missing)}"
        )
    return common


def contents_complaint(directory: Path) -> str | None:
    """What in a checkpoint's files is not as it was written.

    All ranks of the job call it together, share the files out, and have the same answer.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, garbled(directory, dist.get_rank(), dist.get_world_size()))
    return next((f"{directory} is broken: {complaint}" for complaint in found if complaint), None)


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Name the checkpoint in whatever is wrong with it; torch's own error is no Exception."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{directory} cannot be loaded into this run: {cause(error)}"
        ) from error


def architecture_of(config: RunConfig) -> dict[str, Any]:
    """The fields of the model that its weights belong to, and whether it is a critic."""
    fields = {
        name: getattr(config.model if hasattr(config.model, name) else config.transformer, name)
        for name in ARCHITECTURE
    }
    return fields | {IS_CRITIC: config.is_critic}


def check_architecture(
    common: Mapping[str, Any], directory: Path, architecture: Mapping[str, Any]
) -> None:
    """Compare an architecture with the checkpoint's.

    Raises:
        CheckpointError: naming every field that differs.
    """
    fix = "use the flags that it was saved with"
    refuse_differences(directory, common["architecture"], architecture, fix)


def refuse_differences(
    directory: Path, saved: Mapping[str, Any], here: Mapping[str, Any], fix: str
) -> None:
    """Raise CheckpointError, naming every entry of `here` that the checkpoint has differently."""
    differences = [
        f"{name}: checkpoint {saved.get(name)}, this run {value}"
        for name, value in here.items()
        if saved.get(name) != value
    ]
    if differences:
        named = "; ".join(differences)
        raise CheckpointError(f"{directory} does not fit this run: {named}; fix: {fix}")
