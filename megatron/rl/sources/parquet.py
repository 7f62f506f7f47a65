"""Parquet: one record a row, the same columns as JSONL's fields; a place is the row number.

Rows are checked a few hundred at a time. Random access decodes a whole row group, since the format
has nothing smaller, and keeps it in the cache: write files with row groups of some thousand rows.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.sources.cache import UnitCache
from megatron.rl.sources.formats import Part
from megatron.rl.sources.row import FIELDS, FREE_FIELDS, BadFileError, Row, row_from_record

BATCH_ROWS = 512


class ParquetRows:
    """A Parquet file of rows."""

    def __init__(self, path: str, cache: UnitCache) -> None:
        self._path = path
        self._cache = cache
        try:
            with pq.ParquetFile(path) as file:
                self._columns = [name for name in file.schema_arrow.names if name in FIELDS]
                groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(error) from None
        if not self._columns:
            raise BadFileError(
                "must have the columns of a rollout row", "none of them", f"see {FIELDS[:4]}"
            )
        self._starts = [0, *accumulate(group.num_rows for group in groups)]
        self._sizes = [group.total_byte_size for group in groups]

    def parts(self) -> list[Part]:
        """The row groups."""
        stops = self._starts[1:]
        parts = zip(self._starts[:-1], stops, self._sizes, strict=True)
        return [Part(start, stop, size) for start, stop, size in parts if stop > start]

    def scan(self, part: Part) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row number, record) of every row of a row group, without the free text."""
        columns = [name for name in self._columns if name not in FREE_FIELDS]
        place = part.start
        try:
            with pq.ParquetFile(self._path) as file:
                group = [self._group_of(part.start)]
                for batch in file.iter_batches(BATCH_ROWS, row_groups=group, columns=columns):
                    for record in _records(batch):
                        yield place, record
                        place += 1
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(error) from None

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
            taken = self._table(group).take([row - self._starts[group] for row in rows])
            records.update(zip(rows, taken.to_pylist(), strict=True))
        return [records[place] for place in places]

    def _group_of(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def _table(self, group: int) -> pa.Table:
        def load() -> pa.Table:
            try:
                with pq.ParquetFile(self._path) as file:
                    return file.read_row_group(group, columns=self._columns)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(error) from None

        return self._cache.get((self._path, group), load, lambda table: table.nbytes)


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    columns = [_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """A column as Python values; lists of numbers by way of numpy, which is many times faster."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or not pa.types.is_primitive(column.type.value_type):
        return column.to_pylist()
    if column.values.null_count:
        return column.to_pylist()
    values = column.values.to_numpy(zero_copy_only=False)
    offsets, valid = column.offsets.to_pylist(), column.is_valid().to_pylist()
    spans = zip(offsets[:-1], offsets[1:], valid, strict=True)
    return [values[start:stop].tolist() if known else None for start, stop, known in spans]


def _unreadable(error: Exception) -> BadFileError:
    fix = "write the file again (a writer that was stopped leaves no valid Parquet)"
    return BadFileError("must be a whole Parquet file", str(error), fix)
