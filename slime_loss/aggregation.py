"""One weight per token, from denominators of the whole optimizer step: the loss is a plain sum.

Computed before a step is cut into micro-batches and ranks, so no cut can change the loss.
Source: constant is Dr. GRPO's, arXiv 2503.20783; token_mean is DAPO's, arXiv 2503.14476.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from slime_loss.batch import check_alike


def sample_weights(
    num_trained_tokens: Int[Tensor, " samples"],
    *,
    aggregation: str,
    count_masked_samples: bool = False,
    rollout_index: Int64[Tensor, " samples"] | None = None,
    group_index: Int64[Tensor, " samples"] | None = None,
    constant: float | None = None,
) -> Float64[Tensor, " samples"]:
    """The weight that each trained token of each sample has in the step's loss.

    * sample_mean: the mean over samples of each sample's token mean;
    * rollout_mean: the mean over rollouts of the token mean of all the rollout's samples;
    * prompt_mean: the mean over prompt groups of the token mean of all the group's samples;
    * token_mean: the mean over all trained tokens;
    * constant: the sum over all trained tokens, divided by the number of samples times a constant.

    Args:
        num_trained_tokens: [N], of every sample of the optimizer step, over all ranks.
        aggregation: One of these names.
        count_masked_samples: Whether a sample without a trained token counts as one whose loss is
            0, in the number of samples of sample_mean and constant. Likewise a rollout.
        rollout_index: [N], equal for the samples of one rollout; needed by rollout_mean.
        group_index: [N], equal for the samples of one prompt; needed by prompt_mean.
        constant: Tokens, > 0, for example the longest response allowed; needed by constant.

    Returns:
        [N]; 0 for a sample without a trained token.

    Raises:
        ValueError: The aggregation is unknown, what it needs is missing, the constant is not > 0,
            or the shapes or devices differ.
    """
    if aggregation not in _DENOMINATORS:
        raise ValueError(
            f"aggregation must be one of {', '.join(_DENOMINATORS)}: aggregation={aggregation!r}"
        )
    step = _Step(
        num_trained_tokens.double(), count_masked_samples, rollout_index, group_index, constant
    )
    return torch.where(step.num_tokens > 0, 1 / _DENOMINATORS[aggregation](step), 0.0)


def loss_weights(
    loss_mask: Bool[Tensor, " tokens"],
    sample_index: Int64[Tensor, " tokens"],
    *,
    aggregation: str,
    count_masked_samples: bool = False,
    rollout_index: Int64[Tensor, " samples"] | None = None,
    group_index: Int64[Tensor, " samples"] | None = None,
    constant: float | None = None,
) -> Float64[Tensor, " tokens"]:
    """The weight of each row in the step's loss, for a whole step laid out as one stream.

    Args:
        loss_mask: [T], true where a row trains.
        sample_index: [T], the sample of each row, in any order; -1 at padding rows.
        aggregation: As in `sample_weights`.
        count_masked_samples: As in `sample_weights`.
        rollout_index: [N], that of sample i at i; as in `sample_weights`.
        group_index: [N], that of sample i at i; as in `sample_weights`.
        constant: As in `sample_weights`.

    Returns:
        [T]; 0 where a row does not train.

    Raises:
        ValueError: As for `sample_weights`, a shape or device differs, a row trains that belongs
            to no sample, or rollout_index or group_index has no entry for a sample.
    """
    check_alike("sample_index", sample_index, "loss_mask", loss_mask)
    if bool((loss_mask & (sample_index < 0)).any()):
        row = int((loss_mask & (sample_index < 0)).nonzero()[0])
        raise ValueError(
            f"sample_index must be >= 0 where loss_mask is true: "
            f"sample_index[{row}]={int(sample_index[row])}"
        )
    samples, sample = torch.unique(sample_index, return_inverse=True)
    num_trained_tokens = torch.zeros_like(samples).index_add(0, sample, loss_mask.long())
    present = samples >= 0
    weights = torch.zeros_like(samples, dtype=torch.float64)
    weights[present] = sample_weights(
        num_trained_tokens[present],
        aggregation=aggregation,
        count_masked_samples=count_masked_samples,
        rollout_index=_of_samples("rollout_index", rollout_index, samples[present]),
        group_index=_of_samples("group_index", group_index, samples[present]),
        constant=constant,
    )
    return torch.where(loss_mask, weights[sample], 0.0)


def _of_samples(name: str, index: Tensor | None, samples: Tensor) -> Tensor | None:
    """The entries of `index` at the given samples, which are in ascending order."""
    if index is None:
        return None
    if samples.shape[0] > 0 and int(samples[-1]) >= index.shape[0]:
        raise ValueError(
            f"{name} must have an entry for every sample of sample_index: "
            f"{name}.shape={tuple(index.shape)}, sample_index.max()={int(samples[-1])}"
        )
    return index[samples]


@dataclass(frozen=True)
class _Step:
    """What a denominator may depend on: the arguments of `sample_weights`."""

    num_tokens: Tensor
    count_masked: bool
    rollout_index: Tensor | None
    group_index: Tensor | None
    constant: float | None

    @property
    def num_samples(self) -> Tensor:
        return _num_units(self.num_tokens, self.count_masked)


def _sample_mean(step: _Step) -> Tensor:
    return step.num_tokens * step.num_samples


def _rollout_mean(step: _Step) -> Tensor:
    if step.rollout_index is None:
        raise ValueError("rollout_index is needed by rollout_mean: rollout_index=None")
    per_rollout, rollout = _per_unit(step.num_tokens, "rollout_index", step.rollout_index)
    return per_rollout[rollout] * _num_units(per_rollout, step.count_masked)


def _prompt_mean(step: _Step) -> Tensor:
    if step.group_index is None:
        raise ValueError("group_index is needed by prompt_mean: group_index=None")
    per_group, group = _per_unit(step.num_tokens, "group_index", step.group_index)
    return per_group[group] * _num_units(per_group, count_masked=False)


def _token_mean(step: _Step) -> Tensor:
    return step.num_tokens.sum()


def _constant(step: _Step) -> Tensor:
    if step.constant is None:
        raise ValueError("constant is needed by aggregation constant: constant=None")
    if not 0 < step.constant < math.inf:
        raise ValueError(f"constant must be > 0 and finite: constant={step.constant}")
    return step.num_samples * step.constant


def _per_unit(num_tokens: Tensor, name: str, index: Tensor) -> tuple[Tensor, Tensor]:
    """The trained tokens of each unit, [U], and the unit of each sample, [N]."""
    check_alike(name, index, "num_trained_tokens", num_tokens)
    units, unit = torch.unique(index, return_inverse=True)
    return torch.zeros_like(units, dtype=torch.float64).index_add(0, unit, num_tokens), unit


def _num_units(num_tokens: Tensor, count_masked: bool) -> Tensor:
    """How many samples, rollouts or groups count, from the trained tokens of each."""
    counted = torch.ones_like(num_tokens) if count_masked else num_tokens > 0
    return counted.sum(dtype=torch.float64)


_DENOMINATORS: dict[str, Callable[[_Step], Tensor]] = {
    "sample_mean": _sample_mean,
    "rollout_mean": _rollout_mean,
    "prompt_mean": _prompt_mean,
    "token_mean": _token_mean,
    "constant": _constant,
}
"""What a token's loss is divided by: [N], or [] where it is the same for every sample."""
