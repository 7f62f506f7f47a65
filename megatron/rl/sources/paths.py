"""From what the user gave (files, globs, folders) to a list of files."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.rl.samples import RowError
from megatron.rl.sources.formats import SUFFIXES
from megatron.rl.sources.values import shown


def expand_paths(paths: Sequence[str]) -> tuple[list[str], list[RowError]]:
    """Every file once, in the order given; files of one folder or glob in natural order.

    A link to a folder is followed where a glob names it, once, so that no loop of links is endless.

    Args:
        paths: Files, globs (`**` reaches into folders) and folders (every file below with a known
            suffix, hidden ones excepted).

    Returns:
        The files, and an error for each path that leads to none.
    """
    files: dict[str, str] = {}
    errors: list[RowError] = []
    for path in paths:
        if "\0" in path:
            rule = "must have no NUL character in its name"
            errors.append(RowError(path, 0, "file", rule, shown(path), "check the path"))
            continue
        found = list(_files_of(path))
        if not found:
            rule = f"must lead to files that end in {', '.join(SUFFIXES)}"
            errors.append(RowError(path, 0, "file", rule, "none", "check the path"))
        for file in found:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values()), errors


def _files_of(path: str) -> Iterator[str]:
    """A path that exists is itself, even with a bracket in its name; else it is a glob."""
    if os.path.isdir(path):
        yield from sorted(_files_below(path), key=natural_order)
    elif os.path.lexists(path) or not glob.has_magic(path):
        yield path
    else:
        found = (file for file in _glob(path) if not os.path.isdir(file))
        yield from sorted(set(found), key=natural_order)


def _files_below(folder: str) -> Iterator[str]:
    """The files of rows; a compressed one too: it is refused with advice, not overlooked."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in names:
            if not _is_hidden(name) and any(suffix in SUFFIXES for suffix in Path(name).suffixes):
                yield str(Path(parent, name))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _glob(pattern: str) -> Iterator[str]:
    """`glob.glob(recursive=True)`, which goes round a loop of links as often as there are ways."""
    deep = re.search(r"(?:^|(?<=/))\*\*(/|$)", pattern)
    if deep is None:
        yield from glob.glob(pattern)
        return
    above, below = pattern[: deep.start()], pattern[deep.end() :] or "*"
    for root in glob.glob(above) if above else [""]:
        for folder in _folders(root):
            yield from _glob(os.path.join(glob.escape(folder), below))


def _folders(root: str) -> Iterator[str]:
    """A folder and all below it that are not hidden, each once, whatever links lead to it."""
    seen: set[str] = set()
    for parent, folders, _ in os.walk(root or ".", followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield parent if root else parent.removeprefix(".").removeprefix("/")


def natural_order(name: str) -> list[tuple[str, int]]:
    """rollout_2 before rollout_10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
