import math
from dataclasses import fields

import pytest

from slime_loss import (
    AdvantageConfig,
    AggregationConfig,
    CheckedConfig,
    ConfigError,
    HeadConfig,
    PolicyLossConfig,
    ValueLossConfig,
)
from tests.slime_loss.references import without_type_checker

KL = {"use_kl_loss": True}
CLIP_MESSAGE = """\
eps_clip must be > 0: eps_clip=0.0
eps_clip_c must be > 1: eps_clip_c=1.0
kl_loss_coef needs use_kl_loss: kl_loss_coef=0.1"""


@pytest.mark.parametrize(
    ("config", "field", "values"),
    [
        (AdvantageConfig, "advantage_estimator", ["", "GRPO", None]),
        (PolicyLossConfig, "loss_type", ["ppo", None]),
        (PolicyLossConfig, "eps_clip", [0.0, -0.1, math.inf, math.nan, "0.2", None, True]),
        (PolicyLossConfig, "eps_clip_high", [0.0, -0.1, math.inf, math.nan, "0.2"]),
        (PolicyLossConfig, "eps_clip_c", [1.0, 0.5, -3.0, math.inf, math.nan]),
        (PolicyLossConfig, "entropy_coef", [math.inf, -math.inf, math.nan, "0"]),
        (PolicyLossConfig, "use_kl_loss", [1, "true", None]),
        (PolicyLossConfig, "kl_loss_coef", [-0.1, math.inf, math.nan]),
        (PolicyLossConfig, "kl_loss_type", ["k4", None]),
        (PolicyLossConfig, "use_unbiased_kl", [0, None]),
        (PolicyLossConfig, "use_rollout_logprobs", [0, None]),
        (AggregationConfig, "loss_aggregation", ["mean", ""]),
        (AggregationConfig, "calculate_per_token_loss", [1, None]),
        (AggregationConfig, "count_masked_samples", [1, None]),
        (HeadConfig, "rollout_temperature", [0.0, -1.0, math.inf, math.nan, None]),
        (HeadConfig, "log_probs_chunk_size", [0, -1, 1.5, True]),
        (HeadConfig, "log_probs_memory_mb", [0, -1, 1.5]),
    ],
)
def test_every_field_refuses_values_out_of_its_range(
    config: type[CheckedConfig], field: str, values: list[object]
) -> None:
    others = KL if field == "kl_loss_coef" else {}
    for value in values:
        with without_type_checker(), pytest.raises(ConfigError) as error:
            config(**others, **{field: value})
        [violation] = error.value.violations
        assert violation.field == field
        assert violation.rule
        assert violation.fix
        assert str(violation) == str(error.value)
        assert str(violation) == f"{field} {violation.rule}: {field}={value!r}"


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (PolicyLossConfig, {"eps_clip_high": 0.28, "eps_clip_c": 1.0001, "eps_clip": 1e-4}),
        (PolicyLossConfig, {"entropy_coef": -0.01, "use_rollout_logprobs": True}),
        (PolicyLossConfig, {"use_kl_loss": True}),
        (PolicyLossConfig, {"use_kl_loss": True, "kl_loss_coef": 1e-3, "use_unbiased_kl": True}),
        (PolicyLossConfig, {"loss_type": "sft_loss"}),
        (AggregationConfig, {"loss_aggregation": "token_mean", "calculate_per_token_loss": True}),
        (AggregationConfig, {"count_masked_samples": True}),
        (HeadConfig, {"rollout_temperature": 1e-3, "log_probs_chunk_size": 1}),
    ],
)
def test_values_within_range_are_kept(
    config: type[CheckedConfig], values: dict[str, object]
) -> None:
    built = config(**values)
    assert {name: getattr(built, name) for name in values} == values
    assert built.violations() == []


FLOATS = [
    (config, field.name)
    for config in (
        AdvantageConfig,
        AggregationConfig,
        HeadConfig,
        PolicyLossConfig,
        ValueLossConfig,
    )
    for field in fields(config)
    if field.type in (float, float | None)
]


def test_the_floats_are_found() -> None:
    assert len(FLOATS) > 15
    assert (HeadConfig, "rollout_temperature") in FLOATS


