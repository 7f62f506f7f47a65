"""The generator: dataclass fields in, command-line flags out.

Every field of every dataclass in `RunConfig` becomes a flag, unless its type cannot be written as
text or `tables.NOT_OFFERED` says why not. Dataclasses that share a field name share the flag:
the first one gives its type, default and help.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, get_args, get_type_hints

import docstring_parser

from megatron.rl.config import RunConfig, RuntimeConfig
from megatron.rl.flags.tables import (
    CHOICES,
    COMMON,
    CORE_GROUPS,
    DEFAULTS,
    GROUPS,
    MEGATRON_NAMES,
    METAVARS,
    why_not_offered,
)
from megatron.rl.flags.values import ValueType, written

OFF_PREFIXES = ("--no-", "--disable-")


@dataclass(frozen=True)
class Flag:
    """One flag of the command line, and one key of a configuration file.

    Args:
        name: the field's name.
        sections: the fields of `RunConfig` whose dataclass has a field of that name.
        type: the values it may have.
        default: its value when nobody gives one.
        names: its spellings, the one to show first; for a switch those that turn it on.
        off_names: the spellings that turn a switch off.
        help: the field's docstring as one line.
        group: the class that declares the field.
    """

    name: str
    sections: tuple[str, ...]
    type: ValueType
    default: Any
    names: tuple[str, ...]
    off_names: tuple[str, ...]
    help: str
    group: str

    @property
    def is_common(self) -> bool:
        """Whether `--help` shows it."""
        return self.group not in CORE_GROUPS or self.name in COMMON

    @cached_property
    def spelling(self) -> str:
        """How to write it: a switch by the spelling that changes its default."""
        return self.off_names[0] if self.default is True else self.names[0]

    @property
    def keys(self) -> Iterator[tuple[str, bool]]:
        """Keys of a configuration file that mean it, with whether they mean its opposite."""
        yield self.name, False
        for names, is_opposite in ((self.names, False), (self.off_names, True)):
            yield from ((name[2:].replace("-", "_"), is_opposite) for name in names)


@cache
def sections() -> Mapping[str, type]:
    """The dataclasses of `RunConfig` by the field that holds them."""
    return {
        name: annotation
        for name, annotation in get_type_hints(RunConfig).items()
        if is_dataclass(annotation)
    }


@cache
def all_flags() -> Mapping[str, Flag]:
    """Every flag by its field's name, in the order of `--help`."""
    flags: dict[str, Flag] = {}
    for section, owner in sections().items():
        for flag in _flags_of(section, owner):
            first = flags.get(flag.name, replace(flag, sections=()))
            flags[flag.name] = replace(first, sections=(*first.sections, section))
    order = {group: position for position, group in enumerate(GROUPS)}
    return dict(sorted(flags.items(), key=lambda item: order.get(item[1].group, len(order))))


@cache
def not_offered() -> Mapping[str, str]:
    """Why a field of a dataclass is no flag, by how the flag would be written."""
    fields_of = [
        (section, field.name) for section, cls in sections().items() for field in fields(cls)
    ]
    return {
        f"--{name.replace('_', '-')}": why_not_offered(f"{section}.{name}") or "the program sets it"
        for section, name in fields_of
        if name not in all_flags()
    }


def _flags_of(section: str, owner: type) -> Iterator[Flag]:
    annotations, documentation = get_type_hints(owner), documentation_of(owner)
    for field in fields(owner):
        annotation = annotations[field.name]
        if field.name in CHOICES:
            annotation = Literal[CHOICES[field.name]]
        value_type = ValueType.of(annotation)
        is_internal = field.name.startswith("_") or why_not_offered(f"{section}.{field.name}")
        if value_type is None or is_internal:
            continue
        names, off_names = _spellings(field, value_type)
        yield Flag(
            name=field.name,
            sections=(section,),
            type=value_type,
            default=_default(field),
            names=names,
            off_names=off_names,
            help=documentation.get(field.name, ""),
            group=_declaring_class(owner, field.name),
        )


def _default(field: Field) -> Any:
    if field.name in DEFAULTS:
        return DEFAULTS[field.name]
    return field.default_factory() if field.default is MISSING else field.default


