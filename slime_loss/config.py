"""Configs of the loss library: frozen dataclasses that refuse what cannot mean anything.

The string below a field documents it, and serves as the help text of the flag of that name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Violation:
    """One broken rule of one field: `str()` gives the line "field rule: field=value"."""

    field: str
    rule: str
    value: object
    fix: str

    def __str__(self) -> str:
        """The line that reports it: field, rule, value."""
        return f"{self.field} {self.rule}: {self.field}={self.value!r}"


class ConfigError(ValueError):
    """All violations of one config: one line each, and as objects in `violations`."""

    def __init__(self, violations: list[Violation]) -> None:
        """Report these violations, at least one."""
        super().__init__("\n".join(str(violation) for violation in violations))
        self.violations = violations


Rule = tuple[bool, str, str, str]
"""(does it hold, field, rule, fix)."""


class CheckedConfig:
    """Base of the config dataclasses: construction raises ConfigError when any rule is broken.

    The annotations give the first rules (type, choices, finite numbers); a subclass adds its own
    by overriding `rules`. A field is reported once, with the first rule it breaks.
    """

    def __post_init__(self) -> None:
        """Refuse construction when a rule is broken."""
        violations = self.violations()
        if violations:
            raise ConfigError(violations)

    def violations(self) -> list[Violation]:
        """Every broken rule, in the order of the rules.

        A value of the wrong type is reported alone: the other rules may not be able to read it.
        """
        annotations = get_type_hints(type(self))
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return self._broken(
            _annotation_rule(name, getattr(self, name), annotations[name]) for name in names
        ) or self._broken(self.rules())

    def rules(self) -> Iterator[Rule]:
        """The rules beyond the annotations; may rely on every field having its type."""
        return iter(())

    def _broken(self, rules: Iterator[Rule]) -> list[Violation]:
        broken: dict[str, Violation] = {}
        for holds, field, rule, fix in rules:
            if not holds and field not in broken:
                broken[field] = Violation(field, rule, getattr(self, field), fix)
        return list(broken.values())


def _annotation_rule(name: str, value: object, annotation: object) -> Rule:
    """The rule an annotation states: a Literal, bool, int or float, or one of them `| None`."""
    union = get_origin(annotation) in (Union, UnionType)
    alternatives: tuple[object, ...] = get_args(annotation) if union else (annotation,)
    kind = next(kind for kind in alternatives if kind is not NoneType)
    if value is None and NoneType in alternatives:
        return True, name, "", ""
    if get_origin(kind) is Literal:
        choices = ", ".join(str(choice) for choice in get_args(kind))
        return value in get_args(kind), name, f"must be one of {choices}", "choose one of them"
    if kind is float and isinstance(value, float):
        return math.isfinite(value), name, "must be finite", "give a finite number"
    assert isinstance(kind, type), f"{name} has an annotation without a rule: {annotation}"
    # bool is a subclass of int, and an int may stand for a float.
    is_kind = type(value) in ((int,) if kind is float else (kind,))
    return is_kind, name, f"must be of type {kind.__name__}", f"give a value of {kind.__name__}"


@dataclass(frozen=True)
class AdvantageConfig(CheckedConfig):
    """How rewards become advantages."""

    advantage_estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Baseline and scale of the reward within its prompt group. grpo: minus the group mean, over
    the group's standard deviation; dr_grpo: minus the group mean; rloo: minus the mean of the
    group's other samples."""


