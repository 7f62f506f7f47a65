"""The tool says "the same" of layouts that are, and finds what a layout changes."""

import json
from pathlib import Path

import pytest
import yaml

from megatron.rl.parity import Difference
from tests.megatron.rl.objectives import HERE
from tests.megatron.rl.tiny import MODEL_FLAGS, near_uniform, rollout_rows, write_rollouts
from tools import loss_parity

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run that saves and that is in bf16."""
    folder = tmp_path_factory.mktemp("run")
    rows = near_uniform(rollout_rows(num_groups=2))
    flags = {flag.split("=")[0].strip("-"): flag.partition("=")[2] for flag in MODEL_FLAGS}
    values = {name: yaml.safe_load(text or "true") for name, text in flags.items()}
    values |= {
        "rollout-data": str(write_rollouts(folder / "rollouts.jsonl", rows)),
        "device": "cpu",
        "lr": 1e-3,
        "init-method-std": 0.2,
        "use-rollout-logprobs": True,
        "rollout-batch-size": 2,
        "bf16": True,
        "save": str(folder / "checkpoints"),
        "tensorboard-dir": str(folder / "tensorboard"),
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def run(config: Path, *words: str) -> int:
    return loss_parity.main([f"--config={config}", "--float64", "--timeout=100", *words])


def test_a_layout_that_changes_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    assert run(config, "--ranks-b=2", f"--flags-b={TP2}", f"--json={file}") == 0
    assert "the same: " in capsys.readouterr().out
    answer = json.loads(file.read_text())
    assert answer["same"] is True
    assert answer["launches"]["b"]["ranks"] == 2
    entries = {entry["name"]: entry for entry in answer["entries"]}
    assert entries["loss"]["kind"] == "scalar"
    assert entries["embedding.word_embeddings.weight"]["kind"] == "gradient"
    assert "decoder.layers.mlp.linear_fc2.weight[3]" in entries
    assert all(entry["relative"] < 1e-12 for entry in entries.values())
    assert sorted(path.name for path in config.parent.iterdir()) == ["rollouts.jsonl", "run.yaml"]


def test_a_loss_that_depends_on_the_layout(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = f"--loss-type custom_loss --custom-loss-function-path {HERE}:mean_of_own_tokens"
    words = ("--ranks-b=2", "--flags=--no-use-rollout-logprobs --micro-batch-size 4 " + loss)
    assert run(config, *words) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: " in out
    [loss_line] = [line for line in out.splitlines() if line.split()[1:2] == ["loss"]]
    assert loss_line.endswith("<- beyond the tolerance")


def test_wrong_flags_start_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--ranks-b=3", f"--flags-b={TP2}") == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "launch B is refused" in error
    assert "must divide the number of ranks, 3" in error


def test_other_samples_are_not_compared(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--flags-b=--global-batch-size 4") == 2
    assert "both launches must train the same samples" in capsys.readouterr().err


def test_a_rank_that_fails_says_why(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = f"--loss-type custom_loss --custom-loss-function-path {HERE}:failing"
    assert run(config, f"--flags=--no-use-rollout-logprobs {loss}") == 2
    error = capsys.readouterr().err
    assert "rank 0 of 1 failed (exit code 1)" in error
    assert "ZeroDivisionError: the mistake of this loss" in error


def test_a_rank_that_is_late_is_ended(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = f"--loss-type custom_loss --custom-loss-function-path {HERE}:endless"
    assert run(config, f"--flags=--no-use-rollout-logprobs {loss}", "--timeout=1") == 2
    assert "took longer than 1 s (--timeout)" in capsys.readouterr().err


def test_the_table_shows_everything_beyond_the_tolerance() -> None:
    differences = [
        Difference("absent", "gradient", 1.0, None, float("inf"), 0.0),
        Difference("copies", "gradient", 1.0, 1.0, 0.0, 1e-3),
        Difference("close", "scalar", 1.0, 1.0, 1e-12, 0.0),
    ]
    lines = loss_parity.report(differences, 1e-10, top=1).splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["absent", "copies"]
    assert all(line.endswith("<- beyond the tolerance") for line in lines[1:3])
    assert lines[-1] == "DIFFERENT: 2 of 1 scalars and 2 gradients differ by more than 1e-10"
    assert not loss_parity.is_same(differences, 1e-10)
    assert loss_parity.is_same(differences[2:], 1e-10)
    nan = Difference("nan", "scalar", 1.0, float("nan"), float("nan"), 0.0)
    assert not loss_parity.is_same([nan], 1e-10)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--flags-b=--lr 'x", "--flags-b must be words of a shell (No closing quotation): --lr 'x"),
        ("--json=/no/such/folder/x.json", "--json must be in a directory that can be written: /no"),
    ],
)
def test_what_cannot_be_used_is_told_first(
    config: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert run(config, word) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf"])
def test_a_tolerance_is_a_number(
    config: Path, capsys: pytest.CaptureFixture[str], tolerance: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(config, f"--tolerance={tolerance}")
    assert "must be finite and at least 0" in capsys.readouterr().err
