"""The few collectives of the loss, over explicit groups; None is a group of one process.

Every rank of the group must call them in the same order with the same shapes. The last three are
differentiable; the others serve the autograd functions that call them.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from slime_loss.autograd import AutogradContext, differentiable_once


def _newest(*names: str) -> Callable[..., object]:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# torch 2.13 renamed both and deprecates the older names.
_all_gather = _newest("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks of the group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in the group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_gather_rows(
    rows: Shaped[Tensor, " rows *rest"], group: ProcessGroup | None
) -> Shaped[Tensor, " all_rows *rest"]:
    """Every rank's rows, one rank after the other. One all-gather over the group.

    Args:
        rows: [n, ...] of any dtype, the same shape on every rank.
        group: The ranks to gather from.

    Returns:
        [group size * n, ...]; the argument itself for a group of one.
    """
    if group_size(group) == 1:
        return rows
    gathered = rows.new_empty((group_size(group) * rows.shape[0], *rows.shape[1:]))
    # The bits travel as bytes, so no backend has to know the dtype.
    _all_gather(_as_bytes(gathered), _as_bytes(rows.contiguous()), group=group)
    return gathered


def reduce_scatter_rows(
    rows: Float[Tensor, " all_rows *rest"], group: ProcessGroup | None
) -> Float[Tensor, " rows *rest"]:
    """This rank's slice of the sum of every rank's rows. One reduce-scatter over the group.

    Args:
        rows: [group size * n, ...], the same shape on every rank.
        group: The ranks to sum over.

    Returns:
        [n, ...]; the argument itself for a group of one.
    """
    if group_size(group) == 1:
        return rows
    own = rows.new_empty((rows.shape[0] // group_size(group), *rows.shape[1:]))
    _reduce_scatter(own, rows.contiguous(), group=group)
    return own


def all_reduce_sum_(buffer: Float[Tensor, "..."], group: ProcessGroup | None) -> None:
    """Sum a buffer that the caller owns over the group, in place. One all-reduce."""
    if group_size(group) > 1:
        dist.all_reduce(buffer, group=group)


def gather_rows(
    rows: Shaped[Tensor, " rows *rest"], group: ProcessGroup | None
) -> Shaped[Tensor, " all_rows *rest"]:
    """`all_gather_rows` with a gradient.

    Every rank may use the gathered rows differently: the gradients of all copies of a row are
    summed to the rank that owns it. One all-gather forward, one reduce-scatter backward.
    """
    if group_size(group) == 1:
        return rows
    return _GatherRows.apply(rows, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(rows, group)

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, grad_rows: Tensor
    ) -> tuple[Tensor, None]:
        return reduce_scatter_rows(grad_rows, ctx.group), None


def gather_rows_for_same_loss(
    rows: Shaped[Tensor, " rows *rest"], group: ProcessGroup | None
) -> Shaped[Tensor, " all_rows *rest"]:
    """`all_gather_rows` with a gradient, for a loss that every rank computes alike.

    Each rank has the gradient of the loss already, and takes that of its own rows. One all-gather
    forward, nothing backward.
    """
    if group_size(group) == 1:
        return rows
    return _GatherRowsForSameLoss.apply(rows, group)


class _GatherRowsForSameLoss(_GatherRows):
    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, grad_rows: Tensor
    ) -> tuple[Tensor, None]:
        return grad_rows.chunk(group_size(ctx.group))[group_rank(ctx.group)], None


def all_reduce_sum(
    tensor: Float[Tensor, "*shape"], group: ProcessGroup | None
) -> Float[Tensor, "*shape"]:
    """The sum over the group, with a gradient.

    Every rank may use the sum differently: the gradient of each rank's part is the sum of all
    ranks' gradients. One all-reduce forward, one backward.
    """
    return _AllReduceSum.apply(tensor, group)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: AutogradContext, grad: Tensor
    ) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce_sum_(total, group)
    return total


def _as_bytes(contiguous: Tensor) -> Tensor:
    # A contiguous tensor of one element may carry any stride, which view(dtype) would refuse.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)
