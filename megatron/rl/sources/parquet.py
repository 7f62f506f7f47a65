"""Parquet: one record a row, the same columns as JSONL's fields; a place is the row number.

Rows are checked a few dozen at a time. Random access decodes a whole row group, since the format
has nothing smaller, and keeps it in the cache: write files with row groups of some thousand rows.
A few bytes can stand for any number of equal values, so the number of values is limited as well.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import Part
from megatron.rl.sources.row import (
    FIELDS,
    FIXES,
    FREE_FIX,
    MAX_ROW_ITEMS,
    BadFileError,
    Row,
    row_from_record,
)

BATCH_ROWS = 64
MAX_GROUP_VALUES = 1 << 28
"""Values of one column of a row group, which is decoded as one."""


class ParquetRows:
    """A Parquet file of rows.

    Args:
        path: The file.
        cache: Where row groups are kept.
        columns: What is read of it; it must have one of them.
    """

    def __init__(self, path: str, cache: UnitCache, columns: Sequence[str] = FIELDS) -> None:
        self._path = path
        self._cache = cache
        with _reading(), pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            num_rows = file.metadata.num_rows
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        counted = sum(group.num_rows for group in groups)
        if counted != num_rows or any(group.num_rows < 0 for group in groups):
            raise _unreadable(f"{num_rows} rows, {counted} of them in row groups")
        self._names = set(names)
        self._columns = [name for name in names if name in columns]
        for name, count in Counter(self._columns).items():
            if count > 1:
                rule = f"must have column {name} once"
                raise BadFileError(rule, f"{count} times", "keep one of them")
        if not self._columns:
            fix = f"name columns as the fields are called: {', '.join(columns[:4])}"
            raise BadFileError("must have a column that is read", "none of them", fix)
        self._starts = [0, *accumulate(group.num_rows for group in groups)]
        self._sizes = [group.total_byte_size for group in groups]

    def parts(self) -> list[Part]:
        """The row groups."""
        stops = self._starts[1:]
        parts = zip(self._starts[:-1], stops, self._sizes, strict=True)
        return [Part(start, stop, size) for start, stop, size in parts if stop > start]

    def scan(self, part: Part) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row number, record) of every row of a row group."""
        place, num_values = part.start, 0
        group = [self._group_of(part.start)]
        with _reading(), pq.ParquetFile(self._path) as file:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=group, columns=self._columns):
                num_values += max(map(_num_values, batch.columns), default=0)
                if num_values > MAX_GROUP_VALUES:
                    rule = f"must have at most {MAX_GROUP_VALUES} values of a column in a row group"
                    raise BadFileError(rule, num_values, "write it with smaller row groups")
                for record in _records(batch):
                    yield place, record
                    place += 1
        if place != part.stop:
            raise _unreadable(f"{place - part.start} of {part.stop - part.start} rows")

    def decode(self, raw: dict[str, Any]) -> Row:
        """Convert one record."""
        return row_from_record(raw)

    def read(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """The records of these rows, one row group after the other."""
        of_group = defaultdict(list)
        for place in places:
            of_group[self._group_of(place)].append(place)
        records = {}
        for group, rows in of_group.items():
            with _reading():
                taken = self._table(group).take([row - self._starts[group] for row in rows])
                records.update(zip(rows, taken.to_pylist(), strict=True))
        return [records[place] for place in places]

    def names(self) -> set[str]:
        """The names of all columns."""
        return self._names

    def _group_of(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def _table(self, group: int) -> pa.Table:
        def load() -> pa.Table:
            with pq.ParquetFile(self._path) as file:
                return file.read_row_group(group, columns=self._columns)

        return self._cache.get((self._path, group), load, lambda table: table.nbytes)


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    columns = [_values(name, batch.column(name)) for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _values(name: str, column: pa.Array) -> list[Any]:
    """A column as Python values; lists of numbers by way of numpy, which is many times faster."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if is_list:
        _check_lengths(name, column)
    if not is_list or not _is_number(column.type.value_type) or column.values.null_count:
        return _converted(name, column)
    values = column.values.to_numpy(zero_copy_only=False)
    offsets, valid = column.offsets.to_pylist(), column.is_valid().to_pylist()
    spans = zip(offsets[:-1], offsets[1:], valid, strict=True)
    return [values[start:stop].tolist() if known else None for start, stop, known in spans]


def _converted(name: str, column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        rule, fix = f"must have UTF-8 in column {name}", "write valid Unicode, or leave it out"
        raise BadFileError(rule, "other bytes", fix) from None
    except (ValueError, OverflowError):  # times that Python has no form for
        rule = f"must have values that JSON has in column {name}"
        raise BadFileError(rule, column.type, FIXES.get(name, FREE_FIX)) from None


def _check_lengths(name: str, column: pa.Array) -> None:
    longest = max(column.value_lengths().drop_null().to_pylist(), default=0)
    if longest > MAX_ROW_ITEMS:
        rule = f"must have at most {MAX_ROW_ITEMS} items a row in column {name}"
        raise BadFileError(rule, f"{longest} items", FIXES.get(name, FREE_FIX))


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _num_values(column: pa.Array) -> int:
    """Values of a list's items; the footer's own count is not asked, since damage there aborts."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return len(column.flatten()) if is_list else len(column)


@contextmanager
def _reading() -> Iterator[None]:
    """What pyarrow raises at a damaged file, of which it has many kinds, as one."""
    try:
        yield
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, OverflowError) as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception | str) -> BadFileError:
    fix = "write the file again (a writer that was stopped leaves no valid Parquet)"
    return BadFileError("must be a whole Parquet file", str(error), fix)
