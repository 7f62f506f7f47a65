"""Where a run's rollouts come from, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megatron.rl.sources.files import RolloutRows


class Source(Protocol):
    """Rollout k of a run, the same whenever it is asked for; every rank asks alike."""

    def rollout(self, k: int, weight_version: int) -> RolloutRows | None:
        """The rows of rollout k.

        Args:
            k: from 0.
            weight_version: optimizer steps that the model in training has taken.

        Returns:
            None where it is not there yet; the caller asks again.

        Raises:
            BadRowsError: a row breaks a rule, or a file is not what it was.
            EndOfRolloutsError: there will be none.
        """
        ...

    def rollout_sizes(self) -> Iterator[int]:
        """Samples of each rollout as far as they can be foreseen, for the length of the run."""
        ...

    def describe(self) -> str:
        """Figures for the start of a run, one a line."""
        ...

    def identity(self) -> dict[str, object]:
        """What the number of a rollout means; a resumed run must have the same."""
        ...


class EndOfRolloutsError(Exception):
    """No further rollout will come; the run ends as if it had taken its last step."""
