"""The model head of RL: hidden states, the LM head's weight and a batch give the loss.

The module has no parameters. It stands in for output layer and loss, so that logits never leave
it: what comes out is a loss or log-probs.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slime_loss.batch import LossOutput, TokenBatch, TokenLogProbs
from slime_loss.config import HeadConfig
from slime_loss.corrections import needs_samples
from slime_loss.fused_loss import fused_loss
from slime_loss.head_call import HeadCall, HeadInputs, HeadOptions, prepare_call
from slime_loss.linear_log_probs import project
from slime_loss.objective import make_objective
from slime_loss.policy_config import PolicyLossConfig
from slime_loss.vocab_softmax import EntropyMode, SoftmaxOptions


class RLHead(nn.Module):
    """Hidden states to the loss of the rows that train, over a vocabulary-parallel weight.

    Communicates over tp_group as `log_probs_from_hidden` does, and over cp_group as the objective
    does; on every rank alike, whatever rows it holds.

    Where each row's loss is its own, its gradients are formed in the forward, while the logits are
    there; otherwise the backward computes again those logits that were not kept.

    Args:
        head: How hidden states become log-probs.
        loss: The objective. Its entropy_coef decides whether the entropy has a gradient.
        vocab_size: The true vocabulary, without padding.
        tp_group: The ranks that share the weight's rows out; None is one process.
        cp_group: The ranks that share the pack out; None is one process.
        sequence_parallel: Whether each rank of tp_group has a slice [T/tp, H] of the hidden
            states, instead of all of them.
        accumulate_into_main_grad: Add the weight's gradient to its `main_grad`, where it has one,
            as megatron-core's linear layers with gradient accumulation fusion do.
    """

    def __init__(
        self,
        head: HeadConfig,
        loss: PolicyLossConfig,
        *,
        vocab_size: int,
        tp_group: ProcessGroup | None = None,
        cp_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self.loss = loss
        self.objective = make_objective(loss, cp_group=cp_group)
        self.vocab_size = vocab_size
        self.tp_group = tp_group
        self.cp_group = cp_group
        self.sequence_parallel = sequence_parallel
        self.accumulate_into_main_grad = accumulate_into_main_grad

    def forward(
        self,
        hidden: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, "columns hidden"],
        batch: TokenBatch,
        *,
        bias: Float[Tensor, " columns"] | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch, and its metrics.

        Args:
            hidden: [T, H], or this rank's [T/tp, H] with sequence_parallel.
            weight: [V/tp, H], this rank's rows of the padded vocabulary.
            batch: The streams of the T local rows.
            bias: [V/tp], added to the logits.

        Returns:
            The loss as this rank's part of the step's plain sum.

        Raises:
            ValueError: Shapes that do not fit, a label outside the vocabulary, or a stream that
                the objective needs and the batch lacks.
        """
        inputs = HeadInputs(hidden, weight, bias)
        call = self._call(inputs, batch, self.objective.entropy)
        if self._forms_gradients and torch.is_grad_enabled() and any(inputs.needed):
            return fused_loss(inputs, call, self.objective, batch)
        result = project(inputs, call)
        return self.objective.function(result.log_probs, result.entropy, batch)

    def log_probs(
        self,
        hidden: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, "columns hidden"],
        batch: TokenBatch,
        *,
        bias: Float[Tensor, " columns"] | None = None,
    ) -> TokenLogProbs:
        """Log-probs of the rows that train, without entropy and without loss.

        Args:
            hidden: [T, H], or this rank's [T/tp, H] with sequence_parallel.
            weight: [V/tp, H], this rank's rows of the padded vocabulary.
            batch: The streams of the T local rows.
            bias: [V/tp], added to the logits.

        Returns:
            log_probs [T], nats, 0 at rows that do not train.

        Raises:
            ValueError: Shapes that do not fit, or a label outside the vocabulary.
        """
        inputs = HeadInputs(hidden, weight, bias)
        return project(inputs, self._call(inputs, batch, "none"))

    def describe(self) -> str:
        """One line for a log: how the gradients come about, and why that way."""
        memory = self.head.log_probs_memory_mb
        at_a_time = "" if memory is None else f", {memory} MiB of logits at a time"
        if self._forms_gradients:
            return f"fused gradients (3 products{at_a_time}): the loss of a row is its own"
        if self.head.recompute_loss_function:
            return f"recomputed logits (4 products{at_a_time}): recompute_loss_function asks for it"
        function = self.loss.custom_loss_function_path or self.loss.custom_tis_function_path
        looks = needs_samples(self.loss) is not None or function is None
        why = "the loss sees whole samples" if looks else f"{function} has no row_separable = True"
        return f"logits kept or recomputed (3 to 4 products{at_a_time}): {why}"

    @property
    def _forms_gradients(self) -> bool:
        return self.objective.is_row_separable and not self.head.recompute_loss_function

    def _call(self, inputs: HeadInputs, batch: TokenBatch, entropy: EntropyMode) -> HeadCall:
        head = self.head
        memory = head.log_probs_memory_mb
        softmax = SoftmaxOptions(
            self.tp_group, self.vocab_size, head.rollout_temperature, batch.kept_ids, entropy
        )
        options = HeadOptions(
            sequence_parallel=self.sequence_parallel,
            chunk_rows=head.log_probs_chunk_size,
            memory_bytes=None if memory is None else memory * 2**20,
            keeps_logits=not head.recompute_loss_function,
            accumulate_into_main_grad=self.accumulate_into_main_grad,
        )
        return prepare_call(inputs, batch.trained_labels, softmax, options)
