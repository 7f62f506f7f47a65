"""Per-token estimators of a KL divergence, from log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3); DeepSeek-V3.2, 2025 (the
estimate times the importance ratio).
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from slime_loss.batch import check_alike

MIN_LOG_RATIO = -20.0
"""k3 holds log_probs - ref_log_probs at or above this: e^20 is finite in fp32 and bf16."""


def approximate_kl(
    log_probs: Float[Tensor, "*shape"],
    ref_log_probs: Float[Tensor, "*shape"],
    estimator: str,
    *,
    importance_ratio: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Estimate KL(policy || reference) token by token, with gradient.

    With d = log_probs - ref_log_probs: k1 is d; k2 is d^2 / 2; k3 is exp(-d) - 1 + d; low_var_kl
    is k3 clamped to [-10, 10].

    Args:
        log_probs: [*shape], nats, of tokens that the policy sampled.
        ref_log_probs: [*shape], nats, of the same tokens under the reference.
        estimator: k1, k2, k3 or low_var_kl.
        importance_ratio: [*shape], the policy's probability over that of the policy which sampled
            the token. The estimate is multiplied by it, gradient included, which removes the bias
            of tokens sampled by an older policy.

    Returns:
        [*shape], nats.

    Raises:
        ValueError: The estimator is unknown, or the shapes or devices differ.
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(
            f"estimator must be one of {', '.join(_ESTIMATORS)}: estimator={estimator!r}"
        )
    check_alike("ref_log_probs", ref_log_probs, "log_probs", log_probs)
    kl = _ESTIMATORS[estimator](log_probs - ref_log_probs)
    if importance_ratio is None:
        return kl
    check_alike("importance_ratio", importance_ratio, "log_probs", log_probs)
    return importance_ratio * kl


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(min=MIN_LOG_RATIO)
    return (-bounded).expm1() + bounded


def _low_var_kl(log_ratio: Tensor) -> Tensor:
    return _k3(log_ratio).clamp(-10.0, 10.0)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _low_var_kl,
}
