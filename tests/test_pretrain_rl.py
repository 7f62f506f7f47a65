"""What the program says to flags and rollouts that cannot mean anything: all of it, and 2."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import pretrain_rl
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, rollout_rows, write_rollouts

CONTRADICTIONS = {
    "cp needs more ranks": (["--context-parallel-size=2"], "--tensor-model-parallel-size times"),
    "heads over tp": (["--tensor-model-parallel-size=3"], "--tensor-model-parallel-size"),
    "bshd packed by tokens": (
        ["--qkv-format=bshd", "--use-dynamic-batch-size", "--max-tokens-per-gpu=64"],
        "--use-dynamic-batch-size needs --qkv-format thd",
    ),
    "bshd with all-gather": (["--qkv-format=bshd", "--allgather-cp"], "--allgather-cp"),
    "dynamic without a budget": (["--use-dynamic-batch-size"], "--use-dynamic-batch-size"),
    "entropy": (["--entropy-coef=inf"], "--entropy-coef"),
    "temperature": (["--rollout-temperature=0"], "--rollout-temperature"),
    "kl coefficient without kl": (["--kl-loss-coef=0.1"], "--kl-loss-coef"),
    "one answer a prompt": (["--n-samples-per-prompt=1"], "--n-samples-per-prompt"),
    "interval without place": (["--save-interval=5"], "--save-interval"),
    "cuda without a driver": (["--device=cuda"], "--device"),
    "a function that is not there": (
        ["--loss-type=custom_loss", "--custom-loss-function-path=no_such_module:loss"],
        "--custom-loss-function-path",
    ),
    "two objectives": (
        ["--advantage-estimator=gspo", "--policy-objective=ppo"],
        "--policy-objective must be gspo",
    ),
    "two aggregations": (
        ["--calculate-per-token-loss", "--loss-aggregation=sample_mean"],
        "--loss-aggregation",
    ),
}


def change(line: int, **fields: Any) -> list[str]:
    """The tiny rollouts as lines, with some fields of one row changed; None takes one out."""
    rows = rollout_rows()
    rows[line - 1].update(fields)
    rows[line - 1] = {k: v for k, v in rows[line - 1].items() if v is not None}
    return [json.dumps(row) for row in rows]


BAD_ROLLOUTS = {
    "token beyond the vocabulary": (change(3, tokens=[1, 70000], response_length=1), 3, "tokens"),
    "response longer than the row": (change(4, response_length=500), 4, "response_length"),
    "mask of another length": (change(5, loss_mask=[1] * 99), 5, "loss_mask"),
    "mask of twos": (change(5, tokens=[1, 2], response_length=1, loss_mask=[2]), 5, "loss_mask"),
    "no reward": (change(6, reward=None), 6, "reward"),
    "no group": (change(7, group_index=None), 7, "group_index"),
    "no log-probs": (change(8, rollout_log_probs=None), 8, "rollout_log_probs"),
    "positive log-probs": (
        change(9, tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[0.5]),
        9,
        "rollout_log_probs",
    ),
    "the same index twice": (change(10, index=2), 10, "index"),
    "not JSON": ([*change(1)[:10], '{"tokens": [1, 2'], 11, ""),
    "NaN": ([change(1)[0].replace('"reward": ', '"reward": NaN, "x": ')], 1, ""),
    "negative token": (change(2, tokens=[1, -5], response_length=1), 2, "tokens"),
}


def refusal(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run the program in this process; it must end with 2, and what it said is returned."""
    monkeypatch.setattr(sys, "argv", ["pretrain_rl.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        pretrain_rl.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err


def run_flags(tmp_path: Path, rollouts: Path) -> list[str]:
    return [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        "--rollout-batch-size=2",
        f"--rollout-data={rollouts}",
        f"--tensorboard-dir={tmp_path}/tb",
    ]


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_flags_are_refused_with_the_fix(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, flag = CONTRADICTIONS[name]
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    said = refusal([*run_flags(tmp_path, rollouts), *arguments], monkeypatch, capsys)
    assert f"\n  {flag}" in said
    assert "fix:" in said
    assert "nothing was started" in said
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


@pytest.mark.parametrize("name", BAD_ROLLOUTS)
def test_a_bad_row_is_refused_with_file_line_and_field(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, line, field = BAD_ROLLOUTS[name]
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(f"{text}\n" for text in lines))
    arguments = [*run_flags(tmp_path, rollouts), "--use-rollout-logprobs", "--dry-run"]
    said = refusal(arguments, monkeypatch, capsys)
    assert f"{rollouts}:{line}: {field}" in said
    assert "rollout data has 1 error" in said
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_all_contradictions_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    arguments = ["--rollout-temperature=0", "--save-interval=5", "--kl-loss-coef=0.1"]
    said = refusal([*run_flags(tmp_path, rollouts), *arguments], monkeypatch, capsys)
    for flag in ("--rollout-temperature", "--save-interval", "--kl-loss-coef"):
        assert f"\n  {flag}" in said
