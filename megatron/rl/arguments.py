"""From words to a checked `RunConfig`, or every reason why not.

The command line wins over the file of `--config`, the file over the architecture of
`--hf-checkpoint`, and that over defaults. Nothing is started before everything is checked.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.rl.config import RunConfig
from megatron.rl.flags.core_settings import core_settings
from megatron.rl.flags.generate import Flag, all_flags, help_text, sections
from megatron.rl.flags.loss_rules import LOSS_RULES, OWN_OBJECTIVE
from megatron.rl.flags.machine import cuda_driver_found, machine_violations
from megatron.rl.flags.model_rules import MODEL_RULES
from megatron.rl.flags.ranges import out_of_range
from megatron.rl.flags.read import Given, read_architecture, read_command_line, read_file
from megatron.rl.flags.rule import FlagView, Violation
from megatron.rl.flags.run_rules import NOTES, REQUIRED, RUN_RULES
from megatron.rl.flags.values import written
from megatron.rl.stopping import EXIT_USAGE
from slime_loss import ConfigError

if TYPE_CHECKING:
    from megatron.rl.initialize import World

SECONDS_TO_SPEAK = 60.0
"""How long a rank with nothing to say waits before it ends."""
CORE = "megatron.core"


class FlagError(ValueError):
    """All that is wrong with the flags of a run.

    Args:
        violations: at least one.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("\n".join(map(str, violations)))
        self.violations = tuple(violations)


def parse_config(argv: Sequence[str], world: World) -> RunConfig:
    """The configuration that `argv` describes; printed help or errors end the process.

    Args:
        argv: the words after the program's name.
        world: this process; rank 0 prints, and of another machine its first rank prints what is
            wrong there.

    Raises:
        SystemExit: 0 after help, 2 after violations, on every rank.
    """
    if {"--help", "-h", "--help-all"} & set(argv):
        _print_help(everything="--help-all" in argv, world=world)
    try:
        return resolve(argv, world.world_size, has_driver=cuda_driver_found())
    except FlagError as error:
        _print_violations(error.violations, world)
    sys.exit(EXIT_USAGE)


