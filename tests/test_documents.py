"""What docs/loss.md says is so: its code runs, and it names every field, flag and metric."""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron.rl.flags.generate import all_flags
from slime_loss import (
    AdvantageConfig,
    AggregationConfig,
    HeadConfig,
    PolicyLossConfig,
    TokenBatch,
    ValueLossConfig,
    custom_loss,
    policy_loss,
    value_loss,
)
from slime_loss.config import Aggregation, Estimator
from slime_loss.policy_config import PolicyObjective

LOSS = (Path(__file__).parents[1] / "docs" / "loss.md").read_text(encoding="utf-8")
CONFIGS = (AdvantageConfig, AggregationConfig, HeadConfig, PolicyLossConfig, ValueLossConfig)
NAMED = set(re.findall(r"`-{0,2}([a-z][a-z0-9_-]*)[^`]*`", LOSS))


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the modules that a document shows, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]
    importlib.invalidate_caches()


def test_code_runs(own_modules: Path) -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", LOSS, flags=re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        file = re.match(r"# (\w+\.py)\n", block)
        if file is None:
            exec(compile(block, "docs/loss.md", "exec"), namespace)
        else:
            (own_modules / file[1]).write_text(block, encoding="utf-8")
    assert len(blocks) >= 5


def test_the_functions_it_shows_are_accepted(own_modules: Path) -> None:
    (block,) = re.findall(r"```python\n(# my_rl\.py\n.*?)```", LOSS, flags=re.DOTALL)
    (own_modules / "my_rl.py").write_text(block, encoding="utf-8")
    config = PolicyLossConfig(use_tis=True, custom_tis_function_path="my_rl:correction")
    output = policy_loss(torch.zeros(3, requires_grad=True), None, batch(), config)
    assert "tis_mean" in output.metrics
    config = PolicyLossConfig(loss_type="custom_loss", custom_loss_function_path="my_rl:loss")
    log_probs = torch.zeros(3, requires_grad=True)
    for old in (None, torch.zeros(3)):
        own_loss = custom_loss(log_probs, None, replace(batch(), old_log_probs=old), config)
        assert own_loss.metrics["soft_ratio"].value.tolist() == [1.5, 3.0]
    own = importlib.import_module("my_rl")
    from slime_loss import AdvantageInputs, compute_advantages

    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 3.0]),
        group_index=torch.tensor([0, 0]),
        own=torch.tensor([1]),
        loss_mask=[torch.tensor([True, False, True])],
    )
    assert own.advantages(inputs, None).tolist() == [1.0]
    found = compute_advantages(
        inputs, AdvantageConfig(custom_advantage_function_path="my_rl:advantages")
    )
    assert [stream.tolist() for stream in found.advantages] == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_names_every_field(config: type) -> None:
    documented = {name.replace("-", "_") for name in NAMED}
    assert {field.name for field in fields(config)} - documented == set()


def test_names_every_choice() -> None:
    for choices in (Estimator, Aggregation, PolicyObjective):
        assert set(get_args(choices)) - NAMED == set()


def test_names_flags_that_exist() -> None:
    flags = {name for flag in all_flags().values() for name in flag.names}
    assert set(re.findall(r"--[a-z][a-z-]+[a-z]", LOSS)) - flags == set()


def batch() -> TokenBatch:
    stream = torch.zeros(3)
    return TokenBatch(
        labels=torch.zeros(3, dtype=torch.int64),
        loss_mask=torch.ones(3, dtype=torch.bool),
        loss_weight=torch.ones(3),
        sample_index=torch.zeros(3, dtype=torch.int64),
        advantages=stream,
        rollout_log_probs=stream,
        ref_log_probs=stream,
        values=stream,
        returns=stream,
        num_trained_tokens=torch.tensor([3]),
    )


def test_names_every_metric() -> None:
    config = PolicyLossConfig(
        use_kl_loss=True,
        entropy_coef=0.1,
        use_tis=True,
        use_rs=True,
        rs_level="sequence",
        use_opsm=True,
    )
    log_probs, entropy = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    table = LOSS.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    listed = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    policy = policy_loss(log_probs, entropy, batch(), config).metrics
    critic = value_loss(log_probs, batch(), ValueLossConfig()).metrics
    assert listed == set(policy) | set(critic)