@pytest.mark.parametrize(("config", "field"), FLOATS)
@pytest.mark.parametrize(
    "value", [1e300, -1e300, 1.001e30, 0.999e-30, 1e-45, -1e-320, 10**31, 10**400]
)
def test_a_number_that_fp32_cannot_work_with_is_refused(
    config: type[CheckedConfig], field: str, value: float
) -> None:
    with without_type_checker(), pytest.raises(ConfigError) as error:
        config(**{field: value})
    [violation] = error.value.violations
    rule = "must be 0 or between 1e-30 and 1e30 in size"
    assert str(violation) == f"{field} {rule}: {field}={value!r}"


def test_the_smallest_and_the_largest_number_are_kept() -> None:
    config = PolicyLossConfig(eps_clip=1e-30, eps_clip_high=1e30, entropy_coef=-1e-30)
    assert (config.eps_clip, config.eps_clip_high) == (1e-30, 1e30)


def test_an_int_may_stand_for_a_float() -> None:
    with without_type_checker():
        assert PolicyLossConfig(eps_clip_c=3).eps_clip_c == 3


@pytest.mark.parametrize(
    ("config", "values", "field"),
    [
        (PolicyLossConfig, {"kl_loss_coef": 0.1}, "kl_loss_coef"),
        (PolicyLossConfig, {"use_unbiased_kl": True}, "use_unbiased_kl"),
        (PolicyLossConfig, {"loss_type": "sft_loss", "entropy_coef": 0.1}, "entropy_coef"),
        (PolicyLossConfig, {"loss_type": "sft_loss", "eps_clip_high": 0.3}, "eps_clip_high"),
        (PolicyLossConfig, {"loss_type": "sft_loss", "eps_clip_c": 3.0}, "eps_clip_c"),
        (PolicyLossConfig, {"loss_type": "sft_loss", "use_kl_loss": True}, "use_kl_loss"),
        (
            PolicyLossConfig,
            {"loss_type": "sft_loss", "use_rollout_logprobs": True},
            "use_rollout_logprobs",
        ),
        (
            AggregationConfig,
            {"loss_aggregation": "sample_mean", "calculate_per_token_loss": True},
            "loss_aggregation",
        ),
        (
            AggregationConfig,
            {"loss_aggregation": "token_mean", "count_masked_samples": True},
            "count_masked_samples",
        ),
        (
            AggregationConfig,
            {"calculate_per_token_loss": True, "count_masked_samples": True},
            "count_masked_samples",
        ),
    ],
)
def test_contradictions_are_refused(
    config: type[CheckedConfig], values: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config(**values)
    assert [violation.field for violation in error.value.violations] == [field]


def test_all_violations_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="eps_clip") as error:
        PolicyLossConfig(eps_clip=0.0, eps_clip_c=1.0, kl_loss_coef=0.1)
    assert str(error.value) == CLIP_MESSAGE


def test_wrong_types_are_reported_without_reading_them() -> None:
    with without_type_checker(), pytest.raises(ConfigError) as error:
        PolicyLossConfig(eps_clip="wide", kl_loss_type="k9", eps_clip_c=0.5)
    assert [v.field for v in error.value.violations] == ["eps_clip", "kl_loss_type"]


@pytest.mark.parametrize(
    ("values", "aggregation"),
    [
        ({}, "sample_mean"),
        ({"calculate_per_token_loss": True}, "token_mean"),
        ({"loss_aggregation": "token_mean"}, "token_mean"),
        ({"loss_aggregation": "sample_mean"}, "sample_mean"),
    ],
)
def test_the_aggregation_has_two_names(values: dict[str, object], aggregation: str) -> None:
    assert AggregationConfig(**values).aggregation == aggregation


def test_the_upper_clip_defaults_to_the_lower_one() -> None:
    assert PolicyLossConfig(eps_clip=0.25).clip_high == 1.25
    both = PolicyLossConfig(eps_clip=0.25, eps_clip_high=0.5)
    assert (both.clip_low, both.clip_high) == (0.75, 1.5)
