"""Contenders that start from logits [T, V], for models whose output layer is not given up.

The floor is one softmax into given memory and one product with it: the gradient's size, twice.
"""

import importlib

import torch
from torch import Tensor

from benchmarks.contenders import OURS, Contender, Step, combine, entropy_of, plain_entropy
from benchmarks.problem import Problem
from benchmarks.reference import Outcome
from slime_loss import log_probs_from_logits

LOGITS_FLOOR = "softmax, scaled"


def _floor(problem: Problem) -> Step:
    memory = torch.empty(problem.rows.shape[0], problem.case.vocab)
    scale = problem.advantages[problem.rows][:, None]

    def step(logits: Tensor) -> Outcome:
        torch.softmax(logits.detach()[: memory.shape[0]], 1, out=memory)
        memory.mul_(scale)
        return Outcome()

    return step


def _ours(problem: Problem, *, reuse_logits: bool) -> Step:
    labels = problem.batch.trained_labels

    def step(logits: Tensor) -> Outcome:
        result = log_probs_from_logits(
            logits, labels, entropy=problem.case.entropy, reuse_logits=reuse_logits
        )
        entropy = None if result.entropy is None else result.entropy[problem.rows]
        return combine(result.log_probs[problem.rows], entropy, problem)

    return step


def _torch(problem: Problem) -> Step:
    labels = problem.labels[:, None]

    def step(logits: Tensor) -> Outcome:
        log_p = logits.log_softmax(1)
        log_probs = log_p.gather(1, labels).squeeze(1)[problem.rows]
        entropy = entropy_of(problem, lambda: plain_entropy(log_p)[problem.rows])
        return combine(log_probs, entropy, problem)

    return step


def _trl(problem: Problem) -> Step:
    utils = importlib.import_module("trl.trainer.utils")

    def step(logits: Tensor) -> Outcome:
        log_probs = utils.selective_log_softmax(logits, problem.labels)[problem.rows]
        entropy = entropy_of(problem, lambda: utils.entropy_from_logits(logits)[problem.rows])
        return combine(log_probs, entropy, problem)

    return step


LOGITS = (
    Contender(LOGITS_FLOOR, _floor, objective=None),
    Contender(OURS, lambda problem: _ours(problem, reuse_logits=False), does_entropy=True),
    Contender(
        "slime_loss reuse_logits",
        lambda problem: _ours(problem, reuse_logits=True),
        "writes the gradient over the logits",
        does_entropy=True,
    ),
    Contender("torch", _torch, "works on prompts too", does_entropy=True),
    Contender("trl", _trl, "works on prompts too", "trl", does_entropy=True),
)
