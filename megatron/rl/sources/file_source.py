"""Rollouts from files, a pure function of (seed, k): a run's place in its data is one number."""

import numpy as np

from megatron.rl.samples import Sample
from megatron.rl.sources.files import RolloutFiles


class FileSource:
    """Cuts checked files into rollouts of whole prompt groups, epoch after epoch.

    Every epoch holds each group once. Its last rollout takes what is left, so none is dropped.

    Args:
        files: The checked files.
        rollout_batch_size: Groups (prompts) of a rollout; None makes an epoch one rollout.
        num_epochs: How often the files are gone through.
        seed: Decides the order of the groups, together with the epoch.
        shuffle: False keeps the order of the files.
        n_samples_per_prompt: The size groups should have; others are reported, not refused.
    """

    def __init__(
        self,
        files: RolloutFiles,
        *,
        rollout_batch_size: int | None = None,
        num_epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        n_samples_per_prompt: int | None = None,
    ) -> None:
        for name, value in (("rollout_batch_size", rollout_batch_size), ("num_epochs", num_epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive: {name}={value}")
        if seed < 0:
            raise ValueError(f"seed must not be negative: seed={seed}")
        self.files = files
        self._num_epochs = num_epochs
        self._seed = seed
        self._shuffle = shuffle
        self._n_samples_per_prompt = n_samples_per_prompt
        groups = files.rows["group"]
        self._members = np.argsort(groups, kind="stable")  # rows, group by group
        self._sizes = np.bincount(groups)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self._rollout_groups = min(rollout_batch_size or self.num_groups, self.num_groups)

    @property
    def num_groups(self) -> int:
        """Prompts in the files."""
        return len(self._sizes)

    @property
    def rollouts_per_epoch(self) -> int:
        """Rollouts of one epoch, the last one smaller where the groups do not divide."""
        return -(-self.num_groups // self._rollout_groups)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of all epochs."""
        return self._num_epochs * self.rollouts_per_epoch

    def epoch_of(self, k: int) -> int:
        """The epoch, from 0, that rollout k belongs to."""
        return k // self.rollouts_per_epoch

    def rollout_sizes(self) -> list[int]:
        """Samples of each rollout, known before the first is read."""
        sizes: list[int] = []
        for epoch in range(self._num_epochs):
            by_order = self._sizes[self._order(epoch)]
            starts = np.arange(0, self.num_groups, self._rollout_groups)
            sizes += np.add.reduceat(by_order, starts).tolist()
        return sizes

    def rollout_rows(self, k: int) -> np.ndarray:
        """The rows of rollout k, positions in `files.rows`, int64 [n], group after group.

        The index has their lengths, rewards and groups; a rank reads only the rows it trains on.
        """
        if not 0 <= k < self.num_rollouts:
            raise ValueError(f"k must be in [0, {self.num_rollouts}): k={k}")
        epoch, part = divmod(k, self.rollouts_per_epoch)
        first = part * self._rollout_groups
        groups = self._order(epoch)[first : first + self._rollout_groups]
        spans = [self._members[self._starts[g] : self._starts[g + 1]] for g in groups]
        return np.concatenate(spans)

    def rollout(self, k: int) -> list[Sample]:
        """The samples of rollout k, group after group."""
        return self.files.read(self.rollout_rows(k))

    def describe(self) -> str:
        """The files' figures and how they are cut, for the start of a run."""
        lines = [
            str(self.files.summary),
            f"{'epochs':<18}{self._num_epochs} of {self.rollouts_per_epoch} rollouts,"
            f" {self._rollout_groups} groups each{self._remainder()}",
        ]
        wanted = self._n_samples_per_prompt
        if wanted is not None and (others := int((self._sizes != wanted).sum())):
            lines.append(f"{'other sizes':<18}{others} groups have not {wanted} samples")
        return "\n".join(lines)

    def _remainder(self) -> str:
        rest = self.num_groups % self._rollout_groups
        return f" (the last one {rest})" if rest else ""

    def _order(self, epoch: int) -> np.ndarray:
        """The groups in the order of one epoch.

        Sorts raw 64-bit draws: numpy keeps a bit generator's stream for good, `permutation`'s it
        may change, and a resumed run must go on in the same order.
        """
        if not self._shuffle:
            return np.arange(self.num_groups)
        draws = np.random.PCG64([self._seed, epoch]).random_raw(self.num_groups)
        return np.argsort(draws, kind="stable")


def steps_of(num_samples: int, global_batch_size: int) -> list[list[int]]:
    """Cut a rollout into optimizer steps: consecutive positions, the remainder a step of its own.

    Args:
        num_samples: Samples of the rollout.
        global_batch_size: Samples of a step.

    Returns:
        The positions of each step.
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size must be positive: {global_batch_size=}")
    starts = range(0, num_samples, global_batch_size)
    return [list(range(i, min(i + global_batch_size, num_samples))) for i in starts]
