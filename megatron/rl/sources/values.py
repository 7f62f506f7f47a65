"""Values of any origin as Python's own and as text, in bounded time and memory.

What is read may refer to itself, share one list a million times, or be nested deeper than Python
follows; showing it must not be what ends a run.
"""

import io
import itertools
import json
import reprlib
from typing import Any

from megatron.rl.samples import printable

MAX_TEXT_CHARS = 1 << 20
"""A free field that is no text is kept up to here; it is shown, never trained."""
MAX_ITEMS_SHOWN = 30
MAX_LEVELS_SHOWN = 3


def shown(value: object, limit: int = 80) -> str:
    """`value` as an error shows it: printable, at most `limit` characters."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    text = printable(text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def free_text(value: object, limit: int = MAX_TEXT_CHARS) -> str:
    """What a free field holds, as text: itself, or JSON that ends soon after `limit` characters.

    What JSON has no form for is shown in short.
    """
    if isinstance(value, str):
        return value
    text = io.StringIO()
    try:
        for piece in _ENCODER.iterencode(value):
            text.write(piece)
            if text.tell() > limit:
                break
    except (TypeError, ValueError, RecursionError):
        return shown(value)
    return text.getvalue()


def plain(value: Any) -> Any:
    """Tensors, arrays and numpy numbers as Python's own; everything else as it is.

    Raises:
        RuntimeError: A tensor holds no numbers: sparse, quantized, or of a device without memory.
    """
    if isinstance(value, list) and value and hasattr(value[0], "tolist"):
        return [item.tolist() if _is_number(item) else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def size_of(value: Any) -> int:
    """How many items a value has, its rows' items included where it is a tensor or an array."""
    if hasattr(value, "numel"):
        return value.numel()
    if hasattr(value, "tolist"):
        return value.size
    return len(value) if isinstance(value, list | tuple | set | frozenset) else 1


def _is_number(value: Any) -> bool:
    return hasattr(value, "tolist") and value.ndim == 0


class _Short(reprlib.Repr):
    """`repr`, but of the first items of the first levels only, since lists may be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = MAX_LEVELS_SHOWN
        self.maxlist = self.maxtuple = self.maxdict = MAX_ITEMS_SHOWN
        self.maxset = self.maxfrozenset = MAX_ITEMS_SHOWN
        self.maxstring = self.maxlong = self.maxother = 120

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """The items in the dict's own order."""
        if level <= 0:
            return "{...}"
        items = itertools.islice(x.items(), self.maxdict)
        pieces = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in items]
        more = ["..."] if len(x) > self.maxdict else []
        return f"{{{', '.join(pieces + more)}}}"


_SHORT = _Short()
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
