"""The row index: what every rank must know of every row, as one numpy array.

A rank reads the rows that it trains alone; all else that a step depends on is here.
"""

import zlib

import msgspec
import numpy as np

from megatron.rl.samples import RowError, RowRules
from megatron.rl.sources.row import FIXES, STATUSES, Row
from megatron.rl.sources.rules import RESPONSE_STREAMS, num_trained_tokens_of, reward_of

PER_TOKEN = (
    "tokens",
    *RESPONSE_STREAMS,
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
ABSENT = np.iinfo(np.int64).min
"""Stands for a number the row does not give, until the whole file is known."""

ROW_DTYPE = np.dtype(
    [
        ("file", np.int32),  # position in RolloutFiles.paths
        ("place", np.int64),  # byte offset or row number
        ("line", np.int64),  # from 1, in its file
        ("index", np.int64),
        ("group", np.int64),  # dense over all files, in order of first appearance
        ("rollout", np.int64),  # likewise
        ("total_length", np.int64),
        ("response_length", np.int64),
        ("num_trained_tokens", np.int64),
        ("num_cut_tokens", np.int64),
        ("reward", np.float64),
        ("status", np.int8),  # position in STATUSES
        ("has_rollout_log_probs", np.bool_),
        ("has_values", np.bool_),
        ("weight_version", np.int64),  # -1 where the row has none
        ("checksum", np.uint32),  # of everything a row has per token
    ]
)


def entry_of(
    row: Row, rules: RowRules, *, num_cut_tokens: int, file: int, place: int, line: int
) -> tuple:
    """A checked row as one record of the index, in the order of `ROW_DTYPE`."""
    return (
        file,
        place,
        line,
        ABSENT if row.index is None else row.index,
        ABSENT if row.group_index is None else row.group_index,
        ABSENT if row.rollout_index is None else row.rollout_index,
        len(row.tokens),
        row.response_length,
        num_trained_tokens_of(row),
        num_cut_tokens,
        reward_of(row, rules),
        STATUSES.index(row.status or "completed"),
        row.rollout_log_probs is not None,
        row.values is not None,
        -1 if row.weight_version is None else row.weight_version,
        checksum_of(row),
    )


def checksum_of(row: Row) -> int:
    """What tells a row from another one of the same lengths: tokens, mask and every stream."""
    return zlib.crc32(msgspec.msgpack.encode([getattr(row, name) for name in PER_TOKEN]))


def number_rows(rows: np.ndarray) -> np.ndarray:
    """Give rows without an index their position in the file, counted from 0."""
    absent = rows["index"] == ABSENT
    numbered = rows.copy()
    numbered["index"][absent] = rows["line"][absent] - 1
    return numbered


def repeated_rows(rows: np.ndarray) -> np.ndarray:
    """For each row, the line of an earlier row of its file with the same index; 0 where none."""
    order = np.lexsort((rows["line"], rows["index"], rows["file"]))
    key = rows[["file", "index"]][order]
    same = np.concatenate([[False], key[1:] == key[:-1]])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(rows))))
    lines = np.zeros(len(rows), np.int64)
    lines[order] = np.where(same, rows["line"][order][first], 0)
    return lines


def repeated_error(path: str, row: np.void, first_line: int) -> RowError:
    """The error of a row whose index an earlier row has."""
    rule = f"must be unique in its file (line {first_line} has it)"
    return RowError(path, int(row["line"]), "index", rule, str(row["index"]), FIXES["index"])


def number_units(rows: np.ndarray) -> np.ndarray:
    """Number groups and rollouts of all files from 0; a row without one is one of its own."""
    numbered = rows.copy()
    for unit in ("group", "rollout"):
        absent = rows[unit] == ABSENT
        alone = np.where(absent, np.arange(len(rows)), -1)
        keys = np.stack([rows["file"], rows[unit], alone], axis=1)
        _, first, position = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        numbered[unit] = rank[position.reshape(-1)]
    return numbered