@dataclass(frozen=True)
class PolicyLossConfig(CheckedConfig):
    """The loss of one trained token."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """policy_loss: the clipped policy gradient; sft_loss: the negative log-probability."""

    eps_clip: float = 0.2
    """Lower clip of the importance ratio, at 1 - eps_clip, binding where the advantage is
    negative."""

    eps_clip_high: float | None = None
    """Upper clip of the importance ratio, at 1 + eps_clip_high, binding where the advantage is
    positive. Default: the value of eps_clip."""

    eps_clip_c: float | None = None
    """Dual clip: where the advantage is negative, the ratio is bounded by this value, which must
    be > 1. Default: no bound."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, in the loss with a minus sign. At 0 the entropy is a
    metric only."""

    use_kl_loss: bool = False
    """Estimate the KL divergence to the reference model, which must then give ref_log_probs."""

    kl_loss_coef: float = 0.0
    """Coefficient of the KL estimate in the loss. At 0 it is a metric only."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence; low_var_kl is k3 clamped to [-10, 10]."""

    use_unbiased_kl: bool = False
    """Multiply the KL estimate by the importance ratio, as in DeepSeek-V3.2, which makes it
    unbiased for tokens that an older policy sampled."""

    use_rollout_logprobs: bool = False
    """Take the rollout engine's log-probabilities as the old ones, with no recomputation."""

    @property
    def clip_low(self) -> float:
        """Lower bound of the importance ratio."""
        return 1.0 - self.eps_clip

    @property
    def clip_high(self) -> float:
        """Upper bound of the importance ratio."""
        return 1.0 + (self.eps_clip if self.eps_clip_high is None else self.eps_clip_high)

    def rules(self) -> Iterator[Rule]:
        """Ranges, and the combinations that contradict each other."""
        high, dual = self.eps_clip_high, self.eps_clip_c
        yield self.eps_clip > 0, "eps_clip", "must be > 0", "use 0.2"
        yield high is None or high > 0, "eps_clip_high", "must be > 0", "use 0.28, or leave it out"
        yield dual is None or dual > 1, "eps_clip_c", "must be > 1", "use 3.0, or leave it out"
        yield self.kl_loss_coef >= 0, "kl_loss_coef", "must be >= 0", "use 0.001, or leave it out"
        yield from self._kl_rules()
        if self.loss_type == "sft_loss":
            yield from self._sft_rules()

    def _kl_rules(self) -> Iterator[Rule]:
        unused = {"kl_loss_coef": self.kl_loss_coef != 0, "use_unbiased_kl": self.use_unbiased_kl}
        for field, is_set in unused.items():
            holds = self.use_kl_loss or not is_set
            yield holds, field, "needs use_kl_loss", f"add use_kl_loss, or leave {field} out"

    def _sft_rules(self) -> Iterator[Rule]:
        policy_only = {
            "entropy_coef": self.entropy_coef != 0,
            "eps_clip_high": self.eps_clip_high is not None,
            "eps_clip_c": self.eps_clip_c is not None,
            "use_kl_loss": self.use_kl_loss,
            "use_rollout_logprobs": self.use_rollout_logprobs,
        }
        for field, is_set in policy_only.items():
            yield not is_set, field, "has no meaning in sft_loss", f"leave {field} out"


@dataclass(frozen=True)
class AggregationConfig(CheckedConfig):
    """How the losses of a step's tokens become one number."""

    loss_aggregation: Literal["sample_mean", "token_mean"] | None = None
    """sample_mean: the mean over samples of each sample's token mean; token_mean: the mean over
    all trained tokens of the step. Default: sample_mean, or token_mean with
    calculate_per_token_loss."""

    calculate_per_token_loss: bool = False
    """Another name of loss_aggregation token_mean."""

    count_masked_samples: bool = False
    """Count a sample with no trained token as one of the samples that sample_mean averages over,
    with loss 0."""

    @property
    def aggregation(self) -> Literal["sample_mean", "token_mean"]:
        """The aggregation in force."""
        if self.loss_aggregation is not None:
            return self.loss_aggregation
        return "token_mean" if self.calculate_per_token_loss else "sample_mean"

    def rules(self) -> Iterator[Rule]:
        """The two names of one choice must agree; masked samples count only in a sample mean."""
        agree = not self.calculate_per_token_loss or self.aggregation == "token_mean"
        yield (
            agree,
            "loss_aggregation",
            "must be token_mean, or left out, with calculate_per_token_loss",
            "leave one of the two out",
        )
        yield (
            not self.count_masked_samples or self.aggregation == "sample_mean",
            "count_masked_samples",
            "needs loss_aggregation sample_mean",
            "leave count_masked_samples out",
        )


@dataclass(frozen=True)
class HeadConfig(CheckedConfig):
    """How hidden states become log-probabilities."""

    rollout_temperature: float = 1.0
    """Sampling temperature of the rollouts, > 0; divides the logits before the softmax."""

    log_probs_chunk_size: int | None = None
    """Rows of logits computed at a time. Default: as many as log_probs_memory_mb holds."""

    log_probs_memory_mb: int = 64
    """Memory for logits at any one time, in MiB on each rank."""

    def rules(self) -> Iterator[Rule]:
        """Ranges."""
        chunk = self.log_probs_chunk_size
        yield self.rollout_temperature > 0, "rollout_temperature", "must be > 0", "use 1.0"
        yield (
            chunk is None or chunk >= 1,
            "log_probs_chunk_size",
            "must be >= 1",
            "use 1024, or leave it out",
        )
        yield self.log_probs_memory_mb >= 1, "log_probs_memory_mb", "must be >= 1", "use 64"
