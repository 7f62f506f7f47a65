"""From what the user gave (files, globs, folders) to a list of files."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.rl.samples import RowError
from megatron.rl.sources.formats import SUFFIXES


def expand_paths(paths: Sequence[str]) -> tuple[list[str], list[RowError]]:
    """Every file once, in the order given; files of one folder or glob in natural order.

    Args:
        paths: Files, globs (`**` reaches into folders) and folders (every file below with a known
            suffix, hidden ones excepted).

    Returns:
        The files, and an error for each path that leads to none.
    """
    files: dict[str, str] = {}
    errors: list[RowError] = []
    for path in paths:
        found = list(_files_of(path))
        if not found:
            rule = f"must lead to files that end in {', '.join(SUFFIXES)}"
            errors.append(RowError(path, 0, "file", rule, "none", "check the path"))
        for file in found:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values()), errors


def _files_of(path: str) -> Iterator[str]:
    """A path that exists is itself, even with a bracket in its name; else it is a glob."""
    if Path(path).is_dir():
        below = (p for p in Path(path).rglob("*") if not p.is_dir() and _is_rows(p, Path(path)))
        yield from sorted(map(str, below), key=_natural)
    elif Path(path).exists() or not glob.has_magic(path):
        yield path
    else:
        found = glob.glob(path, recursive=True)
        yield from sorted((file for file in found if not Path(file).is_dir()), key=_natural)


def _is_rows(file: Path, folder: Path) -> bool:
    """A compressed file counts too: it is refused with advice, not overlooked."""
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return not hidden and any(suffix in SUFFIXES for suffix in file.suffixes)


def _natural(name: str) -> list[tuple[str, int]]:
    """rollout_2 before rollout_10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
