from collections.abc import Callable
from enum import Enum
from typing import List, Literal, Optional, Tuple, Union  # noqa: UP035 -- as megatron-core writes

import pytest
import torch

from megatron.rl.flags.values import ValueType, written


class Backend(Enum):
    flash = 1
    auto = 5


@pytest.mark.parametrize(
    ("annotation", "word", "value"),
    [
        (int, "12", 12),
        (float, "1e-6", 1e-6),
        (float, 1, 1.0),
        (str, "a b", "a b"),
        (int | None, "3", 3),
        (Optional[float], "0.5", 0.5),  # noqa: UP045
        (int | None, None, None),
        (int | None, "null", None),
        (str | None, "null", None),
        (str, "null", "null"),
        (Literal["thd", "bshd"], "bshd", "bshd"),
        (Optional[Literal["fp32", "fp64"]], None, None),  # noqa: UP045
        (Backend, "flash", Backend.flash),
        (Backend | None, "auto", Backend.auto),
        (torch.dtype, "bf16", torch.bfloat16),
        (tuple[str, ...], ["a", "b"], ("a", "b")),
        (tuple[str, ...], "a", ("a",)),
        (tuple[str, ...], ["null"], ()),
        (Optional[List[str]], ["null"], None),  # noqa: UP006, UP045
        (Optional[List[str]], ["a"], ["a"]),  # noqa: UP006, UP045
        (Optional[Tuple[int, int]], ["1", "2"], (1, 2)),  # noqa: UP006, UP045
        (Union[int, List[int]], "2", 2),  # noqa: UP006, UP007
        (Union[int, List[int]], ["1", "0"], [1, 0]),  # noqa: UP006, UP007
        (Union[str, list, Callable, None], "E|t|L", "E|t|L"),  # noqa: UP007
    ],
)
def test_reads_what_the_annotation_allows(annotation: object, word: object, value: object) -> None:
    value_type = ValueType.of(annotation)
    assert value_type is not None
    read = value_type.read(word)
    assert read == value
    assert type(read) is type(value)
    assert value_type.read(written(value)) == value


@pytest.mark.parametrize(
    ("annotation", "word", "rule"),
    [
        (int, "x", "must be an integer"),
        (int, "1.5", "must be an integer"),
        (int, True, "must be an integer"),
        (int, None, "must be an integer"),
        (float | None, "fast", "must be a number"),
        (str, 3, "must be text"),
        (Literal["thd", "bshd"], "bsh", "must be one of thd, bshd"),
        (Backend, "Flash", "must be one of flash, auto"),
        (torch.dtype, "float32", "must be one of fp32, bf16, fp16, fp8"),
        (Tuple[int, int], ["1"], "must be 2 values"),  # noqa: UP006
        (Union[int, List[int]], "a", "must be an integer or a list"),  # noqa: UP006, UP007
    ],
)
def test_refuses_anything_else(annotation: object, word: object, rule: str) -> None:
    value_type = ValueType.of(annotation)
    assert value_type is not None
    with pytest.raises(ValueError, match=rule):
        value_type.read(word)


@pytest.mark.parametrize(
    "annotation",
    [Callable, Optional[Callable], Backend.__class__, None, list],  # noqa: UP045
)
def test_a_type_that_words_cannot_express_is_no_flag(annotation: object) -> None:
    assert ValueType.of(annotation) is None
