"""The base of the config dataclasses: frozen, and refusing what cannot mean anything."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Violation:
    """One broken rule of one field: `str()` gives the line "field rule: field=value"."""

    field: str
    rule: str
    value: object
    fix: str

    def __str__(self) -> str:
        """The line that reports it: field, rule, value."""
        return f"{self.field} {self.rule}: {self.field}={self.value!r}"


class ConfigError(ValueError):
    """All violations of one config: one line each, and as objects in `violations`."""

    def __init__(self, violations: list[Violation]) -> None:
        """Report these violations, at least one."""
        super().__init__("\n".join(str(violation) for violation in violations))
        self.violations = violations


Rule = tuple[bool, str, str, str]
"""(does it hold, field, rule, fix)."""


SMALLEST, LARGEST = 1e-30, 1e30
"""Sizes of a number that fp32 can still divide by and multiply with."""


class CheckedConfig:
    """Base of the config dataclasses: construction raises ConfigError when any rule is broken.

    The annotations give the first rules (type, choices, numbers of a usable size); a subclass adds
    its own by overriding `rules`. A field is reported once, with the first rule it breaks.
    """

    def __post_init__(self) -> None:
        """Refuse construction when a rule is broken."""
        violations = self.violations()
        if violations:
            raise ConfigError(violations)

    def violations(self) -> list[Violation]:
        """Every broken rule, in the order of the rules.

        A value of the wrong type is reported alone: the other rules may not be able to read it.
        """
        annotations = get_type_hints(type(self))
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return self._broken(
            _annotation_rule(name, getattr(self, name), annotations[name]) for name in names
        ) or self._broken(self.rules())

    def rules(self) -> Iterator[Rule]:
        """The rules beyond the annotations; may rely on every field having its type."""
        return iter(())

    def needs(self, names: Iterable[str], holds: bool, what: str) -> Iterator[Rule]:
        """Rules that the named fields keep their defaults unless `holds`.

        Args:
            names: Fields that nothing reads unless `holds`.
            holds: Whether they mean something.
            what: What they need, as the text of the rule: "needs ...".
        """
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        for name in names:
            yield holds or getattr(self, name) == defaults[name], name, what, f"leave {name} out"

    def names_function(self, name: str) -> Rule:
        """The rule that the path of a custom function is absent or of the form module:function."""
        module, _, function = (getattr(self, name) or "module:function").partition(":")
        holds = all(part.isidentifier() for part in (*module.split("."), function))
        fix = "write the importable module, a colon, and the function"
        return holds, name, "must be module:function", fix

    def _broken(self, rules: Iterator[Rule]) -> list[Violation]:
        broken: dict[str, Violation] = {}
        for holds, field, rule, fix in rules:
            if not holds and field not in broken:
                broken[field] = Violation(field, rule, getattr(self, field), fix)
        return list(broken.values())


def _annotation_rule(name: str, value: object, annotation: object) -> Rule:
    """The rule an annotation states: a Literal, a plain type, a tuple, or one of them `| None`."""
    union = get_origin(annotation) in (Union, UnionType)
    alternatives: tuple[object, ...] = get_args(annotation) if union else (annotation,)
    kind = next(kind for kind in alternatives if kind is not NoneType)
    if value is None and NoneType in alternatives:
        return True, name, "", ""
    if get_origin(kind) is Literal:
        choices = ", ".join(str(choice) for choice in get_args(kind))
        return value in get_args(kind), name, f"must be one of {choices}", "choose one of them"
    # bool is a subclass of int, and an int may stand for a float.
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _size_rule(name, value)
    kind = get_origin(kind) or kind
    assert isinstance(kind, type), f"{name} has an annotation without a rule: {annotation}"
    fix = f"give a value of {kind.__name__}"
    return type(value) is kind, name, f"must be of type {kind.__name__}", fix


def _size_rule(name: str, value: float) -> Rule:
    """The rule of every float: beyond these sizes, sums and quotients in fp32 mean nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        return False, name, "must be finite", "give a finite number"
    rule = "must be 0 or between 1e-30 and 1e30 in size"
    return value == 0 or SMALLEST <= abs(value) <= LARGEST, name, rule, "give a usual number"
