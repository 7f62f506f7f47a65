"""The folder in which a run notes its rollouts, so that each is made once and trained once.

`rollout_0000012.json` names the files and rows of rollout 12. It appears by a rename when the
rollout is complete, and never changes. A run that is resumed finds what it had been given, whether
a checkpoint knew of it or not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True)
class Entry:
    """One rollout.

    Args:
        files: where its rows are; a path that is not absolute counts from the spool's folder.
        cursor: where the next rollout goes on; its maker knows how to read it.
        scalars: what is worth a curve beyond the rows themselves, by TensorBoard name.
        fingerprint: of the rows, as `RolloutFiles.fingerprint`.
    """

    files: tuple[str, ...]
    cursor: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str = ""


class SpoolError(Exception):
    """The folder does not hold what this run needs of it."""


class Spool:
    """Entries by rollout number; one rank alone writes and reads them.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, identity: Mapping[str, object]) -> None:
        """Make the folder, or check that it is this run's.

        Args:
            identity: what the rollouts of this run depend on; JSON.

        Raises:
            SpoolError: It holds rollouts of a run with other flags or prompts.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "identity.json"
        if not path.exists():
            self._write(path, json.dumps(identity, indent=1).encode())
            return
        found, wanted = json.loads(path.read_bytes()), json.loads(json.dumps(identity))
        differences = [
            f"{name} is {wanted.get(name)}, was {found.get(name)}"
            for name in sorted(found.keys() | wanted.keys())
            if wanted.get(name) != found.get(name)
        ]
        if differences:
            raise SpoolError(
                f"{self.folder} holds the rollouts of another run: {'; '.join(differences)}; fix: "
                "go on with the flags of that run, or give another --rollout-dir"
            )

    def get(self, k: int) -> Entry | None:
        """The entry of rollout k; None where it is not complete.

        Raises:
            SpoolError: The entry cannot be read.
        """
        path = self._path(k)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Entry)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise SpoolError(
                f"{path} must name the files of a rollout: {error}; fix: remove it, and the "
                "rollout is made again"
            ) from error

    def put(self, k: int, entry: Entry) -> None:
        """Note rollout k, whose files are complete."""
        self._write(self._path(k), msgspec.json.encode(asdict(entry)))

    def write_rows(self, k: int, rows: Iterable[Mapping[str, Any]]) -> str:
        """Write rows as the file of rollout k; its name, for an entry."""
        name = f"rollout_{k:07d}.jsonl"
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        self._write(self.folder / name, lines)
        return name

    def paths(self, entry: Entry) -> Sequence[str]:
        """The files of an entry."""
        return [str(self.folder / file) for file in entry.files]

    def _path(self, k: int) -> Path:
        return self.folder / f"rollout_{k:07d}.json"

    def _write(self, path: Path, content: bytes) -> None:
        """All of it or none, whenever the process dies."""
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
