"""One rollout sample, and what a run demands of the rows it reads.

Every source of samples (a file, an engine, the model itself) ends in `Sample`; everything after it
(advantages, packing, streams) starts from it. A row that breaks a rule is a `RowError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_ERRORS_SHOWN = 20


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One prompt and one response to it, as ids.

    L is the number of tokens (prompt and response), R the number of response tokens, 1 <= R < L.
    """

    index: int
    """The row's own number, unique in its file."""
    group_index: int
    """Samples of one prompt share it; unique over all files, so groups of two files never mix."""
    rollout_index: int
    """Samples of one rollout (the turns of a dialogue, for example) share it; likewise unique."""
    tokens: np.ndarray
    """Prompt and response ids, int64 [L]."""
    response_length: int
    """R: how many of the last tokens are the response."""
    loss_mask: np.ndarray
    """Which response tokens are trained, bool [R]; all False is allowed and trains nothing."""
    reward: float
    """0.0 where the row has none and the run needs none."""
    status: str
    """completed, truncated, aborted, failed or pending."""
    origin: str
    """"file:line" (the row number for Parquet files and slime's dumps)."""
    rollout_log_probs: np.ndarray | None = None
    """The rollout engine's log-probs at the rollout temperature, nats, float32 [R]."""
    ref_log_probs: np.ndarray | None = None
    """The reference model's log-probs, nats, float32 [R]."""
    values: np.ndarray | None = None
    """The critic's value before each response token, float32 [R]."""
    kept_ids: np.ndarray | None = None
    """Vocabulary ids top-p or top-k kept, all response tokens end to end, int64 [K]."""
    kept_offsets: np.ndarray | None = None
    """Response token i kept `kept_ids[kept_offsets[i]:kept_offsets[i + 1]]`, int64 [R + 1]."""
    num_cut_tokens: int = 0
    """Response tokens that the row has beyond R: cut off, since the sample was too long."""
    prompt: str | None = None
    response: str | None = None
    label: str | None = None

    @property
    def total_length(self) -> int:
        """L, in tokens."""
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """L - R, in tokens."""
        return len(self.tokens) - self.response_length

    @property
    def num_trained_tokens(self) -> int:
        """How many response tokens the loss mask keeps."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True)
class RowRules:
    """What a run demands of every row, beyond what every row must be."""

    vocab_size: int | None = None
    """Token ids must be below it (None: any id >= 0)."""
    reward_key: str | None = None
    """The reward is this key of the row's reward dict (None: the reward is a number)."""
    need_reward: bool = False
    need_group: bool = False
    need_rollout_log_probs: bool = False
    need_ref_log_probs: bool = False
    need_values: bool = False
    need_kept_ids: bool = False
    max_length: int | None = None
    """Most tokens a sample may have, prompt and response together (None: no limit)."""
    truncate: bool = False
    """A longer sample is cut at the end of its response, not refused."""

    def __post_init__(self) -> None:
        """Refuse limits that no row can meet."""
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size must be positive: vocab_size={self.vocab_size}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2: max_length={self.max_length}")


@dataclass(frozen=True)
class RowError:
    """One broken rule of one row (or of a whole file)."""

    file: str
    line: int
    """Counted from 1; the row number for Parquet files and slime's dumps; 0 = the whole file."""
    field: str
    rule: str
    value: str
    """As shown to the user, cut to a readable length."""
    fix: str = ""

    def __str__(self) -> str:
        """`file:line: field rule: field=value; fix: ...`."""
        file = printable(self.file)
        place = f"{file}:{self.line}" if self.line else file
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"{place}: {self.field} {self.rule}: {self.field}={self.value}{fix}"


def printable(text: str) -> str:
    """`text` on one line, with what a terminal would obey or cannot show as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class BadRowsError(Exception):
    """Data that must not be trained on.

    Args:
        errors: The first errors found, in the order of files and lines.
        num_errors: How many there were in all (None: as many as `errors`).
        what: What the rows are.
    """

    def __init__(
        self,
        errors: Sequence[RowError],
        num_errors: int | None = None,
        what: str = "rollout data",
    ) -> None:
        self.errors = list(errors)
        self.num_errors = len(self.errors) if num_errors is None else num_errors
        self.what = what
        super().__init__(self.errors, self.num_errors, what)

    def __str__(self) -> str:
        """The first errors, one a line, then how many more there are."""
        shown = self.errors[:NUM_ERRORS_SHOWN]
        lines = [f"{self.what} has {self.num_errors} error(s):", *(f"  {e}" for e in shown)]
        hidden = self.num_errors - len(shown)
        if hidden:
            lines.append(f"  ... and {hidden} more")
        return "\n".join(lines)