def resolve(
    argv: Sequence[str],
    world_size: int,
    *,
    has_driver: bool,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration that `argv` describes.

    Args:
        argv: the words after the program's name.
        world_size: ranks of the job.
        has_driver: whether this machine has a CUDA driver.
        overrides: values that win over all others, by flag name.

    Raises:
        FlagError: something is wrong, and all of it is named.
    """
    given, violations = _read_all(argv)
    given |= _overriding(overrides or {})
    values = {name: entry.value for name, entry in given.items()}
    on_machine = machine_violations(_with_defaults(values), has_driver=has_driver)
    return _checked(given, violations, world_size, has_driver=has_driver, on_machine=on_machine)


def planned_config(argv: Sequence[str], world_size: int, *, has_driver: bool) -> RunConfig:
    """The configuration that `argv` describes, of a run that other machines are to make.

    Args:
        argv: the words after the program's name.
        world_size: ranks of the job.
        has_driver: whether those machines have a CUDA driver.

    Raises:
        FlagError: something is wrong, and all of it is named but what only they can tell.
    """
    given, violations = _read_all(argv)
    return _checked(given, violations, world_size, has_driver=has_driver)


def saved_config(file: str, **overrides: Any) -> RunConfig:
    """The configuration of an earlier run, for one process that looks at what it left.

    Its files and folders need not be there any more.

    Args:
        file: a run's config.yaml.
        overrides: values that win over the file's, by flag name.

    Raises:
        FlagError: something is wrong, and all of it is named.
    """
    given, violations = read_file(file)
    given |= _overriding(overrides)
    return _checked(given, violations, 1, has_driver=False)


def _overriding(overrides: Mapping[str, Any]) -> dict[str, Given]:
    assert overrides.keys() <= all_flags().keys(), f"no such flags: {overrides}"
    return {name: Given(value, "this program") for name, value in overrides.items()}


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {flag.name: flag.default for flag in all_flags().values()} | dict(values)


def _checked(
    given: Mapping[str, Given],
    known: Sequence[Violation],
    world_size: int,
    *,
    has_driver: bool,
    on_machine: Iterable[Violation] = (),
) -> RunConfig:
    """Judge values wherever they come from, and build the run's dataclasses."""
    violations = list(known)
    values = _with_defaults({name: entry.value for name, entry in given.items()})
    facts = _facts(values, world_size, has_driver)
    violations += _judge(values | facts, given, violations)
    violations += on_machine
    _complete(values)
    built, core_notes = _build_sections(values, facts["device_type"], given, violations)
    if violations:
        raise FlagError(violations)
    notes = (*_notes(values | facts, given), *core_notes)
    return RunConfig(
        **built,
        world_size=world_size,
        device_type=facts["device_type"],
        flags=values,
        origins={name: entry.origin for name, entry in given.items()},
        notes=notes,
    )


def _print_help(*, everything: bool, world: World) -> NoReturn:
    if world.rank == 0:
        width = min(shutil.get_terminal_size().columns, 100)
        sys.stdout.write(help_text(everything=everything, width=width))
    sys.exit(0)


def _print_violations(violations: Sequence[Violation], world: World) -> None:
    """Once per job; what is wrong with one machine, once on it."""
    if world.rank == 0:
        shown = violations
    elif world.local_rank == 0:
        shown = [violation for violation in violations if violation.on_machine]
    else:
        shown = []
    if not shown:
        # a launcher ends the job with its first rank, so one that speaks must end before this one
        time.sleep(SECONDS_TO_SPEAK)
        return
    machine = "" if world.rank == 0 else f" on {socket.gethostname()}"
    count = f"{len(shown)} problem{'s' if len(shown) > 1 else ''}"
    lines = [f"pretrain_rl.py: {count} with the flags{machine}, nothing was started"]
    sys.stderr.write("\n  ".join((*lines, *map(str, shown))) + "\n")


def _read_all(argv: Sequence[str]) -> tuple[dict[str, Given], list[Violation]]:
    """Every value that somebody gave, the strongest one each, and what could not be read."""
    given, violations = read_command_line(argv)
    if "config" in given:
        from_file, problems = read_file(given["config"].value)
        given = from_file | given
        violations += problems
    if "hf_checkpoint" in given and given["hf_checkpoint"].value is not None:
        architecture, problems = read_architecture(given["hf_checkpoint"].value)
        violations += [*problems, *_contradictions(given, architecture)]
        given = given | {
            name: entry
            for name, entry in architecture.items()
            if name not in given or given[name].value is None
        }
    return given, violations


def _contradictions(
    given: Mapping[str, Given], architecture: Mapping[str, Given]
) -> Iterator[Violation]:
    """Flags that say something else than the Hugging Face directory."""
    for name, entry in architecture.items():
        if name in given and given[name].value not in (None, entry.value):
            spelling = all_flags()[name].spelling
            yield Violation(
                spelling,
                f"contradicts --hf-checkpoint: {written(entry.value)} ({entry.origin})",
                str(given[name]),
                f"leave {spelling} out",
            )


def _facts(values: Mapping[str, Any], world_size: int, has_driver: bool) -> dict[str, Any]:
    """What rules may ask for besides flags."""
    device = values["device"]
    auto = "cuda" if has_driver else "cpu"
    return {
        "world_size": world_size,
        "device_type": auto if device == "auto" else device,
        "has_flash_attn": find_spec("flash_attn") is not None,
        "has_transformer_engine": find_spec("transformer_engine") is not None,
    }


def _judge(
    values: Mapping[str, Any], given: Mapping[str, Given], known: Sequence[Violation]
) -> list[Violation]:
    """Missing flags, values out of range, and broken rules."""
    violations = []
    unreadable = {name for name, flag in all_flags().items() if _is_named(flag, known)}
    for name, flag in all_flags().items():
        if name in unreadable:
            continue
        if name in REQUIRED and not values[name] and values[name] != 0:
            violations.append(Violation(flag.spelling, "must be given", "nothing", REQUIRED[name]))
        elif (problem := out_of_range(name, values[name])) is not None:
            violations.append(_violation(name, problem, _range_fix(flag), given))
        else:
            continue
        unreadable.add(name)
    view = FlagView(values, frozenset(unreadable))
    for rule in (*RUN_RULES, *LOSS_RULES, *MODEL_RULES):
        if rule.is_broken(view):
            violations.append(
                _violation(rule.flag, rule.rule.format_map(view), rule.fix.format_map(view), given)
            )
    return violations


def _is_named(flag: Flag, violations: Sequence[Violation]) -> bool:
    """Whether a violation is about this flag, so that its value stands for nothing."""
    spellings = {*flag.names, *flag.off_names}
    keys = {key for key, _ in flag.keys}
    return any(v.flag in spellings or v.flag.split(": ")[-1] in keys for v in violations)


def _violation(name: str, rule: str, fix: str, given: Mapping[str, Given]) -> Violation:
    flag = all_flags()[name]
    entry = given.get(name, Given(flag.default, "default"))
    return Violation(flag.spelling, rule, str(entry), fix)


def _range_fix(flag: Flag) -> str:
    if flag.name in REQUIRED:
        return REQUIRED[flag.name]
    if flag.default is None:
        return f"give such a value, or leave {flag.spelling} out"
    return f"use {written(flag.default)}, the default, or another such value"


def _notes(values: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[str]:
    """Flags that have no effect."""
    view = FlagView(values, frozenset())
    for note in NOTES:
        if note.is_broken(view):
            yield str(_violation(note.flag, note.rule, "", given)).splitlines()[0]


def _complete(values: dict[str, Any]) -> None:
    """Fill in the flags that follow from others."""
    rollout = (values["rollout_batch_size"], values["n_samples_per_prompt"])
    steps = values["num_steps_per_rollout"]
    if values["global_batch_size"] is None and steps and None not in rollout:
        values["global_batch_size"] = rollout[0] * rollout[1] // steps
    estimator, is_policy = values["advantage_estimator"], values["loss_type"] == "policy_loss"
    if values["policy_objective"] is None and is_policy and estimator in OWN_OBJECTIVE:
        values["policy_objective"] = estimator


def _build_sections(
    values: Mapping[str, Any],
    device_type: str,
    given: Mapping[str, Given],
    violations: list[Violation],
) -> tuple[dict[str, Any], list[str]]:
    """The dataclasses of a run; what they refuse is appended to `violations`.

    megatron-core's are built only when nothing else is wrong: it reports one thing at a time, and
    usually one that is reported already.
    """
    built: dict[str, Any] = {}
    settings = core_settings(values, device_type)
    own_first = sorted(sections().items(), key=lambda item: item[1].__module__.startswith(CORE))
    notes: list[str] = []
    for section, cls in own_first:
        is_core = cls.__module__.startswith(CORE)
        if is_core and violations:
            continue
        arguments = {
            field.name: values[field.name]
            for field in fields(cls)
            if field.name in values and section in all_flags()[field.name].sections
        }
        arguments |= settings.get(section, {})
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                built[section] = cls(**arguments)
            notes += [str(warning.message) for warning in caught]
        except ConfigError as error:
            reported = {violation.flag for violation in violations}
            refused = (
                _violation(v.field, _as_flags(v.rule), _as_flags(v.fix), given)
                for v in error.violations
            )
            violations += [violation for violation in refused if violation.flag not in reported]
        except (ValueError, AssertionError, RuntimeError, ImportError) as error:
            if not is_core:
                raise
            violations.append(_core_violation(cls, error, given))
    return built, notes


def _as_flags(text: str) -> str:
    """Field names in a text as flags."""
    return re.sub(
        r"\b[a-z0-9]+(_[a-z0-9]+)+\b",
        lambda match: all_flags()[match[0]].spelling if match[0] in all_flags() else match[0],
        text,
    )


def _core_violation(cls: type, error: Exception, given: Mapping[str, Given]) -> Violation:
    """What megatron-core refuses, in its own words, under the first flag that it names."""
    message = " ".join(str(error).split())
    named = [name for name in re.findall(r"[a-zA-Z0-9_]+", message) if name in all_flags()]
    rule = f"is refused by megatron-core's {cls.__name__}: {_as_flags(message)}"
    fix = "change the flags it names; --help-all describes them"
    if not named:
        return Violation("the configuration", rule, "as resolved", fix)
    return _violation(named[0], rule, fix, given)
