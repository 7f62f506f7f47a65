"""What is known of rows of logits beside the logits, once the whole vocabulary was looked at."""

from typing import NamedTuple

from jaxtyping import Int64
from torch import Tensor


class Totals(NamedTuple):
    """What the gradient must know of whole rows, [n] each, the same on every rank.

    `policy_*` normalise the log-probs (over the kept columns), `full_*` the entropy: the largest
    u and the sum of e^(u - max). Without a keep mask the two are the same.
    """

    policy_max: Tensor
    policy_sum: Tensor
    full_max: Tensor
    full_sum: Tensor
    entropy: Tensor | None

    def at(self, rows: slice | Int64[Tensor, " chosen"]) -> "Totals":
        """Those of some of the rows."""
        return Totals(
            self.policy_max[rows],
            self.policy_sum[rows],
            self.full_max[rows],
            self.full_sum[rows],
            None if self.entropy is None else self.entropy[rows],
        )


class Coefficients(NamedTuple):
    """The gradients of the loss with respect to log-probs and entropy, [n] each.

    Where the entropy has no gradient its coefficients are None.
    """

    log_probs: Tensor
    entropy: Tensor | None

    def at(self, rows: slice | Int64[Tensor, " chosen"]) -> "Coefficients":
        """Those of some of the rows."""
        return Coefficients(
            self.log_probs[rows], None if self.entropy is None else self.entropy[rows]
        )

    def has_any(self) -> bool:
        """Whether any row has a gradient."""
        return bool(self._is_active().any())

    def active(self) -> Int64[Tensor, " active"]:
        """The rows that have any gradient."""
        return self._is_active().nonzero().squeeze(1)

    def _is_active(self) -> Tensor:
        is_active = self.log_probs != 0
        return is_active if self.entropy is None else is_active | (self.entropy != 0)


class RowFacts(NamedTuple):
    """What the gradient of some rows of logits is made of, [c] each.

    Attributes:
        rows: Which of the labelled rows they are.
        totals: Of these rows.
        coefficients: Of these rows.
    """

    rows: Tensor
    totals: Totals
    coefficients: Coefficients

    def at(self, chosen: slice | Int64[Tensor, " chosen"]) -> "RowFacts":
        """Those of some of the rows."""
        return RowFacts(self.rows[chosen], self.totals.at(chosen), self.coefficients.at(chosen))
