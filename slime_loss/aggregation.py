"""One weight per token, from denominators of the whole optimizer step: the loss is a plain sum.

Computed before a step is cut into micro-batches and ranks, so no cut can change the loss.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from slime_loss.batch import check_alike


def sample_weights(
    num_trained_tokens: Int[Tensor, " samples"],
    *,
    aggregation: str,
    count_masked_samples: bool = False,
) -> Float64[Tensor, " samples"]:
    """The weight that each trained token of each sample has in the step's loss.

    Args:
        num_trained_tokens: [N], of every sample of the optimizer step, over all ranks.
        aggregation: sample_mean (the mean over samples of each sample's token mean) or token_mean
            (the mean over all trained tokens).
        count_masked_samples: Whether sample_mean counts a sample without a trained token as one
            whose loss is 0.

    Returns:
        [N]; 0 for a sample without a trained token.

    Raises:
        ValueError: The aggregation is unknown.
    """
    if aggregation not in _DENOMINATORS:
        raise ValueError(
            f"aggregation must be one of {', '.join(_DENOMINATORS)}: aggregation={aggregation!r}"
        )
    num_tokens = num_trained_tokens.double()
    trained = num_tokens > 0
    num_samples = torch.ones_like(trained).sum() if count_masked_samples else trained.sum()
    return torch.where(trained, 1 / _DENOMINATORS[aggregation](num_tokens, num_samples), 0.0)


def loss_weights(
    loss_mask: Bool[Tensor, " tokens"],
    sample_index: Int64[Tensor, " tokens"],
    *,
    aggregation: str,
    count_masked_samples: bool = False,
) -> Float64[Tensor, " tokens"]:
    """The weight of each row in the step's loss, for a whole step laid out as one stream.

    Args:
        loss_mask: [T], true where a row trains.
        sample_index: [T], the sample of each row, in any order; -1 at padding rows.
        aggregation: As in `sample_weights`.
        count_masked_samples: As in `sample_weights`.

    Returns:
        [T]; 0 where a row does not train.

    Raises:
        ValueError: The aggregation is unknown, a shape or device differs, or a row trains that
            belongs to no sample.
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
    weights = torch.zeros_like(samples, dtype=torch.float64)
    weights[samples >= 0] = sample_weights(
        num_trained_tokens[samples >= 0],
        aggregation=aggregation,
        count_masked_samples=count_masked_samples,
    )
    return torch.where(loss_mask, weights[sample], 0.0)


def _sample_mean(num_tokens: Tensor, num_samples: Tensor) -> Tensor:
    return num_tokens * num_samples


def _token_mean(num_tokens: Tensor, _num_samples: Tensor) -> Tensor:
    return num_tokens.sum()


_DENOMINATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sample_mean": _sample_mean,
    "token_mean": _token_mean,
}
"""What a token's loss is divided by, from the [N] token counts and the number of samples."""
