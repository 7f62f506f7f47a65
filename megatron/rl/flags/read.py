"""Flags as they were given: on the command line, in a YAML file, by a Hugging Face directory.

Each reader returns what it could read and a violation for what it could not; none stops early.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron.rl.flags.generate import Flag, all_flags, not_offered, reading_parser
from megatron.rl.flags.rule import Violation
from megatron.rl.flags.values import written
from megatron.rl.hf import architecture_from_hf

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Given:
    """A flag's value and where it comes from."""

    value: Any
    origin: str

    def __str__(self) -> str:
        """As a violation shows it."""
        return f"{written(self.value)} ({self.origin})"


Reading = tuple[dict[str, Given], list[Violation]]
"""Values by flag name, and what is wrong."""


def read_command_line(argv: Sequence[str]) -> Reading:
    """Read the words after the program's name."""
    namespace, unknown = reading_parser().parse_known_args(_join_negatives(argv))
    given: dict[str, Given] = {}
    violations = list(_unknown_flags(unknown))
    for name, uses in vars(namespace).items():
        flag = all_flags()[name]
        try:
            if uses:
                given[name] = Given(_value_of(flag, uses), COMMAND_LINE)
        except ValueError as error:
            words = " ".join(uses[-1][1]) or "nothing"
            violations.append(
                Violation(uses[-1][0], str(error), f"{words} ({COMMAND_LINE})", _advice(flag))
            )
    return given, violations


def _join_negatives(argv: Sequence[str]) -> list[str]:
    """`--x -1e-3` as `--x=-1e-3`: argparse takes only -1 and -0.1 for numbers."""
    words: list[str] = []
    for word in argv:
        is_number = re.fullmatch(r"-(\d+\.?\d*|\.\d+|inf|nan)(e[+-]?\d+)?", word, re.IGNORECASE)
        if is_number and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _value_of(flag: Flag, uses: list[tuple[str, list[str]]]) -> Any:
    """The value of a flag from its uses: lists grow, of anything else the last one counts."""
    spelling, words = uses[-1]
    if flag.type.is_switch:
        if words:
            raise ValueError("takes no value")
        return spelling in flag.names
    if not flag.type.takes_many:
        if len(words) != 1:
            raise ValueError("takes one value")
        return flag.type.read(words[0])
    if not flag.type.takes_one:
        words = [word for _, more in uses for word in more]
    if not words:
        raise ValueError("takes at least one value")
    if len(words) == 1 and words[0].startswith("["):
        return flag.type.read(_json_list(words[0], flag))
    return flag.type.read(words[0] if len(words) == 1 else words)


def _json_list(word: str, flag: Flag) -> list:
    try:
        return json.loads(word)
    except json.JSONDecodeError as error:
        raise ValueError(flag.type.rule) from error


def _advice(flag: Flag) -> str:
    """How a flag is written rightly."""
    if flag.type.is_switch:
        return f"write {flag.names[0]} or {flag.off_names[0]}"
    if flag.type.choices:
        return f"write {flag.spelling} {{{','.join(flag.type.choices)}}}"
    return f"write {flag.spelling} and {flag.type.rule.removeprefix('must be ')}"


def _unknown_flags(words: Sequence[str]) -> Iterator[Violation]:
    """One violation for each flag that does not exist, with the words that follow it."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    for name, *values in groups:
        spelling, _, value = name.partition("=")
        given = " ".join(filter(None, (value, *values))) or "no value"
        rule, fix = _unknown(spelling)
        yield Violation(spelling, rule, f"{given} ({COMMAND_LINE})", fix)


def _unknown(spelling: str) -> tuple[str, str]:
    """What is wrong with a name that is no flag, and the nearest flag."""
    reason = not_offered().get(spelling)
    if reason is not None:
        return f"is not offered ({reason})", "leave it out"
    near = difflib.get_close_matches(spelling, _spellings(), n=1)
    return "is no flag", f"did you mean {near[0]}?" if near else "see --help and --help-all"


@cache
def _spellings() -> list[str]:
    return [name for flag in all_flags().values() for name in (*flag.names, *flag.off_names)]


def read_file(path: str) -> Reading:
    """Read a YAML file of flags; keys are written with - or _."""
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return {}, [_unreadable(path, str(error))]
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        return {}, [_unreadable(path, "its top level is no mapping of flags to values")]
    return _read_entries(path, loader, root)


def _unreadable(path: str, problem: str) -> Violation:
    given = f"{path} ({' '.join(problem.split())})"
    return Violation(
        "--config", "must be a readable YAML file", given, "check the file", on_machine=True
    )


def _read_entries(path: str, loader: yaml.SafeLoader, root: yaml.MappingNode) -> Reading:
    given: dict[str, Given] = {}
    violations = []
    for key_node, value_node in root.value:
        key = str(loader.construct_object(key_node)).replace("-", "_")
        value = loader.construct_object(value_node, deep=True)
        origin = f"{path}:{key_node.start_mark.line + 1}"
        if key not in _file_keys():
            rule, fix = _unknown(f"--{key.replace('_', '-')}")
            violations.append(Violation(f"{origin}: {key}", rule, str(value), fix))
            continue
        flag, is_opposite = _file_keys()[key]
        try:
            if flag.name in given:
                raise ValueError(f"is given twice, here and at {given[flag.name].origin}")
            given[flag.name] = Given(_file_value(flag, value, is_opposite), origin)
        except ValueError as error:
            violations.append(Violation(f"{origin}: {key}", str(error), str(value), _advice(flag)))
    return given, violations


@cache
def _file_keys() -> Mapping[str, tuple[Flag, bool]]:
    return {
        key: (flag, is_opposite)
        for flag in all_flags().values()
        for key, is_opposite in flag.keys
        if flag.name != "config"
    }


def _file_value(flag: Flag, value: Any, is_opposite: bool) -> Any:
    """A YAML value as the flag's; a key such as `no_x` turns its switch round."""
    if flag.type.is_switch and not isinstance(value, bool):
        raise ValueError("must be true or false")
    value = flag.type.read(value)
    return not value if is_opposite else value


def read_architecture(directory: str) -> Reading:
    """Read the architecture flags that a Hugging Face directory sets."""
    try:
        fields = architecture_from_hf(Path(directory))
    except ValueError as error:
        violation = Violation(
            "--hf-checkpoint",
            "must be a directory with the config.json of a known architecture",
            f"{directory} ({error})",
            "check the path, or describe the model by flags",
            on_machine=True,
        )
        return {}, [violation]
    origin = str(Path(directory) / "config.json")
    return {name: Given(value, origin) for name, value in fields.items()}, []
