"""The streams of a batch as a loss may see them: 0 at every row that does not train.

Masking the results instead would not do: the gradient of a masked infinity is 0 * inf.
"""

from dataclasses import fields, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from slime_loss.batch import KeptIds, LossOutput, TokenBatch, check_alike, check_floats
from slime_loss.metrics import Metrics, TokenMetrics
from slime_loss.policy_config import PolicyLossConfig


class Streams:
    """The clean streams of a batch, all in the dtype of the model's own stream.

    Args:
        batch: The batch; its streams are used without gradient.
        predictions: [T], what the model gave: log-probs or values, with gradient.
        name: What it is, for messages.

    Attributes:
        predictions: [T], the same, clean.
        weight: [T], the loss weight.
        metrics: Makes metrics of the rows that train.
    """

    def __init__(self, batch: TokenBatch, predictions: Tensor, name: str = "log_probs") -> None:
        self.batch = batch
        self.dtype = predictions.dtype
        self.predictions = self.clean(name, predictions)
        self.weight = self.clean("loss_weight", batch.loss_weight.detach())
        self.metrics = TokenMetrics(batch.loss_mask, batch.loss_weight)

    def clean(self, name: str, stream: Tensor) -> Float[Tensor, " tokens"]:
        """Any stream of floats, clean.

        Raises:
            ValueError: It is not one number per row.
        """
        check_floats(name, stream)
        check_alike(name, stream, "labels", self.batch.labels)
        return torch.where(self.batch.loss_mask, stream, 0.0).to(self.dtype)

    def get(self, name: str, needed_by: str) -> Float[Tensor, " tokens"]:
        """A stream of the batch, clean and without gradient.

        Raises:
            ValueError: The batch lacks it.
        """
        stream: Tensor | None = getattr(self.batch, name)
        if stream is None:
            raise ValueError(f"{name} is needed by {needed_by}: {name}=None")
        return self.clean(name, stream.detach())

    def old_log_probs(self, config: PolicyLossConfig) -> Float[Tensor, " tokens"]:
        """Log-probs of the policy that the importance ratio is taken against, without gradient.

        Raises:
            ValueError: The stream that the config names is missing, or there is another one.
        """
        recomputed = self.batch.old_log_probs
        if config.use_rollout_logprobs and recomputed is not None:
            raise ValueError(
                "old_log_probs must be None under use_rollout_logprobs, where the engine's "
                f"log-probs are the old ones: old_log_probs.shape={tuple(recomputed.shape)}"
            )
        if config.use_rollout_logprobs:
            return self.get("rollout_log_probs", "use_rollout_logprobs")
        if recomputed is None:
            return self.predictions.detach()
        return self.clean("old_log_probs", recomputed.detach())

    def train_log_probs(self, config: PolicyLossConfig) -> Float[Tensor, " tokens"]:
        """Log-probs that are compared with the engine's: the old ones, where they are recomputed.

        Otherwise the current ones, without gradient.
        """
        old = self.old_log_probs(config)
        return self.predictions.detach() if config.use_rollout_logprobs else old

    def clean_batch(self) -> TokenBatch:
        """The batch with all streams clean, for functions that are not ours.

        At rows that do not train, labels are -100 and sample indices -1. Every tensor is a copy,
        which the function may change.
        """
        batch = self.batch
        floats = {
            field.name: self.get(field.name, "")
            for field in fields(batch)
            if isinstance(stream := getattr(batch, field.name), Tensor)
            and stream.is_floating_point()
        }
        sample_index = torch.where(batch.loss_mask, batch.sample_index, -1)
        counts, kept = batch.num_trained_tokens, batch.kept_ids
        return replace(
            batch,
            labels=batch.trained_labels,
            loss_mask=batch.loss_mask.clone(),
            sample_index=sample_index,
            num_trained_tokens=None if counts is None else counts.clone(),
            kept_ids=None if kept is None else KeptIds(kept.ids.clone(), kept.offsets.clone()),
            **floats,
        )

    def sum_up(self, token_loss: Float[Tensor, " tokens"], metrics: Metrics) -> LossOutput:
        """The weighted sum of the rows' losses; adds the metrics loss and active_tokens."""
        weighted = self.weight * token_loss
        finite = weighted.isfinite() & self.predictions.isfinite()
        head = {"loss": self.metrics.weighted_sum(token_loss)}
        tail = {"active_tokens": self.metrics.count()}
        return LossOutput(weighted.sum(), head | metrics | tail, _first_row(~finite))


def check_entropy(entropy: Tensor | None, log_probs: Tensor, config: PolicyLossConfig) -> None:
    """Raise ValueError unless an entropy that the loss needs is there, and with gradient."""
    if config.entropy_coef == 0:
        return
    if entropy is None or (log_probs.requires_grad and not entropy.requires_grad):
        state = "entropy=None" if entropy is None else "entropy.requires_grad=False"
        raise ValueError(
            "entropy must be given, with gradient, when entropy_coef is not 0: "
            f"{state}, entropy_coef={config.entropy_coef}"
        )


def _first_row(flags: Tensor) -> Tensor:
    """The first true row, -1 when there is none; without waiting for the device."""
    num_rows = flags.shape[0]
    rows = torch.arange(num_rows, device=flags.device)
    first = functional.pad(torch.where(flags, rows, num_rows), (0, 1), value=num_rows).amin()
    return torch.where(first == num_rows, -1, first)
