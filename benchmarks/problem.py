"""What is benchmarked: a case, and the tensors of it that one rank holds.

A pack of 8 samples of equal length, each a prompt and a response; the responses train. Logits have
a standard deviation of 3, log-ratios are small or far behind the clip, so that rounding decides
nothing.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss import TokenBatch
from slime_loss.vocab_softmax import EntropyMode

NUM_SAMPLES = 8
ENTROPY_COEF = 0.5
"""Of the entropy bonus where it is part of the loss: large, so that a missing one is seen."""
EPS_CLIP = 0.2
LOGIT_STD = 3.0


@dataclass(frozen=True)
class Case:
    """One setting of the head.

    Attributes:
        tokens: T, rows of the pack; a multiple of 8.
        hidden: H.
        vocab: V, a multiple of the ranks.
        share: Share of the rows that train.
        entropy: Not asked for, a metric, or part of the loss.
        ranks: Ranks that share the vocabulary out.
        zeros: Share of the trained rows whose gradient the clip takes away.
    """

    tokens: int
    hidden: int
    vocab: int
    share: float = 1.0
    entropy: EntropyMode = "metric"
    ranks: int = 1
    zeros: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        if self.tokens % NUM_SAMPLES != 0 or self.tokens < 2 * NUM_SAMPLES:
            raise ValueError(f"tokens must be a multiple of {NUM_SAMPLES}: tokens={self.tokens}")
        if self.vocab % self.ranks != 0:
            raise ValueError(f"ranks must divide vocab: ranks={self.ranks}, vocab={self.vocab}")

    @property
    def size(self) -> str:
        """The three sizes, in words."""
        return f"T={self.tokens} H={self.hidden} V={self.vocab}"

    def __str__(self) -> str:
        return (
            f"{self.size}, {self.share:.0%} of the rows train, entropy: {self.entropy}, "
            f"TP {self.ranks}, {self.zeros:.0%} of the coefficients are zero"
        )


@dataclass(frozen=True)
class Problem:
    """The tensors of one rank.

    Attributes:
        case: What they are of.
        hidden: [T, H], a leaf, the same on every rank.
        weight: [V/tp, H], a leaf, this rank's rows.
        whole_weight: [V, H], of all ranks.
        labels: [T], also where the row does not train.
        mask: [T], the rows that train.
        advantages: [T], the same for the rows of a sample.
        old_log_probs: [T]; None is on policy.
        first_column: The vocabulary id of this rank's first row of the weight.
        group: The ranks that share the vocabulary out, also where it is one.
    """

    case: Case
    hidden: Tensor
    weight: Tensor
    whole_weight: Tensor
    labels: Tensor
    mask: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    first_column: int
    group: ProcessGroup | None

    @cached_property
    def rows(self) -> Tensor:
        """[n], the rows that train."""
        return self.mask.nonzero().squeeze(1)

    @cached_property
    def sample_index(self) -> Tensor:
        """[T], the sample of each row."""
        length = self.case.tokens // NUM_SAMPLES
        return torch.arange(self.case.tokens, device=self.mask.device) // length

    @property
    def loss_weight(self) -> float:
        """The weight of each trained row: their mean is taken."""
        return 1.0 / self.rows.shape[0]

    @property
    def entropy_coef(self) -> float:
        """Of the entropy bonus in the loss."""
        return ENTROPY_COEF if self.case.entropy == "loss" else 0.0

    @cached_property
    def batch(self) -> TokenBatch:
        """The streams, as slime_loss takes them."""
        return TokenBatch(
            labels=self.labels,
            loss_mask=self.mask,
            loss_weight=self.mask * self.loss_weight,
            sample_index=self.sample_index,
            advantages=self.advantages,
            old_log_probs=self.old_log_probs,
            num_trained_tokens=torch.bincount(self.sample_index[self.rows], minlength=NUM_SAMPLES),
        )


def make_problem(
    case: Case, *, rank: int = 0, group: ProcessGroup | None = None, device: str = "cpu"
) -> Problem:
    """The tensors of one rank, the same for the same case; on policy.

    Args:
        case: The setting.
        rank: This rank.
        group: The ranks of the case.
        device: Where they are.
    """
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, generator=random)
    weight = torch.randn(case.vocab, case.hidden, generator=random)
    weight *= LOGIT_STD / case.hidden**0.5
    weight = weight.to(device)
    columns = case.vocab // case.ranks
    shard = weight if case.ranks == 1 else weight[rank * columns :][:columns].clone()
    length = case.tokens // NUM_SAMPLES
    sign = torch.tensor([1.0, -1.0]).repeat(NUM_SAMPLES // 2)
    size = 0.5 + torch.rand(NUM_SAMPLES, generator=random)
    return Problem(
        case=case,
        hidden=hidden.to(device).requires_grad_(),
        weight=shard.detach().requires_grad_(),
        whole_weight=weight,
        labels=torch.randint(case.vocab, (case.tokens,), generator=random).to(device),
        mask=_responses(case.share, length).to(device),
        advantages=(sign * size).repeat_interleave(length).to(device),
        old_log_probs=None,
        first_column=rank * columns,
        group=group,
    )


def _responses(share: float, length: int) -> Tensor:
    """[T], true at the ends of the samples: responses of different lengths, `share` on average."""
    spread = torch.linspace(-0.5, 0.5, NUM_SAMPLES) * min(share, 1 - share)
    prompts = length - ((share + spread) * length).round().long().clamp(1, length)
    return (torch.arange(length) >= prompts[:, None]).flatten()


def old_log_probs(problem: Problem, log_probs: Tensor) -> Tensor:
    """[T], old log-probs for the given current ones.

    Log-ratios are within 0.05, but for the case's share of zeros, which are clipped on the side
    that takes their gradient away.

    Args:
        problem: The problem.
        log_probs: [n], of the rows that train.
    """
    random = torch.Generator().manual_seed(1)
    rows = problem.rows.cpu()
    shift = torch.empty(rows.shape[0]).uniform_(-0.05, 0.05, generator=random)
    order = torch.randperm(rows.shape[0], generator=random)
    clipped = order[: round(problem.case.zeros * rows.shape[0])]
    shift[clipped] = 0.5 * problem.advantages.cpu()[rows[clipped]].sign()
    old = torch.zeros(problem.case.tokens)
    old[rows] = (log_probs.cpu() - shift).float()
    return old.to(problem.hidden.device)
