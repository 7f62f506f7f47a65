"""What differs between releases of megatron-core does not reach those who use this repository."""

from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron.rl.core_versions import SINCE_0_19, settings_of_this_core
from megatron.rl.flags.generate import all_flags
from tests.megatron.rl.flags.command_line import resolved

OF_0_16 = "fp4_param: false\nmoe_deepep_num_sms: 20\nmoe_hybridep_num_sms: 16\n"
"""Of a configuration that 0.16 saved, the keys whose meaning or default 0.19 has changed."""


def test_a_configuration_of_an_older_core_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OF_0_16)
    config = resolved(tmp_path, f"--config {file}")
    assert config.notes == ()
    assert config.flags["moe_deepep_num_sms"] == 20


@pytest.mark.skipif(not SINCE_0_19, reason="this core has a field for each dispatcher")
@pytest.mark.parametrize(
    ("backend", "num_sms", "pads"),
    [("deepep", 20, False), ("hybridep", 16, True), ("ncclep", None, False)],
)
def test_the_dispatcher_has_its_own_settings(backend: str, num_sms: int | None, pads: bool) -> None:
    flags: dict[str, Any] = {name: flag.default for name, flag in all_flags().items()}
    flags |= {"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16}
    settings = settings_of_this_core({**flags, "moe_flex_dispatcher_backend": backend})
    assert settings["transformer"]["moe_flex_dispatcher_num_sms"] == num_sms
    assert settings["transformer"]["moe_hybridep_pad_uneven_dispatch_inputs"] is pads


def test_fp4_parameters_of_ddp_and_transformer_agree() -> None:
    flags: dict[str, Any] = {name: flag.default for name, flag in all_flags().items()}
    of_ddp = settings_of_this_core({**flags, "fp4_param": True})["ddp"]
    assert of_ddp == ({"fp4_param_gather": True} if SINCE_0_19 else {})


def test_the_installed_core_is_one_that_is_allowed() -> None:
    named = [Requirement(text) for text in requires("megatron-slime") or ()]
    [core] = [one for one in named if one.name == "megatron-core"]
    assert version("megatron-core") in core.specifier
    assert all(untested not in core.specifier for untested in ("0.16.0", "0.18.2", "0.20.0"))
