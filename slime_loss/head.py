"""The model head of RL: hidden states, the LM head's weight and a batch give the loss.

The module has no parameters. It stands in for output layer and loss, so that logits never leave
it: what comes out is a loss or log-probs.
"""

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slime_loss.batch import LossOutput, TokenBatch, TokenLogProbs
from slime_loss.config import HeadConfig
from slime_loss.linear_log_probs import log_probs_from_hidden
from slime_loss.objective import make_objective
from slime_loss.policy_config import PolicyLossConfig
from slime_loss.vocab_softmax import EntropyMode


class RLHead(nn.Module):
    """Hidden states to the loss of the rows that train, over a vocabulary-parallel weight.

    Communicates over tp_group as `log_probs_from_hidden` does, and over cp_group as the objective
    does; on every rank alike, whatever rows it holds.

    Args:
        head: How hidden states become log-probs.
        loss: The objective. Its entropy_coef decides whether the entropy has a gradient.
        vocab_size: The true vocabulary, without padding.
        tp_group: The ranks that share the weight's rows out; None is one process.
        cp_group: The ranks that share the pack out; None is one process.
        sequence_parallel: Whether each rank of tp_group has a slice [T/tp, H] of the hidden
            states, instead of all of them.
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
    ) -> None:
        super().__init__()
        self.head = head
        self.objective = make_objective(loss, cp_group=cp_group)
        self.vocab_size = vocab_size
        self.tp_group = tp_group
        self.cp_group = cp_group
        self.sequence_parallel = sequence_parallel

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
        result = self._project(hidden, weight, bias, batch, self.objective.entropy)
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
        return self._project(hidden, weight, bias, batch, "none")

    def _project(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        batch: TokenBatch,
        entropy: EntropyMode,
    ) -> TokenLogProbs:
        return log_probs_from_hidden(
            hidden,
            weight,
            batch.trained_labels,
            bias=bias,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
            temperature=self.head.rollout_temperature,
            keep_mask=batch.kept_ids,
            entropy=entropy,
            chunk_rows=self.head.log_probs_chunk_size,
            memory_bytes=self.head.log_probs_memory_mb * 2**20,
        )
