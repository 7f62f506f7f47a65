"""The figures of a set of rollouts that a user looks at before training on them."""

from dataclasses import dataclass

import numpy as np

from megatron.rl.sources.row import STATUSES

NUM_SIZES_SHOWN = 5


@dataclass(frozen=True)
class Spread:
    """Smallest, mean and largest of some values."""

    min: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        """The spread of at least one value."""
        return cls(float(values.min()), float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class RolloutSummary:
    """What a set of rollouts is made of. Lengths in tokens, shares in [0, 1]."""

    num_files: int
    num_samples: int
    num_groups: int
    num_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    group_sizes: dict[int, int]
    """How many groups there are of each size."""
    total_length: Spread
    prompt_length: Spread
    response_length: Spread
    reward: Spread
    reward_std: float
    """Over all samples, n - 1; 0.0 for one sample."""
    equal_reward_groups: float
    """Share of groups whose samples all have the same reward: they give a policy no gradient."""
    statuses: dict[str, int]
    num_masked_samples: int
    """Samples none of whose tokens is trained."""
    num_cut_samples: int
    """Samples that were too long and lost the end of their response."""
    num_cut_tokens: int
    num_with_rollout_log_probs: int
    num_bad_rows: int

    @classmethod
    def of(cls, rows: np.ndarray, num_files: int, num_bad_rows: int) -> "RolloutSummary":
        """The summary of an index of at least one row."""
        sizes, counts = np.unique(np.bincount(rows["group"]), return_counts=True)
        statuses = np.bincount(rows["status"], minlength=len(STATUSES)).tolist()
        reward = rows["reward"]
        return cls(
            num_files=num_files,
            num_samples=len(rows),
            num_groups=int(counts.sum()),
            num_tokens=int(rows["total_length"].sum()),
            num_response_tokens=int(rows["response_length"].sum()),
            num_trained_tokens=int(rows["num_trained_tokens"].sum()),
            group_sizes=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
            total_length=Spread.of(rows["total_length"]),
            prompt_length=Spread.of(rows["total_length"] - rows["response_length"]),
            response_length=Spread.of(rows["response_length"]),
            reward=Spread.of(reward),
            reward_std=float(reward.std(ddof=1)) if len(rows) > 1 else 0.0,
            equal_reward_groups=_equal_reward_groups(rows),
            statuses={name: n for name, n in zip(STATUSES, statuses, strict=True) if n},
            num_masked_samples=int((rows["num_trained_tokens"] == 0).sum()),
            num_cut_samples=int((rows["num_cut_tokens"] > 0).sum()),
            num_cut_tokens=int(rows["num_cut_tokens"].sum()),
            num_with_rollout_log_probs=int(rows["has_rollout_log_probs"].sum()),
            num_bad_rows=num_bad_rows,
        )

    def __str__(self) -> str:
        """A small table."""
        samples, trained = self.num_samples, self.num_trained_tokens
        statuses = ", ".join(f"{n:,} {name}" for name, n in self.statuses.items())
        table = {
            "files": f"{self.num_files:,}",
            "samples": f"{samples:,} ({statuses})",
            "groups": f"{self.num_groups:,} ({_sizes(self.group_sizes)})",
            "tokens": f"{self.num_tokens:,}, {self.num_response_tokens:,} of them response",
            "trained tokens": f"{trained:,} ({trained / self.num_response_tokens:.1%} of response)",
            "total length": _spread(self.total_length, ",.0f"),
            "prompt length": _spread(self.prompt_length, ",.0f"),
            "response length": _spread(self.response_length, ",.0f"),
            "reward": f"{_spread(self.reward, '.4g')}, std {self.reward_std:.4g}",
            "equal rewards": f"{self.equal_reward_groups:.1%} of groups (no gradient from them)",
            "masked samples": f"{self.num_masked_samples:,} (no token trained)",
            "cut samples": f"{self.num_cut_samples:,} ({self.num_cut_tokens:,} tokens cut off)",
            "rollout_log_probs": f"in {self.num_with_rollout_log_probs:,} of {samples:,} samples",
            "bad rows": f"{self.num_bad_rows:,} skipped",
        }
        return "\n".join(f"{name:<18}{text}" for name, text in table.items())


def _sizes(sizes: dict[int, int]) -> str:
    """The sizes most groups have, as `14 of 8`."""
    common = sorted(sizes.items(), key=lambda item: -item[1])
    text = ", ".join(f"{n:,} of {size}" for size, n in common[:NUM_SIZES_SHOWN])
    others = len(common) - NUM_SIZES_SHOWN
    return text if others <= 0 else f"{text}, and {others} other sizes"


def _spread(spread: Spread, form: str) -> str:
    return f"min {spread.min:{form}}, mean {spread.mean:{form}}, max {spread.max:{form}}"


def _equal_reward_groups(rows: np.ndarray) -> float:
    by_group = rows[np.argsort(rows["group"], kind="stable")]
    starts = np.flatnonzero(np.diff(by_group["group"], prepend=-1))
    low = np.minimum.reduceat(by_group["reward"], starts)
    high = np.maximum.reduceat(by_group["reward"], starts)
    return float((low == high).mean())
