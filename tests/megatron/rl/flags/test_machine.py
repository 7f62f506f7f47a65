import os
from pathlib import Path

import pytest
import torch

from megatron.rl.checkpoint_manifest import MANIFEST
from megatron.rl.flags import machine
from megatron.rl.flags.machine import cuda_driver_found, machine_violations
from megatron.rl.flags.rule import Violation


def found(tmp_path: Path, *, has_driver: bool = False, **flags: object) -> list[Violation]:
    file = tmp_path / "rollouts.jsonl"
    file.touch()
    defaults = {
        "device": "auto",
        "rollout_data": (str(file),),
        "load": None,
        "save": None,
        "tensorboard_dir": None,
        "exit_on_missing_checkpoint": False,
        "pretrained_checkpoint": None,
        "rollout_watch": None,
        "prompt_data": (),
        "rollout_dir": None,
        "custom_loss_function_path": None,
        "custom_advantage_function_path": None,
        "custom_tis_function_path": None,
    }
    return list(machine_violations(defaults | flags, has_driver=has_driver))


def test_a_good_machine(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    assert found(tmp_path, device="cuda", has_driver=True) == []
    assert found(tmp_path, device="cpu") == []


def test_cuda_needs_a_driver(tmp_path: Path) -> None:
    (violation,) = found(tmp_path, device="cuda")
    assert violation.flag == "--device"
    assert "--device cpu" in violation.fix
    assert violation.on_machine


def test_a_driver_is_a_device_file_and_a_build_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidiactl"
    monkeypatch.setattr(machine, "DRIVER_FILES", (str(device),))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not cuda_driver_found()
    device.touch()
    assert cuda_driver_found()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not cuda_driver_found()


@pytest.mark.parametrize("name", ["custom_loss", "custom_advantage", "custom_tis"])
def test_functions_of_the_users_own_must_be_there(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "exiting_module.py").write_text("raise SystemExit")
    (tmp_path / "good_module.py").write_text("def f(*_, **__):\n    pass\n")
    path = f"{name}_function_path"
    assert found(tmp_path, **{path: "good_module:f"}) == []
    for value, rule, reason in (
        ("no_such_module:function", "a module that can", "No module named 'no_such_module'"),
        ("broken_module:function", "a module that can", "ZeroDivisionError: division by zero"),
        ("os:no_such_function", "which has no 'no_such_function'", ""),
        ("exiting_module:function", "a module that can", "SystemExit: "),
        ("os:name", "must name a function, and this is of type str", ""),
        ("os:fspath", "must name a function of (", "too many positional arguments"),
    ):
        (violation,) = found(tmp_path, **{path: value})
        assert violation.flag == f"--{path.replace('_', '-')}"
        assert value in violation.given
        assert rule in violation.rule
        assert reason in violation.rule
        assert violation.on_machine


@pytest.mark.parametrize("path", ["missing.jsonl", "*.nothing", "empty_folder"])
def test_rollouts_that_are_not_there(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty_folder").mkdir()
    good = str(tmp_path / "rollouts.jsonl")
    (violation,) = found(tmp_path, rollout_data=(good, str(tmp_path / path)))
    assert violation.flag == "--rollout-data"
    assert path in violation.given


def test_rollouts_by_glob_and_folder(tmp_path: Path) -> None:
    paths = (str(tmp_path), str(tmp_path / "*.jsonl"))
    assert found(tmp_path, rollout_data=paths) == []


def test_load_must_exist_unless_the_run_makes_it(tmp_path: Path) -> None:
    new = str(tmp_path / "checkpoints")
    assert found(tmp_path, load=new, save=new) == []
    assert found(tmp_path, load=new + "/", save=new) == []
    assert found(tmp_path, load=os.path.relpath(new), save=new) == []
    assert found(tmp_path, load=str(tmp_path)) == []
    for save in (None, str(tmp_path)):
        (violation,) = found(tmp_path, load=new, save=save)
        assert (violation.flag, violation.given) == ("--load", new)


def test_a_checkpoint_may_be_demanded(tmp_path: Path) -> None:
    flags = {"load": str(tmp_path), "save": str(tmp_path), "exit_on_missing_checkpoint": True}
    (violation,) = found(tmp_path, **flags)
    assert "must hold a checkpoint" in violation.rule
    (tmp_path / "iter_0000003").mkdir()
    assert found(tmp_path, **flags) == []


def test_pretrained_weights_must_be_there(tmp_path: Path) -> None:
    (violation,) = found(tmp_path, pretrained_checkpoint=str(tmp_path))
    assert violation.flag == "--pretrained-checkpoint"
    assert "must hold a checkpoint" in violation.rule
    checkpoint = tmp_path / "iter_0000003"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).touch()
    for directory in (tmp_path, checkpoint):
        assert found(tmp_path, pretrained_checkpoint=str(directory)) == []


@pytest.mark.parametrize("name", ["save", "tensorboard_dir"])
def test_directories_must_take_files(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, **{name: str(tmp_path / "new" / "below")}) == []
    file = tmp_path / "file"
    file.touch()
    (violation,) = found(tmp_path, **{name: str(file / "below")})
    assert violation.flag == f"--{name.replace('_', '-')}"
    assert str(file) in violation.given


def test_a_directory_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (violation,) = found(tmp_path, save=str(tmp_path / "new"))
    assert str(tmp_path) in violation.given
