"""Losses and corrections that users write: given clean streams, checked in what they return."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.batch import LossOutput, TokenBatch, check_alike, check_vector
from slime_loss.custom import call_function
from slime_loss.metrics import Metrics
from slime_loss.policy_config import PolicyLossConfig
from slime_loss.streams import Streams, check_entropy

RESERVED_METRICS = ("loss", "active_tokens")
"""Metrics of every loss, which a custom loss may not give again."""


def is_row_separable(function: Callable[..., Any]) -> bool:
    """Whether a custom function says, by `function.row_separable = True`, that it works row by row.

    That is: what it gives for a row depends on that row alone, and it communicates nothing.
    """
    return getattr(function, "row_separable", False) is True


def custom_loss(
    log_probs: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"] | None,
    batch: TokenBatch,
    config: PolicyLossConfig,
    *,
    cp_group: ProcessGroup | None = None,
) -> LossOutput:
    """The loss of config.custom_loss_function_path, masked and weighted like any other.

    The function is called as `function(log_probs, entropy, batch, config, cp_group=cp_group)`. All
    streams are 0 at rows that do not train, where labels are -100 and sample indices -1. It
    returns the loss of each token [T], connected to log_probs, or that and a dict of streams [T],
    which become metrics: means weighted by the loss weights. The loss of the step is the sum of
    loss_weight * token_loss over the rows that train; what the function gives for others is not
    read. It must return the same metrics on every rank.

    Args:
        log_probs: [T], nats, with gradient.
        entropy: [T], nats; with gradient when entropy_coef is not 0.
        batch: The streams.
        config: custom_loss_function_path, and whatever the function reads.
        cp_group: The ranks that share the pack out, over which the function may communicate.

    Returns:
        The loss, and the metrics loss, active_tokens and the function's own.

    Raises:
        ValueError: The function cannot be imported, or returned something else.
        RuntimeError: It raised SystemExit.
    """
    path, field = config.custom_loss_function_path, "custom_loss_function_path"
    if path is None:
        raise ValueError(f"{field} is needed by custom_loss: {field}=None")
    check_entropy(entropy, log_probs, config)
    streams = Streams(batch, log_probs)
    nats = None if entropy is None else streams.clean("entropy", entropy)
    own = streams.predictions.clone()
    result = call_function(path, field, own, nats, streams.clean_batch(), config, cp_group=cp_group)
    token_loss, named = _unpacked(result)
    where = f"token_loss returned by {path}"
    _check_tensor(where, token_loss, batch, None)
    if log_probs.requires_grad and not token_loss.requires_grad:
        raise ValueError(f"{where} must have a gradient to log_probs: requires_grad=False")
    metrics = _custom_metrics(path, named, streams)
    return streams.sum_up(streams.clean(where, token_loss), metrics)


def custom_correction(
    train_log_probs: Float[Tensor, " tokens"],
    rollout_log_probs: Float[Tensor, " tokens"],
    streams: Streams,
    config: PolicyLossConfig,
    *,
    cp_group: ProcessGroup | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"] | None]:
    """The weights of config.custom_tis_function_path, and the tokens that it accepts.

    The function is called as `function(train_log_probs, rollout_log_probs, batch, config,
    cp_group=cp_group)`, with copies that it may change, and returns (weights [T], accepted [T] or
    None for all). A token that it does not accept counts as masked.

    Args:
        train_log_probs: [T], nats, without gradient, 0 at rows that do not train.
        rollout_log_probs: [T], nats, of the engine, likewise.
        streams: The batch, of which the function gets a clean one.
        config: custom_tis_function_path, and whatever the function reads.
        cp_group: The ranks that share the pack out, over which the function may communicate.

    Returns:
        weights [T] without gradient, accepted [T] or None.

    Raises:
        ValueError: The function cannot be imported, or returned something else, or a weight of an
            accepted token is not finite.
        RuntimeError: The function raised SystemExit.
    """
    path, field = config.custom_tis_function_path, "custom_tis_function_path"
    if path is None:
        raise ValueError(f"{field} is needed by custom_correction: {field}=None")
    batch, given = streams.batch, (train_log_probs.clone(), rollout_log_probs.clone())
    result = call_function(path, field, *given, streams.clean_batch(), config, cp_group=cp_group)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"{path} must return (weights, accepted or None): type={type(result).__name__}"
        )
    weights, accepted = result
    _check_tensor(f"weights returned by {path}", weights, batch, None)
    read = batch.loss_mask
    if accepted is not None:
        _check_tensor(f"accepted returned by {path}", accepted, batch, torch.bool)
        read = read & accepted
    weights = torch.where(read, weights.detach(), 0.0)
    if not bool(weights.isfinite().all()):
        row = int((~weights.isfinite()).nonzero()[0])
        raise ValueError(
            f"weights returned by {path} must be finite where a token trains: "
            f"row={row}, weight={float(weights[row])}"
        )
    return weights, accepted


def _unpacked(result: Any) -> tuple[Any, Any]:
    is_pair = isinstance(result, tuple) and len(result) == 2
    return result if is_pair else (result, {})


def _custom_metrics(path: str, named: object, streams: Streams) -> Metrics:
    if not isinstance(named, Mapping):
        raise ValueError(
            f"metrics returned by {path} must be a dict of streams: type={type(named).__name__}"
        )
    metrics = Metrics()
    for name, stream in named.items():
        if not isinstance(name, str) or name in RESERVED_METRICS:
            taken = ", ".join(RESERVED_METRICS)
            raise ValueError(
                f"metrics returned by {path} must have names other than {taken}: name={name!r}"
            )
        _check_tensor(f"metric {name} returned by {path}", stream, streams.batch, None)
        metrics[name] = streams.metrics.mean(stream)
    return metrics


def _check_tensor(name: str, value: object, batch: TokenBatch, dtype: torch.dtype | None) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor: type={type(value).__name__}")
    check_vector(name, value, dtype)
    check_alike(name, value, "labels", batch.labels)
