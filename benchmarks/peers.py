"""Heads of other packages, each imported when it is first asked for.

What does less than the task does the nearest work, and `lacks` says what is missing.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contenders import (
    Contender,
    SharedInput,
    Step,
    UnavailableError,
    any_case,
    combine,
    entropy_of,
    one_rank,
)
from benchmarks.problem import EPS_CLIP, NUM_SAMPLES, Problem
from benchmarks.reference import Outcome, cross_entropy


def _needs_cuda(problem: Problem) -> None:
    if problem.hidden.device.type != "cuda":
        raise UnavailableError("needs CUDA")


def _ignored_elsewhere(problem: Problem) -> Tensor:
    """The labels, -100 at rows that do not train."""
    return torch.where(problem.mask, problem.labels, -100)


def _per_token(losses: Callable[[Tensor, Tensor], Tensor], problem: Problem) -> Step:
    """The policy loss of a function that gives the cross entropy [T] of each row."""

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        return combine(-losses(hidden, weight)[problem.rows], None, problem)

    return step


def _torch_per_token(problem: Problem) -> Step:
    from torch.nn import LinearCrossEntropyOptions, functional

    labels = problem.labels[problem.rows]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        losses = functional.linear_cross_entropy(
            hidden[problem.rows],
            weight,
            labels,
            reduction="none",
            options=LinearCrossEntropyOptions(),
        )
        return combine(-losses, None, problem)

    return step


def _torch_mean(problem: Problem) -> Step:
    from torch.nn import LinearCrossEntropyOptions, functional

    labels = problem.labels[problem.rows]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        return Outcome(
            functional.linear_cross_entropy(
                hidden[problem.rows], weight, labels, options=LinearCrossEntropyOptions()
            )
        )

    return step


def _cut_cross_entropy(problem: Problem, *, is_compiled: bool) -> Step:
    if not is_compiled:
        _needs_cuda(problem)
    cut = importlib.import_module("cut_cross_entropy")
    importlib.import_module("torch._inductor.config").compile_threads = 1
    labels = _ignored_elsewhere(problem)
    implementation = "torch_compile" if is_compiled else "cce"
    return _per_token(
        lambda hidden, weight: cut.linear_cross_entropy(
            hidden, weight, labels, reduction="none", impl=implementation
        ),
        problem,
    )


def _liger_policy(problem: Problem) -> Step:
    """Its loss of GRPO, chunked in torch: a sample at a time, every row of it."""
    loss = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        epsilon_low=EPS_CLIP,
        epsilon_high=EPS_CLIP,
        loss_type="bnpo",
    )
    samples = (NUM_SAMPLES, problem.case.tokens // NUM_SAMPLES)
    labels, mask = problem.labels.view(samples), problem.mask.view(samples).float()
    advantages = problem.advantages.view(samples)[:, 0]
    old = None if problem.old_log_probs is None else problem.old_log_probs.view(samples)

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        value, _ = loss(
            hidden.view(*samples, -1), weight, labels, mask, advantages, old_per_token_logps=old
        )
        return Outcome(value)

    return step


def _liger_cross_entropy(problem: Problem) -> Step:
    _needs_cuda(problem)
    module = importlib.import_module("liger_kernel.transformers")
    loss = module.LigerFusedLinearCrossEntropyLoss(reduction="none")
    labels = _ignored_elsewhere(problem)
    return _per_token(lambda hidden, weight: loss(weight, hidden, labels), problem)


def _trl_fused(problem: Problem) -> Step:
    """Its fused head, given the rows that train as it takes them on a GPU."""
    kernel = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    chunk = importlib.import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = () if problem.case.entropy == "none" else ("entropy",)
    labels = problem.labels[problem.rows]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        log_probs, entropy, *_ = kernel.apply(
            hidden[problem.rows], weight, None, labels, 1.0, chunk, None, 1.0, outputs
        )
        return combine(log_probs, entropy, problem)

    return step


def _trl_logits(problem: Problem) -> Step:
    utils = importlib.import_module("trl.trainer.utils")
    labels = problem.labels[problem.rows]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        logits = hidden[problem.rows] @ weight.T
        log_probs = utils.selective_log_softmax(logits, labels)
        entropy = entropy_of(problem, lambda: utils.entropy_from_logits(logits))
        return combine(log_probs, entropy, problem)

    return step


def _megatron(problem: Problem) -> Step:
    module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    importlib.import_module("torch._inductor.config").compile_threads = 1
    labels = problem.labels[problem.rows]

    def step(hidden: Tensor, weight: Tensor) -> Outcome:
        features = SharedInput.apply(hidden[problem.rows], problem.group)
        logits = (features @ weight.T)[:, None]
        losses = module.fused_vocab_parallel_cross_entropy(logits, labels[:, None], problem.group)
        return combine(-losses[:, 0], None, problem)

    return step


NO_ENTROPY = "no entropy"

PEERS = (
    Contender("torch linear_cross_entropy", _torch_per_token, NO_ENTROPY, "torch>=2.13"),
    Contender(
        "torch linear_cross_entropy mean",
        _torch_mean,
        "no entropy, no policy loss: the mean cross entropy, no weights per token",
        "torch>=2.13",
        objective=cross_entropy,
        suits=lambda case: one_rank(case) and case.zeros == 0,
    ),
    Contender(
        "cut-cross-entropy torch_compile",
        lambda problem: _cut_cross_entropy(problem, is_compiled=True),
        NO_ENTROPY,
        "cut-cross-entropy",
    ),
    Contender(
        "cut-cross-entropy",
        lambda problem: _cut_cross_entropy(problem, is_compiled=False),
        NO_ENTROPY,
        "cut-cross-entropy",
    ),
    Contender(
        "liger policy loss",
        _liger_policy,
        "no entropy, no weights per token; projects prompts too",
        "liger-kernel",
    ),
    Contender("liger cross entropy", _liger_cross_entropy, NO_ENTROPY, "liger-kernel"),
    Contender("trl fused", _trl_fused, "", "trl", does_entropy=True),
    Contender("trl logits", _trl_logits, "", "trl", does_entropy=True),
    Contender(
        "megatron.core",
        _megatron,
        "no entropy; rounds the gradient of the logits to bf16",
        "megatron-core",
        suits=any_case,
        tolerance=1e-2,
    ),
)
