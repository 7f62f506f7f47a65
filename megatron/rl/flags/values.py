"""What a flag's value may be: from a field's annotation to text, from text to a value, and back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,  # how megatron-core names an fp8 optimizer state
}


@dataclass(frozen=True)
class ValueType:
    """The values of one field.

    Args:
        annotation: the field's type.
        plain: the same type with enums and dtypes by name, as text and YAML can hold it.
    """

    annotation: Any
    plain: Any

    @classmethod
    def of(cls, annotation: Any) -> ValueType | None:
        """The values that `annotation` allows; None if text cannot express any."""
        plain = _plain(annotation)
        return None if plain in (None, NoneType) else cls(annotation, plain)

    @cached_property
    def members(self) -> tuple[Any, ...]:
        """The alternatives, None left out."""
        return tuple(t for t in _alternatives(self.plain) if t is not NoneType)

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return self.members == (bool,)

    @property
    def takes_many(self) -> bool:
        """Whether several words make one value."""
        return any(get_origin(member) in (list, tuple) for member in self.members)

    @property
    def takes_one(self) -> bool:
        """Whether one word makes a value."""
        return any(get_origin(member) not in (list, tuple) for member in self.members)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words allowed, where only some are."""
        return tuple(
            str(word)
            for member in self.members
            if get_origin(member) is Literal
            for word in get_args(member)
        )

    @property
    def rule(self) -> str:
        """What a value must be, in words."""
        return f"must be {' or '.join(map(_in_words, self.members))}"

    def read(self, value: Any) -> Any:
        """The value of this type that a word, a list of words or a YAML value stands for.

        Raises:
            ValueError: there is none.
        """
        if value in ("null", ["null"]):  # types that hold text would take the word as such
            if NoneType in _alternatives(self.plain):
                return None
            if self.takes_many and not self.takes_one:
                value = []
        if self.takes_many and not self.takes_one and isinstance(value, str):
            value = [value]
        try:
            plain = msgspec.convert(value, self.plain, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(self.rule) from error
        return self._restore(plain)

    def _restore(self, plain: Any) -> Any:
        """An enum member or dtype from its name; anything else is as it should be."""
        for alternative in _alternatives(self.annotation):
            if isinstance(plain, str) and _is_enum(alternative):
                return alternative[plain]
            if isinstance(plain, str) and alternative is torch.dtype:
                return DTYPES[plain]
        return plain


def written(value: Any) -> Any:
    """A flag's value as YAML holds it; `ValueType.read` gives the value back."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return next(name for name, dtype in DTYPES.items() if dtype is value)
    if isinstance(value, tuple):
        return list(value)
    return value


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _plain(annotation: Any) -> Any:
    """`annotation` in terms of words and numbers; None if nothing of it remains."""
    origin = get_origin(annotation)
    if annotation in (bool, int, float, str, NoneType) or origin is Literal:
        return annotation
    if annotation is torch.dtype:
        return Literal[tuple(DTYPES)]
    if _is_enum(annotation):
        return Literal[tuple(annotation.__members__)]
    if origin in (Union, UnionType):
        parts = [part for part in map(_plain, get_args(annotation)) if part is not None]
        return Union[tuple(parts)] if parts else None  # noqa: UP007 -- built from a list
    if origin in (list, tuple):
        items = [_plain(item) for item in get_args(annotation) if item is not Ellipsis]
        return annotation if items and None not in items else None
    return None


def _in_words(member: Any) -> str:
    origin, arguments = get_origin(member), get_args(member)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple and Ellipsis not in arguments:
        return f"{len(arguments)} values"
    if origin in (list, tuple):
        return "a list"
    return {bool: "on or off", int: "an integer", float: "a number", str: "text"}[member]
