"""The rules of the loss of a token: ranges, and what means nothing without something else."""

import math

import pytest

from slime_loss import ConfigError, PolicyLossConfig
from tests.slime_loss.references import without_type_checker

TIS = {"use_tis": True}
RS = {"use_rs": True}
PATH = "my_package.losses:loss"


def broken(**values: object) -> list[str]:
    with without_type_checker(), pytest.raises(ConfigError) as error:
        PolicyLossConfig(**values)
    for violation in error.value.violations:
        assert violation.fix
        assert str(violation) == f"{violation.field} {violation.rule}: " + (
            f"{violation.field}={violation.value!r}"
        )
    return [violation.field for violation in error.value.violations]


@pytest.mark.parametrize(
    ("field", "others", "values"),
    [
        ("policy_objective", {}, ["grpo", "", 1]),
        ("tis_mode", TIS, ["mask", None]),
        ("tis_level", TIS, ["sample", None]),
        ("tis_clip", TIS, [0.0, -1.0, math.inf, math.nan, None]),
        ("tis_clip_low", TIS, [-0.1, 2.1, math.inf, math.nan, None]),
        ("rs_level", RS, ["sample", None]),
        ("rs_upper_bound", RS, [0.0, -1.0, math.inf, math.nan, None]),
        ("rs_lower_bound", RS, [-0.1, 2.1, math.inf, math.nan]),
        ("rs_veto_threshold", RS, [0.0, -1.0, math.inf, math.nan]),
        ("opsm_delta", {"use_opsm": True}, [-0.1, math.inf, math.nan, None]),
        ("use_tis", {}, [1, None]),
        ("use_rs", {}, [1, None]),
        ("use_opsm", {}, [1, None]),
        ("custom_loss_function_path", {"loss_type": "custom_loss"}, ["f", "a.b", ":f", "a:", 3]),
        ("custom_tis_function_path", TIS, ["f", "a.b", ":f", "a:", "a:b:c", "a-b:c", 3]),
    ],
)
def test_every_field_refuses_values_out_of_its_range(
    field: str, others: dict[str, object], values: list[object]
) -> None:
    for value in values:
        assert broken(**others, **{field: value}) == [field], value


@pytest.mark.parametrize("upper", [0.5, 0.999])
def test_an_upper_bound_below_1_needs_a_lower_one(upper: float) -> None:
    with pytest.raises(ConfigError) as error:
        PolicyLossConfig(use_rs=True, rs_upper_bound=upper)
    message = f"rs_upper_bound must be >= 1, or give rs_lower_bound: rs_upper_bound={upper}"
    assert str(error.value) == message
    assert PolicyLossConfig(use_rs=True, rs_upper_bound=upper, rs_lower_bound=0.1).use_rs


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"loss_type": "custom_loss"}, ["loss_type"]),
        ({"custom_loss_function_path": PATH}, ["custom_loss_function_path"]),
        ({"custom_tis_function_path": PATH}, ["custom_tis_function_path"]),
        ({**TIS, "custom_tis_function_path": PATH, "tis_clip": 1.5}, ["tis_clip"]),
        ({**TIS, "custom_tis_function_path": PATH, "tis_level": "sequence"}, ["tis_level"]),
        ({**TIS, "use_rollout_logprobs": True}, ["use_tis"]),
        ({**RS, "use_rollout_logprobs": True}, ["use_rs"]),
        ({"tis_clip": 1.5, "tis_mode": "icepop"}, ["tis_mode", "tis_clip"]),
        ({"tis_level": "sequence"}, ["tis_level"]),
        ({"rs_level": "sequence"}, ["rs_level"]),
        (
            {"rs_upper_bound": 3.0, "rs_veto_threshold": 0.1},
            ["rs_upper_bound", "rs_veto_threshold"],
        ),
        ({"rs_lower_bound": 0.1}, ["rs_lower_bound"]),
        ({"opsm_delta": 0.1}, ["opsm_delta"]),
        ({"policy_objective": "reinforce", "eps_clip": 0.1}, ["eps_clip"]),
        ({"policy_objective": "cispo", "eps_clip_c": 3.0}, ["eps_clip_c"]),
        ({"loss_type": "sft_loss", "policy_objective": "gspo"}, ["policy_objective"]),
        ({"loss_type": "sft_loss", **TIS}, ["use_tis"]),
        ({"loss_type": "value_loss", "use_opsm": True}, ["use_opsm"]),
        ({"loss_type": "value_loss", "entropy_coef": 0.1}, ["entropy_coef"]),
        (
            {"loss_type": "custom_loss", "custom_loss_function_path": PATH, **RS},
            ["use_rs"],
        ),
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, object], fields: list[str]) -> None:
    assert sorted(broken(**values)) == sorted(fields)


@pytest.mark.parametrize(
    "values",
    [
        {"policy_objective": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
        {"policy_objective": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, "eps_clip_c": 2.0},
        {**TIS, "tis_mode": "icepop", "tis_clip": 5.0, "tis_clip_low": 0.5},
        {**TIS, "custom_tis_function_path": PATH, **RS, "rs_level": "geometric"},
        {**RS, "rs_upper_bound": 1.0, "rs_lower_bound": 0.0, "rs_veto_threshold": 1e-4},
        {"use_opsm": True, "opsm_delta": 0.0, "use_rollout_logprobs": True},
        {"loss_type": "custom_loss", "custom_loss_function_path": PATH, "entropy_coef": 0.1},
        {"loss_type": "value_loss"},
    ],
)
def test_what_means_something_is_kept(values: dict[str, object]) -> None:
    built = PolicyLossConfig(**values)
    assert {name: getattr(built, name) for name in values} == values


def test_defaults_follow_other_fields() -> None:
    assert PolicyLossConfig().objective == "ppo"
    assert PolicyLossConfig(policy_objective="gspo").objective == "gspo"
    assert PolicyLossConfig(**RS, rs_upper_bound=4.0).rejection_low == 0.25
    assert PolicyLossConfig(**RS, rs_upper_bound=4.0, rs_lower_bound=0.5).rejection_low == 0.5
