from pathlib import Path

import pytest

from megatron.rl.flags.read import Reading, read_architecture, read_command_line, read_file
from tests.megatron.rl.flags.command_line import LLAMA, hf_directory


def read(words: str) -> Reading:
    return read_command_line(words.split())


def test_negative_numbers_are_values() -> None:
    given, violations = read(
        "--entropy-coef -1e-3 --min-lr -0.5 --kl-loss-coef -inf --train-iters -1"
    )
    values = {name: entry.value for name, entry in given.items()}
    assert values == {
        "entropy_coef": -1e-3,
        "min_lr": -0.5,
        "kl_loss_coef": float("-inf"),
        "train_iters": -1,
    }
    assert violations == []


def test_the_last_use_counts_and_lists_grow() -> None:
    given, _ = read("--lr 1 --lr=2 --bf16 --no-bf16 --rollout-data a b --rollout-data c")
    assert given["lr"].value == 2.0
    assert given["bf16"].value is False
    assert given["rollout_data"].value == ("a", "b", "c")


def test_one_word_or_a_list() -> None:
    def value(*words: str) -> object:
        return read_command_line(["--moe-layer-freq", *words])[0]["moe_layer_freq"].value

    assert value("2") == 2
    assert value("0", "1") == [0, 1]
    assert value("[0,1,1]") == [0, 1, 1]


@pytest.mark.parametrize(
    ("words", "flag", "rule", "given", "fix"),
    [
        ("--lr fast", "--lr", "must be a number", "fast", "write --lr and a number"),
        ("--lr", "--lr", "takes one value", "nothing", "write --lr and a number"),
        ("--lr 1 2", "--lr", "takes one value", "1 2", "write --lr and a number"),
        ("--bf16 true", "--bf16", "takes no value", "true", "write --bf16 or --no-bf16"),
        ("--swiglu=1", "--swiglu", "takes no value", "1", "write --swiglu or --no-swiglu"),
        ("--rollout-data", "--rollout-data", "takes at least one value", "nothing", "a list"),
        ("--moe-layer-freq [1,", "--moe-layer-freq", "must be an integer or a list", "[1,", "list"),
        ("--qkv-format bsh", "--qkv-format", "must be one of thd, bshd", "bsh", "{thd,bshd}"),
        ("--optimizer muon", "--optimizer", "must be one of adam, sgd", "muon", "{adam,sgd}"),
        ("--lr-dekay-style x", "--lr-dekay-style", "is no flag", "x", "--lr-decay-style?"),
        ("--lr-dec 3", "--lr-dec", "is no flag", "3", "?"),
        ("--discount=0.9", "--discount", "is no flag", "0.9", ""),
        ("--fp16", "--fp16", "is not offered (fp16 needs", "no value", "leave it out"),
        ("--mtp-num-layers 1", "--mtp-num-layers", "the RL head replaces", "1", "leave it out"),
        ("stray --lr 1", "stray", "is no flag", "no value", "--help"),
    ],
)
def test_a_wrong_word_is_a_violation(
    words: str, flag: str, rule: str, given: str, fix: str
) -> None:
    _, (violation,) = read(words)
    assert violation.flag == flag
    assert rule in violation.rule
    assert violation.given == f"{given} (command line)"
    assert fix in violation.fix


def test_one_bad_word_does_not_hide_the_next() -> None:
    given, violations = read("--nope 1 2 --lr x --seed 3 --what --bf16 yes --num-layers 4.5")
    assert {violation.flag for violation in violations} == {
        "--nope",
        "--what",
        "--lr",
        "--bf16",
        "--num-layers",
    }
    assert given.keys() == {"seed"}


