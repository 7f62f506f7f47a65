"""Rules between the configs of advantages and loss, each of which checks itself alone."""

from __future__ import annotations

from dataclasses import fields

from megatron.rl.flags.rule import FlagView, Rule
from slime_loss import AdvantageConfig, HeadConfig, ValueLossConfig

OWN_OBJECTIVE = ("gspo", "cispo")
"""Estimators that are named after the objective they belong to."""

_ADVANTAGE, _VALUE_LOSS, _HEAD = AdvantageConfig(), ValueLossConfig(), HeadConfig()


def _compares_groups(s: FlagView) -> bool:
    config = AdvantageConfig(advantage_estimator=s.advantage_estimator)
    return s.custom_advantage_function_path is None and config.compares_groups


LOSS_RULES = (
    Rule(
        "policy_objective",
        lambda s: (
            s.loss_type == "policy_loss"
            and s.advantage_estimator in OWN_OBJECTIVE
            and s.policy_objective not in (None, s.advantage_estimator)
        ),
        "must be {advantage_estimator} with --advantage-estimator {advantage_estimator}",
        "leave it out, or use --advantage-estimator grpo, which gives the same advantages",
    ),
    Rule(
        "kl_loss_type",
        lambda s: s.kl_loss_type != "k1" and not s.use_kl_loss and s.kl_coef == 0,
        "needs --use-kl-loss or --kl-coef: nothing else estimates a KL divergence",
        "add one of them, or leave --kl-loss-type out",
    ),
    Rule(
        "value_clip",
        lambda s: s.loss_type != "value_loss" and s.value_clip != _VALUE_LOSS.value_clip,
        "needs --loss-type value_loss",
        "leave it out",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s.loss_type == "sft_loss" and s[name] != getattr(_ADVANTAGE, name),
            "has no meaning in sft_loss: nothing is rewarded",
            "leave it out",
        )
        for name in (
            "advantage_estimator",
            "custom_advantage_function_path",
            "normalize_advantages",
            "gamma",
            "lambd",
            "kl_coef",
        )
    ),
    Rule(
        "advantage_estimator",
        lambda s: (
            s.loss_type == "value_loss"
            and (s.advantage_estimator != "ppo" or s.custom_advantage_function_path is not None)
        ),
        "must be ppo with --loss-type value_loss: no other way gives the returns that a critic "
        "learns",
        "use --advantage-estimator ppo",
    ),
    Rule(
        "normalize_advantages",
        lambda s: s.loss_type == "value_loss" and s.normalize_advantages,
        "has no meaning in value_loss: a critic learns returns, which are not normalized",
        "leave it out",
    ),
    *(
        Rule(
            name,
            lambda s, name=name: s.loss_type == "value_loss" and s[name] != getattr(_HEAD, name),
            "has no meaning in value_loss: a critic has no logits",
            "leave it out",
        )
        for name in (field.name for field in fields(HeadConfig))
    ),
    Rule(
        "n_samples_per_prompt",
        lambda s: (
            s.n_samples_per_prompt == 1 and s.loss_type == "policy_loss" and _compares_groups(s)
        ),
        "must be > 1: --advantage-estimator {advantage_estimator} compares samples of one prompt, "
        "and alone each has advantage 0",
        "use rollouts with several samples per prompt, or --advantage-estimator "
        "reinforce_plus_plus",
    ),
    Rule(
        "rollout_top_p",
        lambda s: s.rollout_top_p < 1 and s.loss_type in ("sft_loss", "value_loss"),
        "has no meaning in {loss_type}",
        "leave it out",
    ),
)
