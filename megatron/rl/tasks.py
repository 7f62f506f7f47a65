"""Tasks of reasoning-gym: items that are made by number and score their own answers."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from megatron.rl.extras import import_extra


def make_task(name: str, parameters: Mapping[str, Any], seed: int, size: int) -> Any:
    """A dataset of reasoning-gym: item i depends on `seed + i`, the parameters and, rarely, size.

    Args:
        name: What reasoning-gym calls it.
        parameters: Fields of its config, without seed and size.
        seed: Of its first item.
        size: How many items it has.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed; the message names the extra.
        ValueError: There is no such task, or it refuses the parameters.
    """
    import_extra("reasoning_gym", "tasks", f"the task {name}")
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        like = ", ".join(get_close_matches(name, DATASETS, 3)) or "none is spelt like it"
        raise ValueError(f"task must be one of reasoning-gym's ({like}?): task={name!r}")
    try:
        return create_dataset(name, **{**parameters, "seed": seed, "size": size})
    except Exception as error:  # each config checks itself in its own way
        why = f"{type(error).__name__}: {error}"
        rule = f"must suit the task {name} ({why})"
        raise ValueError(f"task_parameters {rule}: task_parameters={dict(parameters)}") from error
