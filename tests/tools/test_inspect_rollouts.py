"""Each number that is shown is the one the loss would use; filters take the rows they name."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from tools import inspect_rollouts
from tools.rollout_rows import Condition, InspectError

TRAIN = [-1.0, -0.75, -2.5]
ROLLOUT = [-1.5, -0.5, -2.0]


def rows() -> list[dict[str, Any]]:
    """Two groups: rewards 1, 0, 0 and -2, 4; only the first two rows have the trainer's numbers."""
    rewards, groups = [1.0, 0.0, 0.0, -2.0, 4.0], [7, 7, 7, 9, 9]
    found: list[dict[str, Any]] = [
        {
            "tokens": [1, 2, *range(3, 6 + i)],
            "response_length": 3 + i,
            "reward": reward,
            "group_index": group,
            "status": "truncated" if i == 3 else "completed",
        }
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]
    found[0] |= {"rollout_log_probs": ROLLOUT, "log_probs": TRAIN, "loss_mask": [1, 1, 0]}
    found[1] |= {"rollout_log_probs": [-1.0] * 4, "old_log_probs": [-1.0, -1.1, -1.0, -1.0]}
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    return file


def inspect(capsys: pytest.CaptureFixture[str], *argv: object) -> list[list[str]]:
    """The words of each line that is printed."""
    assert inspect_rollouts.main([str(word) for word in argv]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def origins(lines: list[list[str]]) -> list[int]:
    """The line numbers of the rows shown."""
    return [int(words[0].rpartition(":")[2]) for words in lines if words and ".jsonl:" in words[0]]


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert inspect_rollouts.main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


def test_shows_what_is_known_of_each_token(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect(capsys, path, "--index", 0, "--eps-clip", 0.2)
    mean = 1 / 3
    std = math.sqrt(((1 - mean) ** 2 + 2 * mean**2) / 2)
    advantage = f"{(1 - mean) / (std + 1e-6):+.4f}"
    start = lines.index(
        ["token", "at", "rollout", "train", "|diff|", "ratio", "mask", "clip", "advantage"]
    )
    clips = ["high", "-", "-"]  # A > 0: ratio e^0.5 is clipped, e^-0.25 is not; the last is masked
    for at, (train, rollout) in enumerate(zip(TRAIN, ROLLOUT, strict=True)):
        assert lines[start + 1 + at] == [
            str(3 + at),
            str(at),
            f"{rollout:.4f}",
            f"{train:.4f}",
            f"{abs(train - rollout):.4f}",
            f"{math.exp(train - rollout):.4f}",
            "01"[at < 2],
            clips[at],
            advantage if at < 2 else "+0.0000",
        ]
    facts = " ".join(lines[start - 1])
    assert "|train - rollout| mean 0.375 max 0.5, clipped 50.0%" in facts
    assert ["files", "1"] in lines
    assert lines[-1] == ["1", "of", "1", "rows", "shown"]


def test_a_low_and_a_dual_clip_bind_where_the_advantage_is_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = rows()[0] | {"log_probs": [-2.5, 0.0, -2.0], "loss_mask": [1, 1, 1], "reward": -1.0}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(rows()[1]) + "\n", encoding="utf-8")
    argv = [path, "--index", 0, "--eps-clip", 0.2, "--eps-clip-c", 1.5]
    lines = inspect(capsys, *argv)
    assert [words[7] for words in lines if len(words) == 9 and words[0] in "345"] == [
        "low",
        "dual",
        "-",
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], [1, 2, 3, 4, 5]),
        (["--where", "reward<0"], [4]),
        (["--where", "reward >= 1", "--where", "length!=3"], [5]),
        (["--where", "status!=completed"], [4]),
        (["--status", "truncated"], [4]),
        (["--group", "1"], [4, 5]),
        (["--where", "trained=2"], [1]),
        (["--where", "difference>0.2"], [1]),
        (["--where", "difference>0"], [1, 2]),
        (["--where", "advantage<0"], [2, 3, 4]),
        (["--sort", "longest"], [5, 4, 3, 2, 1]),
        (["--sort", "lowest-reward"], [4, 2, 3, 1, 5]),
        (["--sort", "difference"], [1, 2, 3, 4, 5]),
        (["--sort", "longest", "--group", "0", "--limit", "2"], [3, 2]),
    ],
)
def test_takes_the_rows_that_are_asked_for(
    path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], expected: list[int]
) -> None:
    assert origins(inspect(capsys, path, *argv)) == expected


def test_the_largest_difference_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) + "\n" for row in reversed(rows())]
    path.write_text("".join(lines), encoding="utf-8")
    assert origins(inspect(capsys, path, "--sort", "difference", "--limit", 2)) == [5, 4]


def test_says_how_many_rows_and_tokens_are_left_out(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = inspect(capsys, path, "--group", 0, "--limit", 1, "--max-tokens", 1)
    assert lines[-1] == ["1", "of", "3", "rows", "shown", "(--limit)"]
    assert ["...", "2", "more", "tokens", "(--max-tokens", "1)"] in lines


def test_reads_parquet_with_the_trainers_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows()[:1]), path)
    lines = inspect(capsys, path)
    assert [words[3] for words in lines if len(words) == 8 and words[0] in "345"] == [
        f"{value:.4f}" for value in TRAIN
    ]


