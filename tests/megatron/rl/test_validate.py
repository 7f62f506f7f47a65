import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megatron.rl import validate

ROOT = Path(__file__).parents[3]
REAL = str(ROOT / "examples/rollouts/smollm2_chain_sum.jsonl")


def bad_file(folder: Path) -> str:
    path = folder / "bad.jsonl"
    good = '{"tokens": [1, 2], "response_length": 1, "reward": 1, "group_index": 0}'
    path.write_text(f"{good}\n{good.replace('1, 2', '1, 70000')}\n\n{good[:-1]}\n")
    return str(path)


def test_good_files_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([REAL, "--vocab-size", "49152", "--use-rollout-logprobs"]) == 0
    printed = capsys.readouterr().out
    assert "samples           119 (78 completed, 41 truncated)\n" in printed
    assert "groups            15 (14 of 8, 1 of 7)\n" in printed
    assert "tokens            9,078, 3,436 of them response\n" in printed
    assert "trained tokens    3,436 (100.0% of response)\n" in printed
    assert "response length   min 2, mean 29, max 48\n" in printed
    assert "reward            min 0, mean 0.1092, max 1, std 0.3133\n" in printed
    assert "equal rewards     40.0% of groups" in printed
    assert "rollout_log_probs in 119 of 119 samples\n" in printed


def test_every_error_of_bad_files_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bad_file(tmp_path)
    assert validate.main([path, str(tmp_path / "none.jsonl"), "--vocab-size", "50000"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{tmp_path}/none.jsonl: file must be readable: file=No such file")
    assert lines[1].startswith(
        f"{path}:2: tokens[1] must be less than vocab_size=50000: tokens[1]=70000; fix: give the"
    )
    assert lines[2].startswith(f"{path}:4: line must be one whole JSON object")
    assert lines[3] == "3 error(s)"
    assert validate.main([path, "--vocab-size", "50000", "--max-errors", "1"]) == 2
    assert capsys.readouterr().out.splitlines()[1:] == ["... and 1 more", "2 error(s)"]


def test_a_file_name_may_be_any_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    assert validate.main([path]) == 2
    assert "\\udcff.jsonl: file must be readable" in capsys.readouterr().out


def test_json_is_one_object_either_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([REAL, "--json"]) == 0
    good = json.loads(capsys.readouterr().out)
    assert good["ok"] is True
    assert good["summary"]["num_samples"] == 119
    assert good["summary"]["group_sizes"] == {"7": 1, "8": 14}
    path = bad_file(tmp_path)
    assert validate.main([path, "--json", "--vocab-size", "50000"]) == 2
    bad = json.loads(capsys.readouterr().out)
    assert (bad["ok"], bad["num_errors"]) == (False, 2)
    assert bad["errors"][0] | {"fix": ""} == {
        "file": path,
        "line": 2,
        "field": "tokens[1]",
        "rule": "must be less than vocab_size=50000",
        "value": "70000",
        "fix": "",
    }


def test_what_the_rows_are_for_decides_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "response_ids": [3], "reward": {"a": 1, "b": 2}}\n')
    assert validate.main([str(path)]) == 2
    assert "reward must be a number: reward={'a': 1, 'b': 2}" in capsys.readouterr().out
    assert validate.main([str(path), "--reward-key", "b"]) == 2
    assert "group_index must be given" in capsys.readouterr().out
    assert validate.main([str(path), "--loss-type", "sft_loss"]) == 0
    assert validate.main([str(path), "--loss-type", "sft_loss", "--max-length", "2"]) == 2
    assert validate.main([str(path), "--loss-type", "sft_loss", "--use-rollout-logprobs"]) == 2


def test_help_explains_the_row_and_gives_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        validate.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for text in ("rollout_log_probs", "group_index", "example:", "exit code: 0", "--reward-key K"):
        assert text in printed
    with pytest.raises(SystemExit) as ended:
        validate.main([REAL, "--vocab-size", "0"])
    assert ended.value.code == 2


def test_it_starts_without_torch_and_ends_with_its_code(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron.rl import validate; code = validate.main(sys.argv[1:]); "
        "assert not {'torch', 'megatron.core', 'pyarrow'} & set(sys.modules); sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, REAL], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    command = [
        sys.executable,
        "-m",
        "megatron.rl.validate",
        bad_file(tmp_path),
        "--vocab-size",
        "9",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (2, "")


def test_a_terminal_sees_a_bar_while_it_waits(tmp_path: Path) -> None:
    """On a terminal long work shows a bar; the same work into a pipe shows none."""
    path = tmp_path / "long.jsonl"
    row = Path(REAL).read_text().splitlines()[0]
    path.write_text("".join(f"{row.replace('0', str(i), 1)}\n" for i in range(6000)))
    code = (
        "from megatron.rl.sources import check; check.BAR_DELAY = 0; "
        "from megatron.rl import validate; import sys; sys.exit(validate.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(path)]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert run.returncode == 0
    assert b"checking rollouts" in os.read(ours, 1 << 16)
    os.close(ours)
    run = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")
