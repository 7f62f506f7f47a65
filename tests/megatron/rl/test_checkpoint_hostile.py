"""Damaged, foreign and malicious checkpoints: a named error, or the former one and a warning.

One rank loads every case in turn; the tests look at what it said.
"""

import json
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron.rl import checkpoint
from megatron.rl.checkpoint import Checkpointer, Progress
from megatron.rl.checkpoint_files import REPLACED, TRACKER, CheckpointError, find_checkpoint
from megatron.rl.checkpoint_manifest import MANIFEST, write_manifest
from megatron.rl.core_versions import SINCE_0_19
from tests.megatron.rl.running import running
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, write_rollouts
from tests.spawn import run_on_ranks

COMMON = () if SINCE_0_19 else ("common.pt",)
"""Later cores keep what is common to all ranks in the shards."""
FILES = (*COMMON, ".metadata", "metadata.json", "config.yaml", MANIFEST, "__0_0.distcp")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbled": lambda path: path.write_bytes(flipped(path.read_bytes())),
}


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


class Evil:
    """Unpickled, it makes a directory."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.proof),)


@dataclass(frozen=True)
class Case:
    """What is done to a directory with the steps 2 and 4, and what comes of it.

    Args:
        change: of the directory.
        step: that is loaded; None: the run is refused.
        says: in the warning, or in the refusal; "" for neither.
    """

    change: Callable[[Path], object]
    step: int | None
    says: str


def newest(root: Path) -> Path:
    return root / "iter_0000004"


def remarked(name: str, content: Callable[[Path], bytes]) -> Callable[[Path], None]:
    """Another content of a file of the newest checkpoint, which its manifest agrees with."""

    def change(root: Path) -> None:
        path = newest(root) / name
        path.write_bytes(content(root))
        (newest(root) / MANIFEST).unlink()
        write_manifest(newest(root), {})

    return change


def plain(tmp: Path, value: object) -> bytes:
    path = tmp / "value"
    torch.save(value, path)
    content = path.read_bytes()
    path.unlink()
    return content


def both(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def change_both(root: Path) -> None:
        for directory in root.glob("iter_*"):
            change(directory)

    return change_both


def in_manifest(value: object) -> Callable[[Path], int]:
    return lambda root: (newest(root) / MANIFEST).write_text(json.dumps(value))


def tracker(content: bytes) -> Callable[[Path], int]:
    return lambda root: (root / TRACKER).write_bytes(content)


def into_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no directory")


def into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def into_dangling_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.with_name("nowhere"))


CASES = {
    "untouched": Case(lambda _: None, 4, ""),
    **{
        f"{file} {kind}": Case(
            lambda root, file=file, damage=damage: damage(newest(root) / file),
            2,
            file if (file, kind) != (MANIFEST, "empty") else "iter_0000004",
        )
        for file in FILES
        for kind, damage in DAMAGES.items()
    },
    **{
        f"{file} missing in both": Case(
            both(lambda directory, file=file: (directory / file).unlink()),
            None,
            f"iter_0000002 is broken: {file} is missing",
        )
        for file in FILES
    },
    **{
        f"tracker {content!r}": Case(tracker(content), 4, f"{TRACKER} must hold the number")
        for content in (b"", b"abc", b"release", b"\xff\xfe", b"-4", b"4.0", b"9" * 5000, b"4 2")
    },
    "tracker back": Case(tracker(b"2"), 2, ""),
    "tracker with spaces": Case(tracker(b" 4\n"), 4, ""),
    "tracker ahead": Case(tracker(b"6"), 4, "iter_0000006 is missing"),
    "tracker gone": Case(lambda root: (root / TRACKER).unlink(), 4, ""),
    "tracker a directory": Case(
        lambda root: into_directory(root / TRACKER), 4, f"{TRACKER} cannot be read"
    ),
    "step missing": Case(lambda root: shutil.rmtree(newest(root)), 2, "iter_0000004 is missing"),
    "steps missing": Case(
        both(shutil.rmtree), None, "holds no complete checkpoint: {root}/iter_0000004 is missing"
    ),
    "step a file": Case(lambda root: into_file(newest(root)), 2, "iter_0000004 is broken"),
    "step a dangling link": Case(
        lambda root: into_dangling_link(newest(root)), 2, f"{MANIFEST} is missing"
    ),
    "file a directory": Case(
        lambda root: into_directory(newest(root) / "config.yaml"), 2, "config.yaml is missing"
    ),
    "no directory": Case(into_file, None, "{root} cannot be read: Not a directory"),
    "half replaced": Case(lambda root: newest(root).rename(f"{newest(root)}{REPLACED}"), 4, ""),
    "half written": Case(
        lambda root: newest(root).rename(f"{newest(root)}.partial-1"), 2, "iter_0000004 is missing"
    ),
    **{
        f"manifest {value!r}": Case(in_manifest(value), 2, f"{MANIFEST} must")
        for value in ([], {"common.pt": 3}, {"common.pt": [1]}, {"../x": [0, 0]}, 7, {"a": "bc"})
    },
    "manifest nested": Case(
        lambda root: (newest(root) / MANIFEST).write_text("[" * 100_000), 2, f"{MANIFEST} must"
    ),
    "evil common.pt": Case(
        remarked("common.pt", lambda root: plain(root, {"progress": Evil(proof(root))})),
        None,
        "it is a pickle, which could run code): it names posix.mkdir",
    ),
    "evil .metadata": Case(
        remarked(".metadata", lambda root: pickle.dumps(Evil(proof(root)))),
        None,
        "it is a pickle, which could run code): it names posix.mkdir",
    ),
    "plain .metadata": Case(
        remarked(".metadata", lambda _: pickle.dumps([1])), None, ".metadata must be torch's"
    ),
    "no pickle .metadata": Case(
        remarked(".metadata", lambda _: b"garbage"), None, ".metadata cannot be read"
    ),
    "no pickle common.pt": Case(
        remarked("common.pt", lambda _: b"garbage"), None, "cannot be loaded into this run"
    ),
    "no shard": Case(
        remarked("__0_0.distcp", lambda _: b"garbage"), None, "cannot be loaded into this run"
    ),
    "no version": Case(
        remarked("metadata.json", lambda _: b"{}"), None, "cannot be loaded into this run"
    ),
    "other program": Case(
        remarked("common.pt", lambda root: plain(root, {"args": 1, "iteration": 4})),
        None,
        "must be a checkpoint of this trainer: it has no architecture, contents",
    ),
    "no mapping": Case(
        remarked("common.pt", lambda root: plain(root, [1, 2])),
        None,
        "must be a checkpoint of this trainer",
    ),
}


if SINCE_0_19:
    for case_of_common in ("evil common.pt", "no pickle common.pt", "other program", "no mapping"):
        del CASES[case_of_common]


def proof(root: Path) -> Path:
    return root.with_name(f"{root.name}.ran")


@dataclass(frozen=True)
class Outcome:
    step: int | None
    refusal: str
    warnings: str
    untouched: bool


def tree(root: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(root.rglob("*"))}


@contextmanager
def warnings() -> Iterator[list[str]]:
    kept: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: kept.append(record.getMessage())
    logger = logging.getLogger("megatron.rl")
    logger.addHandler(handler)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)


def load(own: Checkpointer, root: Path) -> Outcome:
    config = replace(own.config, checkpoint=replace(own.config.checkpoint, load=str(root)))
    before, step, refusal = tree(root), None, ""
    with warnings() as kept:
        try:
            restored = replace(own, config=config).load()
            step = restored and restored.progress.step
        except CheckpointError as error:
            refusal = str(error)
    return Outcome(step, refusal, "\n".join(kept), tree(root) == before)


def outcomes(rank: int, argv: list[str], base: Path) -> dict[str, Outcome]:
    """Save two steps, and one with an evil object in a shard; load what became of copies."""
    found = {}
    with running(rank, 1, argv) as run:
        run.trainee.step(run.micro_batches())  # which gives the optimizer its state
        for step in (2, 4):
            run.checkpointer.save(Progress(step=step), {})
        for number, (name, case) in enumerate(CASES.items()):
            root = base.with_name(f"case{number}")
            shutil.copytree(base, root)
            case.change(root)
            found[name] = load(run.checkpointer, root)
        honest, checkpoint.rng_state = checkpoint.rng_state, lambda: Evil(proof(base))
        run.checkpointer.save(Progress(step=6), {})
        checkpoint.rng_state = honest
        found["evil object"] = load(run.checkpointer, base)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "base"


@pytest.fixture(scope="module")
def found(base: Path) -> dict[str, Outcome]:
    rollouts = write_rollouts(base.with_name("rollouts.jsonl"))
    argv = [*MODEL_FLAGS, *RUN_FLAGS, "--global-batch-size=4", f"--rollout-data={rollouts}"]
    [answer] = run_on_ranks(1, outcomes, [*argv, f"--save={base}"], base, timeout_s=250)
    return answer


@pytest.mark.parametrize("name", CASES)
def test_a_named_error_or_the_former_checkpoint(
    found: dict[str, Outcome], base: Path, name: str
) -> None:
    case, outcome = CASES[name], found[name]
    root = base.with_name(f"case{list(CASES).index(name)}")
    says = case.says.replace("{root}", str(root))
    assert outcome.step == case.step
    if case.step is None:
        assert says in outcome.refusal
        assert "Traceback" not in outcome.refusal
    elif says:
        assert says in outcome.warnings
    else:
        assert not outcome.warnings
    assert outcome.untouched
    assert not proof(root).exists()


def test_an_evil_object_in_a_shard_does_not_run(found: dict[str, Outcome], base: Path) -> None:
    assert "which could run code): it names posix.mkdir" in found["evil object"].refusal
    assert not proof(base).exists()


@contextmanager
def nobody() -> Iterator[None]:
    """Without the superuser's right to read everything; others never have it."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("name", ["common.pt", MANIFEST, "."])
def test_no_permission(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # which other users may enter
        root = Path(folder) / "save"
        write_two(root)
        for path in (Path(folder), root, *root.rglob("*")):
            path.chmod(0o755)
        forbidden = newest(root) / name
        forbidden.chmod(0)
        with warnings() as kept, nobody():
            chosen = find_checkpoint(root).name
        forbidden.chmod(0o755)
    assert chosen == "iter_0000002"
    assert "iter_0000004 is broken" in kept[0]
    assert "Permission denied" in kept[0]


def write_two(root: Path) -> None:
    """Steps 2 and 4 as far as the choice of one looks."""
    for step in (2, 4):
        directory = root / f"iter_{step:07d}"
        directory.mkdir(parents=True)
        (directory / "common.pt").write_text("any")
        write_manifest(directory, {})
    (root / TRACKER).write_text("4")