def write(directory: Path, text: str) -> str:
    file = directory / "run.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_takes_both_spellings_and_megatrons_names(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """\
        lr: 1e-6            # text in YAML 1.1
        min-lr: 0
        norm_epsilon: 1e-5
        num-experts: 8
        no-shuffle: true
        disable_bias_linear: true
        no_load_optim: true
        load-rng: true
        rollout_data: one.jsonl
        attention_backend: flash
        main_params_dtype: bf16
        moe_layer_freq: [0, 1]
        kv_channels: null
        """,
    )
    given, violations = read_file(file)
    assert violations == []
    assert {name: entry.value for name, entry in given.items()} == {
        "lr": 1e-6,
        "min_lr": 0.0,
        "layernorm_epsilon": 1e-5,
        "num_moe_experts": 8,
        "shuffle": False,
        "add_bias_linear": False,
        "no_load_optim": True,
        "no_load_rng": False,
        "rollout_data": ("one.jsonl",),
        "attention_backend": given["attention_backend"].value,
        "main_params_dtype": given["main_params_dtype"].value,
        "moe_layer_freq": [0, 1],
        "kv_channels": None,
    }
    assert given["attention_backend"].value.name == "flash"
    assert str(given["main_params_dtype"].value) == "torch.bfloat16"
    assert given["min_lr"].origin == f"{file}:2"


@pytest.mark.parametrize(
    ("line", "rule", "fix"),
    [
        ("rollout_bach_size: 8", "is no flag", "did you mean --rollout-batch-size?"),
        ("fp16: true", "is not offered (fp16", "leave it out"),
        ("lr: fast", "must be a number", "write --lr"),
        ("lr: [1, 2]", "must be a number", "write --lr"),
        ("lr: {a: 1}", "must be a number", "write --lr"),
        ("bf16: 1", "must be true or false", "write --bf16 or --no-bf16"),
        ("no_bf16: maybe", "must be true or false", "write --bf16 or --no-bf16"),
        ("seed: true", "must be an integer", "write --seed"),
        ("qkv-format: bsh", "must be one of thd, bshd", "{thd,bshd}"),
        ("config: other.yaml", "is no flag", ""),
        ("3: 4", "is no flag", ""),
    ],
)
def test_a_bad_line_of_a_file_names_file_line_key_and_fix(
    tmp_path: Path, line: str, rule: str, fix: str
) -> None:
    file = write(tmp_path, f"log_interval: 2\n{line}\n")
    given, (violation,) = read_file(file)
    assert given.keys() == {"log_interval"}
    assert violation.flag.startswith(f"{file}:2: ")
    assert violation.flag.endswith(line.split(":")[0].replace("-", "_"))
    assert rule in violation.rule
    assert fix in violation.fix


@pytest.mark.parametrize("second", ["swiglu: false", "no-swiglu: true", "swiglu: true"])
def test_a_flag_twice_in_a_file_is_a_violation(tmp_path: Path, second: str) -> None:
    file = write(tmp_path, f"swiglu: true\n{second}\n")
    _, (violation,) = read_file(file)
    assert violation.rule == f"is given twice, here and at {file}:1"


@pytest.mark.parametrize("text", ["- 1\n", "just words", "a: [", "\tlr: 1"])
def test_a_file_that_is_no_mapping_is_a_violation(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    given, (violation,) = read_file(file)
    assert given == {}
    assert violation.flag == "--config"
    assert file in violation.given


def test_a_missing_or_empty_file(tmp_path: Path) -> None:
    (violation,) = read_file(str(tmp_path / "missing.yaml"))[1]
    assert "No such file" in violation.given
    assert read_file(write(tmp_path, "# nothing\n")) == ({}, [])


def test_a_hugging_face_directory_gives_its_architecture(tmp_path: Path) -> None:
    given, violations = read_architecture(hf_directory(tmp_path))
    assert violations == []
    assert given["num_layers"].value == LLAMA["num_hidden_layers"]
    assert given["rotary_base"].value == LLAMA["rope_theta"]
    assert given["num_layers"].origin == str(tmp_path / "config.json")


def test_a_directory_that_holds_no_known_model_is_a_violation(tmp_path: Path) -> None:
    given, (violation,) = read_architecture(str(tmp_path))
    assert given == {}
    assert violation.flag == "--hf-checkpoint"
    assert str(tmp_path) in violation.given
    assert violation.on_machine
