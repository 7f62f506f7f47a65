"""The learning rates that a schedule runs between, in an optimizer's parameter groups.

Core saves them with each group, reads the schedule from there, and from 0.19 on finds a saved group
by them. They are settings, not state: which ones a resumed run goes on with is for its flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells the groups of one optimizer apart."""

_RATES = ("max_lr", "min_lr")


def settle_rates(groups: Sequence[dict[str, Any]], state: Any, *, keep_saved: bool) -> None:
    """Make the rates of an optimizer's groups and of a loaded state the same, in place.

    Args:
        groups: the optimizer's parameter groups.
        state: its loaded state, before the optimizer takes it.
        keep_saved: whether the rates become the state's; otherwise the groups' own.
    """
    for saved in _saved_groups(state):
        for group in groups:
            if any(group.get(key) != saved.get(key) for key in _STRUCTURE):
                continue
            source, target = (saved, group) if keep_saved else (group, saved)
            target.update({key: source[key] for key in _RATES})


def _saved_groups(state: Any) -> Iterator[dict[str, Any]]:
    """Every parameter group in an optimizer's state, however deep its wrappers put it."""
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        else:
            yield from _saved_groups(value)