def test_reads_a_slime_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.pt"
    torch.save({"rollout_id": 0, "samples": rows()}, path)
    lines = inspect(capsys, path, "--index", 0)
    assert ["3", "0", "-1.5000", "1", "+1.1547"] in lines


class TestColours:
    def test_there_are_none_in_a_pipe(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        inspect_rollouts.main([str(path)])
        assert "\x1b" not in capsys.readouterr().out

    def test_mark_the_largest_difference_and_what_is_masked(
        self, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        argv = [str(path), "--index", "0", "--view", "text", "--color", "always"]
        assert inspect_rollouts.main(argv) == 0
        red, dim = "\x1b[31m", "\x1b[2m"
        assert f"{red}3 \x1b[0m{red}4 \x1b[0m{dim}5 " in capsys.readouterr().out

    def test_no_color_wins_on_a_terminal(
        self, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        inspect_rollouts.main([str(path), "--index", "0", "--view", "text"])
        assert "\x1b[31m" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a small model and its tokenizer, whose token i is the word wi."""
    folder = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=12, **shape, **heads)).save_pretrained(folder)
    words = {f"w{i}\n": i for i in range(12)}
    Tokenizer(WordLevel(words, unk_token="w0\n")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class TestModel:
    def test_gives_its_own_log_probs_at_the_temperature(
        self, path: Path, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["--hf-checkpoint", model, "--model-log-probs", "--rollout-temperature", 0.5]
        lines = inspect(capsys, path, "--index", 1, *argv)
        start = next(at for at, words in enumerate(lines) if words[:1] == ["token"])
        shown = [dict(zip(lines[start], words, strict=True)) for words in lines[start + 1 :][:4]]
        tokens = rows()[1]["tokens"]
        with torch.no_grad():
            exact = LlamaForCausalLM.from_pretrained(model).double()
            log_probs = (exact(torch.tensor([tokens])).logits[0] / 0.5).log_softmax(1)
        for at, row in enumerate(shown, start=2):
            expected = float(log_probs[at - 1, tokens[at]])
            assert float(row["train"]) == pytest.approx(expected, abs=1e-4)
            assert float(row["|diff|"]) == pytest.approx(abs(expected + 1.0), abs=1e-4)
            assert (row["token"], row["id"]) == (f"w{tokens[at]}\\n", str(tokens[at]))

    def test_text_is_text(
        self, path: Path, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = [path, "--index", 0, "--tokenizer-model", model, "--view", "text", "--prompt"]
        lines = inspect(capsys, *argv)
        start = lines.index(["prompt", "w1"])
        assert lines[start + 1 : start + 6] == [["w2"], [], ["w3"], ["w4"], ["w5"]]

    def test_refuses_tokens_of_another_vocabulary(
        self, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "rows.jsonl"
        row = rows()[1] | {"tokens": [1, 2, 3, 4, 5, 12]}
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        message = refused(capsys, path, "--hf-checkpoint", model, "--model-log-probs")
        assert f"{path}:1: tokens must be below the model's vocab_size 12: tokens=12" in message

    def test_refuses_a_directory_without_a_model(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        message = refused(capsys, path, "--hf-checkpoint", tmp_path, "--model-log-probs")
        assert "--hf-checkpoint must hold a model that transformers reads" in message


class TestRefuses:
    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("reward", "must be FIELD OPERATOR VALUE"),
            ("__import__('os')==1", "must be FIELD OPERATOR VALUE"),
            ("colour=1", "must be FIELD OPERATOR VALUE"),
            ("reward<none", "must end in a number"),
            ("status<completed", "must name a status"),
            ("status=done", "must name a status"),
        ],
    )
    def test_what_is_no_condition(self, text: str, rule: str) -> None:
        with pytest.raises(InspectError, match=rule) as error:
            Condition.parse(text)
        assert repr(text) in str(error.value)
        assert "; fix: " in str(error.value)

    def test_a_bad_row_with_file_and_line(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write('{"tokens": [1, 2], "response_length": 2}\n')
        assert f"{path}:6: response_length" in refused(capsys, path)
        assert origins(inspect(capsys, path, "--bad-rows", "skip")) == [1, 2, 3, 4, 5]

    def test_log_probs_that_do_not_fit(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(rows()[0] | {"log_probs": [-1.0]}) + "\n", encoding="utf-8")
        message = refused(capsys, path)
        assert f"{path}:1: log_probs must be one number a response token (3): shape=[1]" in message
        message = refused(capsys, path, "--log-probs-field", "mine")
        assert f"{path}:1: mine must be one number a response token (3)" in message

    def test_an_order_that_needs_what_no_row_has(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        message = refused(capsys, path, "--group", 1, "--sort", "difference")
        assert "--sort difference needs rollout_log_probs" in message
        message = refused(capsys, path, "--where", "clipped>0")
        assert "--eps-clip" in message

    def test_an_estimator_that_lacks_its_stream(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        message = refused(capsys, path, "--advantage-estimator", "ppo")
        assert f"{path}:1: values is needed by advantage_estimator ppo" in message

    @pytest.mark.parametrize(
        "argv", [["--limit", "0"], ["--model-log-probs"], ["--eps-clip-high", "0.3"]]
    )
    def test_flags_that_cannot_be(
        self, path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            inspect_rollouts.main([str(path), *argv])
        assert f"{argv[0]} " in (message := capsys.readouterr().err)
        assert "; fix: " in message
