"""Whatever a file holds, the program says file, line, field, rule, value and fix, and ends."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.rl.arguments import FlagError, resolve
from megatron.rl.config import RunConfig
from megatron.rl.data import check_data
from megatron.rl.initialize import World
from megatron.rl.logging import setup_messages
from megatron.rl.samples import RowRules
from megatron.rl.sources import ReadOptions, check_rollouts
from megatron.rl.stopping import EXIT_USAGE, exit_with_message
from tests.megatron.rl.sources.hostile_files import DUMPS, FILES, PARQUET
from tests.megatron.rl.sources.hostile_rows import MAX_LENGTH, hostile_lines, line_with
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS

ROOT = Path(__file__).parents[4]
WORLD = World(0, 0, 1, launched=False)
ERROR = re.compile(
    r"(?P<place>.+?): (?P<field>\S+) (?P<rule>.+?): (?P=field)=(?P<value>.*); fix: .+"
)


def _flags(folder: Path, rollouts: str) -> list[str]:
    return [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        "--rollout-batch-size=2",
        "--use-rollout-logprobs",
        f"--tensorboard-dir={folder}/run/tensorboard",
        f"--save={folder}/run/checkpoints",
        f"--rollout-data={rollouts}",
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run whose folders do not exist yet."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rows.jsonl").touch()
    return resolve(_flags(folder, f"{folder}/rows.jsonl"), 1, has_driver=False)


Refusal = Callable[[Path], list[str]]


@pytest.fixture
def refusal(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Check data as the program does; returns the errors it shows, nothing else being said."""

    def refused(rollouts: Path) -> list[str]:
        before = _tree(tmp_path)
        data = dataclasses.replace(config.data, rollout_data=(str(rollouts),))
        setup_messages(0)
        with pytest.raises(SystemExit) as ended, exit_with_message(WORLD):
            check_data(dataclasses.replace(config, data=data))
        assert ended.value.code == EXIT_USAGE
        assert _tree(tmp_path) == before
        assert not Path(config.checkpoint.save).parent.exists()
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        head, *errors = said.err.splitlines()
        assert head.endswith(f"rollout data has {len(errors)} error(s):")
        assert all(error.startswith("  ") and error.isprintable() for error in errors)
        return [error.strip() for error in errors]

    return refused


def _tree(folder: Path) -> list[str]:
    return sorted(os.path.join(*entry) for entry in _entries(folder))


def _entries(folder: Path) -> Iterator[tuple[str, str]]:
    for parent, folders, names in os.walk(folder):
        yield from ((parent, name) for name in (*folders, *names))


def _check(error: str, place: str, field: str) -> None:
    found = ERROR.fullmatch(error)
    assert found is not None, error
    assert found["place"] == place
    assert re.split(r"[.\[]", found["field"])[0].startswith(field)
    assert len(found["rule"]) <= 300
    assert len(found["value"]) <= 80


LINES = hostile_lines()


@pytest.mark.parametrize("name", LINES)
def test_a_hostile_line_is_a_named_error(name: str, refusal: Refusal, tmp_path: Path) -> None:
    line, field = LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line_with(index="0") + b"\r\n\n" + line + b"\n" + line_with(index="7"))
    errors = refusal(path)
    assert len(errors) == line.count(b"\n") + 1
    _check(errors[0], f"{path}:3", field)


@pytest.mark.parametrize("name", LINES)
def test_a_hostile_line_is_skipped_alone(name: str, tmp_path: Path) -> None:
    line, _ = LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line_with(index="0") + b"\n" + line + b"\n" + line_with(index="7"))
    aside = tmp_path / "aside.jsonl"
    options = ReadOptions(bad_rows="skip", bad_rows_path=str(aside))
    rules = RowRules(300, None, True, True, True, max_length=MAX_LENGTH)
    files = check_rollouts([str(path)], rules, options)
    assert [sample.index for sample in files.read(range(len(files)))] == [0, 7]
    assert aside.read_text(encoding="ascii").count("\n") == files.num_bad_rows > 0


CASES = {
    f"{kind}: {name}": case
    for kind, cases in {"file": FILES, "Parquet": PARQUET, "dump": DUMPS}.items()
    for name, case in cases.items()
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of how its files are made
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_a_named_error(name: str, refusal: Refusal, tmp_path: Path) -> None:
    write, field = CASES[name]
    path = write(tmp_path)
    error = refusal(path)[0]
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))
    line = "" if field == "file" else ":1"
    _check(error, shown + line, field)
    assert not (tmp_path / "ran").exists()


def test_there_are_hundreds_of_them() -> None:
    lines = {line for line, _ in LINES.values()}
    assert len(lines) == len(LINES)
    assert len(lines) + len(CASES) >= 400


REAL = {
    "deep": lambda folder: _write_line(folder, "a prompt of 20,000 levels"),
    "Parquet": PARQUET["prompt that is no UTF-8"][0],
    "code": DUMPS["code in a sample"][0],
}


def _write_line(folder: Path, name: str) -> Path:
    (folder / "rows.jsonl").write_bytes(LINES[name][0] + b"\n")
    return folder / "rows.jsonl"


@pytest.mark.parametrize("name", REAL)
def test_the_program_ends_with_the_error(name: str, tmp_path: Path) -> None:
    path = REAL[name](tmp_path)
    last = _program_refuses(path, tmp_path).splitlines()[-1]
    assert ERROR.fullmatch(last.strip())


UNUSABLE = ("a pipe", "a pattern through links that loop", "a name that is too long")


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_path_to_no_file_is_a_named_flag(name: str, tmp_path: Path) -> None:
    path = FILES[name][0](tmp_path)
    with pytest.raises(FlagError) as caught:
        resolve(_flags(tmp_path, str(path)), 1, has_driver=False)
    assert str(caught.value).startswith("--rollout-data must ")
    assert "fix: check the path" in str(caught.value)


def _program_refuses(path: Path, tmp_path: Path) -> str:
    """Run the program as a user does; what it says."""
    before = _tree(tmp_path)
    command = [sys.executable, ROOT / "pretrain_rl.py", *_flags(tmp_path, str(path))]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == EXIT_USAGE, done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.isprintable() for line in done.stderr.splitlines())
    assert _tree(tmp_path) == before
    return done.stderr
