"""What the flags of the loss make of each other."""

from pathlib import Path

import pytest

from megatron.rl.arguments import resolve
from tests.megatron.rl.flags.broken_rules import CUSTOM_LOSS, FUNCTION
from tests.megatron.rl.flags.command_line import resolved, small_run, violations


@pytest.mark.parametrize(
    ("flags", "objective"),
    [
        ("--advantage-estimator gspo", "gspo"),
        ("--advantage-estimator cispo", "cispo"),
        ("--advantage-estimator gspo --policy-objective gspo", "gspo"),
        ("--policy-objective gspo", "gspo"),
        ("--advantage-estimator rloo", None),
        (f"--advantage-estimator gspo --loss-type custom_loss {CUSTOM_LOSS}", None),
    ],
)
def test_the_objective_follows_the_estimator(
    tmp_path: Path, flags: str, objective: str | None
) -> None:
    config = resolved(tmp_path, flags)
    assert config.loss.policy_objective == objective
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    again = resolve([f"--config={tmp_path}/again.yaml"], 1, has_driver=False)
    assert again.loss == config.loss


@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-estimator reinforce_plus_plus",
        "--advantage-estimator ppo",
        f"--custom-advantage-function-path {FUNCTION}",
        "--loss-type sft_loss",
        f"--loss-type custom_loss {CUSTOM_LOSS}",
    ],
)
def test_one_sample_per_prompt_is_enough_where_none_are_compared(
    tmp_path: Path, flags: str
) -> None:
    assert violations(small_run(tmp_path, f"--n-samples-per-prompt 1 {flags}")) == []