def _spellings(field: Field, value_type: ValueType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Megatron-LM's names first, then the field's; a switch has names for both ways."""
    own = f"--{field.name.replace('_', '-')}"
    core_names = field.metadata.get("argparse_meta", {}).get("arg_names", ())
    theirs = (*core_names, *MEGATRON_NAMES.get(field.name, ()))
    if not value_type.is_switch:
        return _unique(*theirs, own), ()
    opposite = f"--{own[5:]}" if own.startswith("--no-") else f"--no-{own[2:]}"
    turn_off = tuple(name for name in theirs if name.startswith(OFF_PREFIXES))
    turn_on = tuple(name for name in theirs if name not in turn_off)
    return _unique(*turn_on, own), _unique(*turn_off, opposite)


def _unique(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _declaring_class(owner: type, name: str) -> str:
    declares = (cls for cls in owner.__mro__ if name in inspect.get_annotations(cls))
    return next(declares).__name__


def documentation_of(owner: type) -> dict[str, str]:
    """The strings below a dataclass's fields, inherited ones too, each as one line."""
    documentation: dict[str, str] = {}
    for cls in filter(is_dataclass, owner.__mro__):
        for parameter in docstring_parser.parse_from_object(cls).params:
            text = " ".join((parameter.description or "").split())
            documentation.setdefault(parameter.arg_name, text)
    return documentation


@cache
def reading_parser() -> argparse.ArgumentParser:
    """A parser that only sorts words by flag; what they mean is decided by `Flag.type`.

    It accepts any number of words after any flag, so that one bad flag does not hide the next.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in all_flags().values():
        parser.add_argument(
            *flag.names, *flag.off_names, dest=flag.name, nargs="*", action=_Collect, default=[]
        )
    return parser


class _Collect(argparse.Action):
    """Keep every use of a flag: the spelling and the words after it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 -- argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append, leaving the default list alone."""
        uses = [*getattr(namespace, self.dest), (option_string, values)]
        setattr(namespace, self.dest, uses)


def help_text(*, everything: bool, width: int) -> str:
    """What `--help` prints, or with `everything` what `--help-all` prints."""
    parser = argparse.ArgumentParser(
        prog="pretrain_rl.py",
        usage="torchrun [torchrun's flags] pretrain_rl.py --rollout-data PATH... --lr X [flags]",
        description=(
            "RL post-training, run the way a Megatron pretraining is run. Any flag may also stand "
            "in the YAML file of --config. Every switch has an opposite: --x and --no-x."
        ),
        epilog=None if everything else "--help-all shows every flag, in full.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=34, width=width),
        add_help=False,
        allow_abbrev=False,
    )
    groups = {}
    for flag in all_flags().values():
        if everything or flag.is_common:
            if flag.group not in groups:
                groups[flag.group] = parser.add_argument_group(GROUPS.get(flag.group, flag.group))
            _show(flag, groups[flag.group], in_full=everything)
    process = groups[RuntimeConfig.__name__]
    process.add_argument("--help", "-h", action="help", help="Show the flags in common use.")
    process.add_argument("--help-all", action="help", help="Show every flag, in full.")
    return parser.format_help()


def _show(flag: Flag, group: argparse._ArgumentGroup, *, in_full: bool) -> None:
    """Add a flag as help shows it."""
    options: dict[str, Any] = {"help": _help_line(flag, in_full=in_full), "dest": flag.name}
    if flag.type.is_switch:
        group.add_argument(flag.spelling, action="store_true", **options)
        return
    nargs = "+" if flag.type.takes_many else None
    group.add_argument(flag.spelling, metavar=_metavar(flag), nargs=nargs, **options)


def _help_line(flag: Flag, *, in_full: bool) -> str:
    """The docstring (of core's fields the first sentence), and the default of a value."""
    text = flag.help
    if flag.group in CORE_GROUPS and not in_full:
        text = re.split(r"(?<=[^. ]{2}\.) +", text)[0]
    if flag.type.is_switch:
        text = f"Turn off: {text}" if flag.default is True else text
    elif flag.default not in (None, "", [], ()):
        text += f" (default: {written(flag.default)})"
    return text.replace("%", "%%")


def _metavar(flag: Flag) -> str:
    if flag.name in METAVARS:
        return METAVARS[flag.name]
    if flag.type.choices:
        return "{" + ",".join(flag.type.choices) + "}"
    scalars = [get_args(member)[0] if get_args(member) else member for member in flag.type.members]
    return {int: "N", float: "X", str: "TEXT"}[scalars[0]]
