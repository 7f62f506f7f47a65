"""Rules that ask the machine: paths and the GPU driver. Nothing here calls CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.rl.checkpoint_files import holds_checkpoint
from megatron.rl.flags.rule import Violation, is_same_place
from megatron.rl.samples import printable
from megatron.rl.sources.paths import expand_paths
from slime_loss import ConfigError, load_function

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
DIRECTORIES = (
    "load",
    "save",
    "pretrained_checkpoint",
    "tensorboard_dir",
    "rollout_watch",
    "rollout_dir",
)
"""Device files of NVIDIA's driver on Linux and in Windows' Linux."""


def cuda_driver_found() -> bool:
    """Whether PyTorch is built for CUDA and a driver is there, without starting CUDA."""
    return torch.version.cuda is not None and any(Path(file).exists() for file in DRIVER_FILES)


def machine_violations(flags: Mapping[str, Any], *, has_driver: bool) -> Iterator[Violation]:
    """Rules that may break on one machine of a job and hold on another."""
    if flags["device"] == "cuda" and not has_driver:
        yield _violation(
            "--device",
            "cuda needs PyTorch built for CUDA and an NVIDIA driver",
            f"cuda (PyTorch {torch.__version__})",
            "install the driver and a CUDA build of PyTorch, or use --device cpu",
        )
    for name in DIRECTORIES:
        if flags[name] == "":
            spelling = f"--{name.replace('_', '-')}"
            yield _violation(spelling, "must name a directory", "''", f"leave {spelling} out")
    yield from _custom_functions(flags)
    for name in ("rollout_data", "prompt_data"):
        yield from _files(f"--{name.replace('_', '-')}", flags[name])
    yield from _load(flags["load"], flags["save"], flags["exit_on_missing_checkpoint"])
    pretrained = flags["pretrained_checkpoint"]
    if pretrained and not holds_checkpoint(Path(pretrained)):
        yield _violation(
            "--pretrained-checkpoint",
            "must hold a checkpoint (iter_0000001 and the like)",
            pretrained,
            "give the --save directory of an earlier run, or one checkpoint in it",
        )
    for name in ("save", "tensorboard_dir", "rollout_dir"):
        yield from _writable(f"--{name.replace('_', '-')}", flags[name])


def _violation(flag: str, rule: str, given: object, fix: str) -> Violation:
    return Violation(flag, rule, str(given), fix, on_machine=True)


def _custom_functions(flags: Mapping[str, Any]) -> Iterator[Violation]:
    """Functions of the user's own must be found before anything is started."""
    for name in ("custom_loss", "custom_advantage", "custom_tis"):
        field = f"{name}_function_path"
        try:
            if flags[field] is not None:
                load_function(flags[field], field)
        except ConfigError as error:
            for found in error.violations:
                flag = f"--{field.replace('_', '-')}"
                yield _violation(flag, found.rule, repr(found.value), found.fix)


def _files(flag: str, paths: tuple[str, ...]) -> Iterator[Violation]:
    files, errors = expand_paths(paths)
    for error in errors:
        yield _violation(flag, error.rule, printable(error.file), error.fix)
    for file in files:
        if not os.path.isfile(file):
            rule = "must be a file that exists"
            yield _violation(flag, rule, printable(file), "check the path")


def _load(load: str | None, save: str | None, must_exist: bool) -> Iterator[Violation]:
    """A first start with `--load` and `--save` on one new directory must work."""
    if not load:
        return
    if must_exist and not holds_checkpoint(Path(load)):
        yield _violation(
            "--load",
            "must hold a checkpoint (iter_0000001 and the like)",
            load,
            "check the path, or leave --exit-on-missing-checkpoint out",
        )
    elif not Path(load).is_dir() and not is_same_place(load, save):
        yield _violation(
            "--load",
            "must be a directory that exists, unless it is --save",
            load,
            "check the path, or leave --load out",
        )


def _writable(flag: str, directory: str | None) -> Iterator[Violation]:
    """The directory, or the nearest existing one above it, must take new files."""
    if not directory:
        return
    existing = Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield _violation(
            flag,
            "must be a directory that can be written",
            f"{directory} ({existing} cannot)",
            "check the path and its permissions",
        )
