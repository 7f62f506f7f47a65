"""What functions of the user's own may do beside returning: exit, change what they get."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from slime_loss import (
    AdvantageConfig,
    AdvantageInputs,
    ConfigError,
    PolicyLossConfig,
    compute_advantages,
    load_function,
    make_objective,
)
from slime_loss.batch import KeptIds
from slime_loss.custom import ARGUMENTS
from tests.slime_loss import user_functions
from tests.slime_loss.reference_policy import shown
from tests.slime_loss.references import gradients, random_batch

PATH = "tests.slime_loss.user_functions:mine"
LOSS = PolicyLossConfig(loss_type="custom_loss", custom_loss_function_path=PATH)
TIS = PolicyLossConfig(use_tis=True, custom_tis_function_path=PATH)
ADVANTAGES = AdvantageConfig(custom_advantage_function_path=PATH)


def run(config: PolicyLossConfig | AdvantageConfig, function: Callable[..., Any]) -> Any:
    """The result, and what the caller gave, after the function has worked on it."""
    with patch.object(user_functions, "mine", function, create=True):
        if isinstance(config, AdvantageConfig):
            masks = [torch.tensor([True, False]), torch.tensor([True])]
            streams = [torch.rand(2), torch.rand(1)]
            given = AdvantageInputs(
                torch.rand(2), torch.arange(2), torch.arange(2), masks, streams, streams
            )
            before = deepcopy(given)
            return compute_advantages(given, config), vars(given), vars(before)
        log_probs, entropy, batch = random_batch(5, 12)
        kept_ids = KeptIds(torch.arange(2), torch.arange(13).clamp(max=2))
        batch = replace(batch, kept_ids=kept_ids)
        if config is TIS:
            batch = replace(batch, old_log_probs=None)
        before = deepcopy(vars(batch)) | {"log_probs": log_probs.detach().clone()}
        output = make_objective(config).function(log_probs, entropy, batch)
        grads = gradients(output.loss, log_probs)
        numbers = shown(output), grads, output.first_nonfinite_row
        return numbers, vars(batch) | {"log_probs": log_probs.detach()}, before


def spoil(value: Any) -> None:
    """Write into every tensor of a value."""
    if isinstance(value, Tensor):
        value.fill_(torch.nan if value.is_floating_point() else 0)
    elif isinstance(value, list):
        for one in value:
            spoil(one)
    elif hasattr(value, "__dataclass_fields__"):
        for one in vars(value).values():
            spoil(one)


def loss(log_probs: Tensor, *_: Any, cp_group: Any) -> Tensor:
    return -log_probs


def weights(train: Tensor, rollout: Tensor, *_: Any, cp_group: Any) -> Any:
    return (train - rollout).exp(), None


def rewards(inputs: AdvantageInputs, _: Any) -> Tensor:
    return inputs.rewards.clone()


@pytest.mark.parametrize(
    ("config", "function"), [(LOSS, loss), (TIS, weights), (ADVANTAGES, rewards)]
)
def test_a_function_may_change_all_it_gets(config: Any, function: Callable[..., Any]) -> None:
    def spoils(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        for one in arguments:
            spoil(one)
        return result

    torch.manual_seed(1)
    quiet, _, _ = run(config, function)
    torch.manual_seed(1)
    spoiled, after, before = run(config, spoils)
    assert_same(after, before)
    assert_same(spoiled, quiet)


def assert_same(found: Any, expected: Any) -> None:
    """Compare as text, where every digit of a float is printed: types are mixed."""
    with torch._tensor_str.printoptions(precision=17):
        assert str(found) == str(expected)


@pytest.mark.parametrize("code", [0, None, 1, "bye"])
@pytest.mark.parametrize("config", [LOSS, TIS, ADVANTAGES])
def test_a_function_that_exits_is_an_error(config: Any, code: Any) -> None:
    def exits(*_: Any, **__: Any) -> Any:
        raise SystemExit(code)

    message = rf"^custom_\w+_function_path {PATH} must return, and not exit: SystemExit.code="
    with pytest.raises(RuntimeError, match=message) as error:
        run(config, exits)
    assert str(error.value).endswith(f"={code!r}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import sys; sys.exit()", "SystemExit: "),
        ("def f(:", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("class Mine(Exception): pass\nraise Mine('so')", "Mine: so"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_module_of_this_test.py").write_text(text)
    path, field = "user_module_of_this_test:f", "custom_loss_function_path"
    with pytest.raises(ConfigError) as error:
        load_function(path, field)
    assert str(error.value).startswith(f"{field} must name a module that can be imported ({why}")
    assert str(error.value).endswith(f": {field}={path!r}")


@pytest.mark.parametrize("field", ARGUMENTS)
def test_a_function_that_cannot_take_its_arguments_is_refused(field: str) -> None:
    count = 2 if field == "custom_advantage_function_path" else 4
    keyword = "" if count == 2 else ", cp_group"
    for good in (
        f"*args{keyword}",
        "*args, **kwargs",
        "a, b" if count == 2 else "a, b, c, d, cp_group",
    ):
        function = eval(f"lambda {good}: None")
        with patch.object(user_functions, "mine", function, create=True):
            assert load_function(PATH, field) is function
    for bad in ("", "a", "a, b, c, d, e, **kwargs", "*args, other", "*args, cp_group, other"):
        function = eval(f"lambda {bad}: None")
        with (
            patch.object(user_functions, "mine", function, create=True),
            pytest.raises(ConfigError, match=rf"^{field} must name a function of \("),
        ):
            load_function(PATH, field)
