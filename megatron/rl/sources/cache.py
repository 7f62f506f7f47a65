"""A bounded cache of what can only be read whole: a Parquet row group, a slime dump."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

CACHE_BYTES = 512 << 20

T = TypeVar("T")


class UnitCache:
    """Keeps the units used last, up to a budget; the newest is kept even where it alone exceeds it.

    Args:
        budget: Bytes to hold.
    """

    def __init__(self, budget: int = CACHE_BYTES) -> None:
        self._budget = budget
        self._units: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, load: Callable[[], T], num_bytes: Callable[[T], int]) -> T:
        """The unit of this key, loaded if it is not held."""
        if key not in self._units:
            unit = load()
            self._units[key] = (unit, num_bytes(unit))
        self._units.move_to_end(key)
        while len(self._units) > 1 and self.num_bytes > self._budget:
            self._units.popitem(last=False)
        return self._units[key][0]

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(size for _, size in self._units.values())
