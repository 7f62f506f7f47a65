"""Checked files of rollouts: random access to their rows, and the order a run reads them in.

A run's place in its data is one number: rollout k is a pure function of the files, the seed and k.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.rl.samples import BadRowsError, RowRules, Sample
from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import RowFile, open_rows
from megatron.rl.sources.index import checksum_of
from megatron.rl.sources.order import epoch_order
from megatron.rl.sources.row import BadFileError, BrokenRuleError
from megatron.rl.sources.rules import check_row, make_sample
from megatron.rl.sources.scan import error_of
from megatron.rl.sources.summary import RolloutSummary


class RolloutFiles:
    """Checked files of rollout rows, and random access to them.

    Made by `check_rollouts`. Holds an index of the rows, never the rows.

    Attributes:
        paths: The files.
        rows: The index, `ROW_DTYPE` [N]; a position in it names a row from here on.
        rules: What every row was found to obey.
        num_bad_rows: How many rows were skipped.
    """

    def __init__(
        self,
        paths: Sequence[str],
        rows: np.ndarray,
        rules: RowRules,
        *,
        num_bad_rows: int = 0,
        trust_pickle: bool = False,
    ) -> None:
        self.paths = tuple(paths)
        self.rows = rows
        self.rules = rules
        self.num_bad_rows = num_bad_rows
        self._trust_pickle = trust_pickle
        self._cache = UnitCache()

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what was read: another process has its own cache."""
        return self.__dict__ | {"_cache": UnitCache()}

    @property
    def summary(self) -> RolloutSummary:
        """The figures a user looks at first."""
        return RolloutSummary.of(self.rows, len(self.paths), self.num_bad_rows)

    @property
    def largest_group(self) -> int:
        """Samples of the largest group."""
        return int(np.bincount(self.rows["group"]).max())

    @property
    def fingerprint(self) -> str:
        """The same for the same rows, wherever the files lie; a resumed run compares it."""
        return hashlib.blake2b(self.rows.tobytes(), digest_size=16).hexdigest()

    def read(self, positions: Sequence[int]) -> list[Sample]:
        """The samples at these positions of the index, in this order.

        Raises:
            BadRowsError: A file is not what it was when it was checked.
        """
        of_file: dict[int, list[int]] = defaultdict(list)
        for position in positions:
            of_file[int(self.rows["file"][position])].append(int(position))
        samples: dict[int, Sample] = {}
        for file, wanted in of_file.items():
            samples.update(zip(wanted, self._read_file(self.paths[file], wanted), strict=True))
        return [samples[int(position)] for position in positions]

    def _read_file(self, path: str, positions: list[int]) -> Iterator[Sample]:
        try:
            reader = open_rows(path, self._cache, trust_pickle=self._trust_pickle)
            raws = reader.read([int(self.rows["place"][position]) for position in positions])
        except (BadFileError, OSError, IndexError) as error:
            raise changed_error(path, 0, error) from error
        for position, raw in zip(positions, raws, strict=True):
            yield self._sample(reader, path, self.rows[position], raw)

    def _sample(self, reader: RowFile, path: str, entry: np.void, raw: Any) -> Sample:
        line = int(entry["line"])
        try:
            row = reader.decode(raw)
            check_row(row, self.rules)
        except BrokenRuleError as fault:
            raise changed_error(path, line, fault) from fault
        lengths = (len(row.tokens), row.response_length)
        if lengths != (entry["total_length"], entry["response_length"]):
            raise changed_error(path, line, f"{lengths} tokens and response tokens")
        if checksum_of(row) != entry["checksum"]:
            raise changed_error(path, line, "other tokens, another mask or other numbers per token")
        return make_sample(row, entry, origin=f"{path}:{line}")


@dataclass(frozen=True)
class RolloutRows:
    """The rows of one rollout.

    Args:
        files: what they are read from.
        places: positions in `files.rows`, int64 [n], group after group.
        scalars: what is worth a curve beyond the rows themselves, by TensorBoard name.
    """

    files: RolloutFiles
    places: np.ndarray
    scalars: Mapping[str, float] = field(default_factory=dict)


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

    Attributes:
        files: The checked files.
        groups_per_rollout: Groups (prompts) of a rollout.
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
        self.groups_per_rollout = min(rollout_batch_size or self.num_groups, self.num_groups)

    @property
    def num_groups(self) -> int:
        """Prompts in the files."""
        return len(self._sizes)

    @property
    def rollouts_per_epoch(self) -> int:
        """Rollouts of one epoch, the last one smaller where the groups do not divide."""
        return -(-self.num_groups // self.groups_per_rollout)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of all epochs."""
        return self._num_epochs * self.rollouts_per_epoch

    def rollout_sizes(self) -> Iterator[int]:
        """Samples of each rollout, known before the first is read; epoch by epoch."""
        starts = np.arange(0, self.num_groups, self.groups_per_rollout)
        for epoch in range(self._num_epochs):
            by_order = self._sizes[self._order(epoch)]
            yield from np.add.reduceat(by_order, starts).tolist()

    def rollout_rows(self, k: int) -> np.ndarray:
        """The rows of rollout k, positions in `files.rows`, int64 [n], group after group."""
        if not 0 <= k < self.num_rollouts:
            raise ValueError(f"k must be in [0, {self.num_rollouts}): k={k}")
        epoch, part = divmod(k, self.rollouts_per_epoch)
        first = part * self.groups_per_rollout
        groups = self._order(epoch)[first : first + self.groups_per_rollout]
        spans = [self._members[self._starts[g] : self._starts[g + 1]] for g in groups]
        return np.concatenate(spans)

    def rollout(self, k: int, weight_version: int) -> RolloutRows:  # noqa: ARG002 -- files are there
        """The rows of rollout k; see `Source.rollout`."""
        return RolloutRows(self.files, self.rollout_rows(k))

    def identity(self) -> dict[str, object]:
        """See `Source.identity`."""
        return {
            "rollouts": self.files.fingerprint,
            "rollout_batch_size": self.groups_per_rollout,
            "shuffle": self._shuffle,
        }

    def describe(self) -> str:
        """The files' figures and how they are cut, for the start of a run."""
        lines = [
            str(self.files.summary),
            f"{'epochs':<18}{self._num_epochs} of {self.rollouts_per_epoch} rollouts,"
            f" {self.groups_per_rollout} groups each{self._remainder()}",
        ]
        wanted = self._n_samples_per_prompt
        if wanted is not None and (others := int((self._sizes != wanted).sum())):
            lines.append(f"{'other sizes':<18}{others} groups have not {wanted} samples")
        return "\n".join(lines)

    def _remainder(self) -> str:
        rest = self.num_groups % self.groups_per_rollout
        return f" (the last one {rest})" if rest else ""

    def _order(self, epoch: int) -> np.ndarray:
        """The groups in the order of one epoch."""
        if not self._shuffle:
            return np.arange(self.num_groups)
        return epoch_order(self.num_groups, self._seed, epoch)


def changed_error(path: str, line: int, found: object) -> BadRowsError:
    """The error of a file that is not what it was when it was checked."""
    rule = f"must be the file that was checked when the run began ({found})"
    fault = BadFileError(rule, "changed", "keep files as they are while a run reads them")
    return BadRowsError([error_of(fault, path, line)])
