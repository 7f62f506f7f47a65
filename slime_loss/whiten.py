"""Whitening of a stream over all tokens that train, on whichever ranks they are."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.batch import check_alike, check_vector
from slime_loss.collectives import all_reduce_sum_


def masked_whiten(
    stream: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    *,
    group: ProcessGroup | None = None,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, " tokens"]:
    """Scale the masked-in entries to mean 0 and variance 1, without gradient.

    (x - mean) / sqrt(variance + eps), with the sample variance (n - 1) around the mean, both over
    the masked-in entries of every rank. Two all-reduces over the group, of two numbers and of one,
    in which a rank without an entry takes part.

    Args:
        stream: [T], this rank's entries; T may differ between ranks.
        mask: [T], true where an entry counts.
        group: The ranks that hold different tokens (data and context parallel, not tensor
            parallel); None is one process.
        shift_mean: False adds the mean again, so that only the spread changes.
        eps: Added to the variance; >= 0. It bounds the scale where all entries are nearly equal.

    Returns:
        [T], fp32, or fp64 when the stream is; 0 where the mask is false. Fewer than two entries
        in the group are left as they are.

    Raises:
        ValueError: eps is negative, or a dtype, shape or device is wrong.
    """
    check_vector("stream", stream, None)
    check_vector("mask", mask, torch.bool)
    check_alike("mask", mask, "stream", stream)
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0: eps={eps}")
    values = torch.where(mask, stream.detach().double(), 0.0)
    totals = torch.stack([mask.sum(dtype=torch.float64), values.sum()])
    all_reduce_sum_(totals, group)
    count, total = totals.unbind()
    mean = total / count.clamp(min=1)

    # Squares of deviations, unlike the mean of squares minus the square of the mean, cannot cancel.
    deviations = torch.where(mask, values - mean, 0.0)
    squares = deviations.square().sum()
    all_reduce_sum_(squares, group)
    variance = squares / (count - 1).clamp(min=1)
    whitened = torch.where(deviations == 0, 0.0, deviations / (variance + eps).sqrt())
    if not shift_mean:
        whitened = whitened + mean
    whitened = torch.where(mask & (count >= 2), whitened, values)
    return whitened.to(torch.promote_types(stream.dtype, torch.float32))
