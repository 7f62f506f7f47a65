import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
import yaml

from megatron.rl import arguments
from megatron.rl.arguments import FlagError, parse_config, resolve
from megatron.rl.config import RunConfig
from megatron.rl.flags.generate import sections
from tests.megatron.rl.flags.command_line import (
    LLAMA,
    MODEL,
    hf_directory,
    resolved,
    small_run,
    violations,
)

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Process:
    """What `parse_config` asks of a World."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def test_a_command_line_becomes_dataclasses(tmp_path: Path) -> None:
    config = resolved(
        tmp_path,
        "--bf16 --swiglu --norm-epsilon 1e-6 --normalization RMSNorm --disable-bias-linear "
        "--use-distributed-optimizer --overlap-grad-reduce --clip-grad 0.5 "
        "--eps-clip-high 0.28 --advantage-estimator rloo --calculate-per-token-loss "
        "--rollout-temperature 0.7 --qkv-format bshd --lr-warmup-iters 3 --train-iters 9 "
        f"--save {tmp_path} --save-interval 2 --tensorboard-dir {tmp_path} --no-shuffle --seed 5",
    )
    assert config.transformer.layernorm_epsilon == 1e-6
    assert config.transformer.normalization == "RMSNorm"
    assert not config.transformer.add_bias_linear
    assert config.transformer.bf16
    assert config.optimizer.bf16
    assert config.optimizer.use_distributed_optimizer
    assert config.ddp.use_distributed_optimizer
    assert config.ddp.overlap_grad_reduce
    assert config.optimizer.clip_grad == 0.5
    assert config.optimizer.lr == 1e-6
    assert config.optimizer.min_lr == 0.0
    assert config.model.swiglu
    assert config.model.qkv_format == "bshd"
    assert config.loss.eps_clip_high == 0.28
    assert config.advantage.advantage_estimator == "rloo"
    assert config.aggregation.aggregation == "token_mean"
    assert config.head.rollout_temperature == 0.7
    assert (config.schedule.lr_warmup_iters, config.schedule.train_iters) == (3, 9)
    assert (config.checkpoint.save, config.checkpoint.save_interval) == (str(tmp_path), 2)
    assert config.logging.tensorboard_dir == str(tmp_path)
    assert not config.data.shuffle
    assert config.runtime.seed == 5
    assert not config.runtime.dry_run


def test_dropout_is_off_unless_asked_for(tmp_path: Path) -> None:
    transformer = resolved(tmp_path).transformer
    assert (transformer.hidden_dropout, transformer.attention_dropout) == (0.0, 0.0)
    assert resolved(tmp_path, "--hidden-dropout 0.1").transformer.hidden_dropout == 0.1


def test_dry_run_passes_through(tmp_path: Path) -> None:
    assert resolved(tmp_path, "--dry-run").runtime.dry_run


@pytest.mark.parametrize(
    ("flags", "has_driver", "device"),
    [
        ("", False, "cpu"),
        ("", True, "cuda"),
        ("--device cpu", True, "cpu"),
        ("--device cuda", True, "cuda"),
    ],
)
def test_the_device(tmp_path: Path, flags: str, has_driver: bool, device: str) -> None:
    assert resolved(tmp_path, flags, has_driver=has_driver).device_type == device


def test_no_cuda_call_while_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("CUDA was called")

    for name in ("is_available", "device_count", "current_device", "_lazy_init", "init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert parse_config(small_run(tmp_path), Process()).device_type in ("cpu", "cuda")


# ten command lines that contradict themselves: (flags, ranks, flag, its value, what to do)
CONTRADICTIONS = [
    ("--allgather-cp --qkv-format bshd", 1, "--allgather-cp", "True", "use --qkv-format thd"),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 99 --qkv-format bshd",
        1,
        "--use-dynamic-batch-size",
        "True",
        "use --qkv-format thd",
    ),
    (
        "--context-parallel-size 2 --qkv-format bshd",
        2,
        "--context-parallel-size",
        "2",
        "use --qkv-format thd",
    ),
    (
        "--tensor-model-parallel-size 3",
        2,
        "--tensor-model-parallel-size",
        "3",
        "start another number of ranks",
    ),
    ("--bf16 --fp16", 1, "--fp16", "no value", "leave it out"),
    (
        "--loss-aggregation sample_mean --calculate-per-token-loss",
        1,
        "--loss-aggregation",
        "sample_mean",
        "leave one of the two out",
    ),
    (
        "--loss-type sft_loss --use-rollout-logprobs",
        1,
        "--use-rollout-logprobs",
        "True",
        "leave --use-rollout-logprobs out",
    ),
    (
        "--n-samples-per-prompt 1",
        1,
        "--n-samples-per-prompt",
        "1",
        "use rollouts with several samples per prompt",
    ),
    ("--rollout-temperature 0", 1, "--rollout-temperature", "0.0", "use 1.0"),
    (
        "--rollout-batch-size 4 --n-samples-per-prompt 8 --num-steps-per-rollout 2 "
        "--global-batch-size 8",
        1,
        "--global-batch-size",
        "8",
        "leave --global-batch-size out",
    ),
    ("--min-lr 1e-3", 1, "--min-lr", "0.001", "lower --min-lr"),
    ("--save-interval 5", 1, "--save-interval", "5", "add --save DIR"),
    ("--load /no/such/run", 1, "--load", "/no/such/run", "check the path"),
    ("--entropy-coef inf", 1, "--entropy-coef", "inf", "use 0.0, the default"),
]


@pytest.mark.parametrize(("flags", "ranks", "flag", "value", "fix"), CONTRADICTIONS)
def test_a_contradiction_ends_with_2_and_says_flag_value_and_fix(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    flags: str,
    ranks: int,
    flag: str,
    value: str,
    fix: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(small_run(tmp_path, flags), Process(world_size=ranks))
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"  {flag} ")]
    assert f": {value}" in lines[at]
    assert lines[at + 1].startswith(f"      fix: {fix}")
    assert not torch.distributed.is_initialized()


def test_all_violations_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout_bach_size: 8\nlog_interval: often\n")
    argv = (
        f"--config {file} --lr -1 --bf16 yes --lrr 3 --num-layers x --hidden-size 64 "
        "--num-attention-heads 6 --tensor-model-parallel-size 4 --use-dynamic-batch-size "
        "--eps-clip-c 0.5 --kl-loss-coef 1 --load /no/such/run --device cuda --save-interval 2"
    ).split()
    found = violations(argv)
    assert sorted(violation.flag for violation in found) == sorted(
        [
            f"{file}:1: rollout_bach_size",
            f"{file}:2: log_interval",
            "--lr",
            "--bf16",
            "--lrr",
            "--num-layers",
            "--hidden-size",
            "--num-attention-heads",
            "--tensor-model-parallel-size",
            "--use-dynamic-batch-size",
            "--eps-clip-c",
            "--kl-loss-coef",
            "--load",
            "--device",
            "--save-interval",
            "--rollout-data",
            "--vocab-size",
        ]
    )


def test_a_flag_that_is_wrong_in_itself_is_reported_once(tmp_path: Path) -> None:
    argv = small_run(
        tmp_path, "--n-samples-per-prompt 0 --rollout-batch-size 4 --context-parallel-size x"
    )
    assert [v.flag for v in violations(argv)] == [
        "--context-parallel-size",
        "--n-samples-per-prompt",
    ]


def test_what_core_refuses_is_a_violation(tmp_path: Path) -> None:
    flags = "--recompute-granularity selective --recompute-modules everything"
    (violation,) = violations(small_run(tmp_path, flags))
    assert violation.flag == "--recompute-modules"
    assert "is refused by megatron-core's TransformerConfig" in violation.rule
    assert "everything" in violation.given
    (violation,) = violations(small_run(tmp_path, "--main-params-dtype bf16"))
    assert violation.flag == "--main-params-dtype"
    assert violation.given == "bf16 (command line)"


def test_what_core_warns_of_is_a_note(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    config = resolved(tmp_path, "--recompute-granularity selective")
    assert any("core_attn" in note for note in config.notes)
    assert len(recwarn) == 0


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 7\nlog-interval: 3\nbf16: true\nlr: 1.0\n")
    config = resolved(tmp_path, f"--config {file} --seed 8 --no-bf16")
    assert config.runtime.seed == 8
    assert config.logging.log_interval == 3
    assert not config.transformer.bf16
    assert config.optimizer.lr == 1e-6
    assert config.runtime.distributed_timeout_minutes == 10.0
    assert config.origins["seed"] == "command line"
    assert config.origins["log_interval"] == f"{file}:2"
    assert "distributed_timeout_minutes" not in config.origins


def hf_run(tmp_path: Path, flags: str = "") -> list[str]:
    return small_run(tmp_path, f"--hf-checkpoint {hf_directory(tmp_path)} {flags}", model="")


def test_a_hugging_face_directory_fills_the_architecture(tmp_path: Path) -> None:
    config = resolve(hf_run(tmp_path), 3, has_driver=False)
    assert config.transformer.num_layers == LLAMA["num_hidden_layers"]
    assert config.transformer.num_query_groups == 3
    assert config.transformer.normalization == "RMSNorm"
    assert config.transformer.activation_func is torch.nn.functional.silu
    assert config.model.vocab_size == 49152
    assert config.model.rotary_base == 100000.0
    assert config.origins["num_layers"] == str(tmp_path / "config.json")


def test_a_flag_that_repeats_the_directory_is_fine_and_one_that_contradicts_it_is_not(
    tmp_path: Path,
) -> None:
    same = "--num-layers 30 --rotary-base 100000 --swiglu --disable-bias-linear"
    assert violations(hf_run(tmp_path, same)) == []
    found = violations(hf_run(tmp_path, "--num-layers 4 --no-swiglu"))
    texts = {violation.flag: str(violation) for violation in found}
    assert texts.keys() == {"--num-layers", "--swiglu"}
    assert "30" in texts["--num-layers"]
    assert "4 (command line)" in texts["--num-layers"]
    assert "fix: leave --num-layers out" in texts["--num-layers"]


def test_null_in_a_file_leaves_the_directory_its_say(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_query_groups: null\n")
    config = resolve(hf_run(tmp_path, f"--config {file}"), 1, has_driver=False)
    assert config.transformer.num_query_groups == 3


FULL = (
    "--bf16 --swiglu --no-shuffle --disable-bias-linear --no-save-optim --attention-backend local "
    "--use-distributed-optimizer --main-params-dtype fp32 --recompute-granularity selective "
    "--recompute-modules core_attn mlp --rollout-batch-size 8 --n-samples-per-prompt 4 "
    "--num-steps-per-rollout 2 --entropy-coef -1e-3 --lr-warmup-fraction 0.1 --num-experts 4 "
    "--moe-ffn-hidden-size 32 --moe-layer-freq 0 1 1 1"
)


@pytest.mark.parametrize("flags", ["", FULL])
def test_the_resolved_configuration_gives_the_same_run_again(tmp_path: Path, flags: str) -> None:
    first = resolved(tmp_path, f"{flags} --save {tmp_path}")
    file = tmp_path / "resolved.yaml"
    file.write_text(first.to_yaml())
    again = resolve(["--config", str(file)], 1, has_driver=False)
    assert again.flags | {"config": None} == first.flags | {"config": None}
    assert again.to_yaml() == first.to_yaml()
    assert_same(again, first)


def test_the_resolved_configuration_of_a_hugging_face_model(tmp_path: Path) -> None:
    first = resolve(hf_run(tmp_path), 1, has_driver=False)
    file = tmp_path / "resolved.yaml"
    file.write_text(first.to_yaml())
    assert_same(resolve(["--config", str(file)], 1, has_driver=False), first)


def assert_same(one: RunConfig, other: RunConfig) -> None:
    for section, cls in sections().items():
        for field in fields(cls):
            values = [getattr(getattr(run, section), field.name) for run in (one, other)]
            is_made = callable(values[0]) and "init_method" in field.name
            assert is_made or values[0] == values[1] or field.name == "config", field.name
    assert one.layout == other.layout


def test_the_saved_configuration_is_plain_yaml(tmp_path: Path) -> None:
    values = yaml.safe_load(resolved(tmp_path, "--bf16 --dry-run").to_yaml())
    assert values["bf16"] is True
    assert values["attention_backend"] == "auto"
    assert values["main_params_dtype"] == "fp32"
    assert values["rollout_data"] == [str(tmp_path / "rollouts.jsonl")]
    assert not {"config", "dry_run"} & values.keys()


@pytest.mark.parametrize("word", ["--help", "-h", "--help-all"])
def test_help_ends_with_0_and_is_printed_once(capsys: pytest.CaptureFixture, word: str) -> None:
    for rank, shown in ((0, True), (1, False)):
        with pytest.raises(SystemExit) as ended:
            parse_config([word, "--nonsense"], Process(rank, rank, 2))
        assert ended.value.code == 0
        assert ("--rollout-data" in capsys.readouterr().out) == shown


@pytest.mark.parametrize(
    ("rank", "local_rank", "flags_shown"),
    [(0, 0, ["--lr", "--load"]), (1, 1, []), (8, 0, ["--load"]), (9, 1, [])],
)
def test_one_rank_speaks_and_one_on_each_machine_where_it_is_the_machine(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    local_rank: int,
    flags_shown: list[str],
) -> None:
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    argv = small_run(tmp_path, "--lr -1 --load /no/such/run")
    with pytest.raises(SystemExit) as ended:
        parse_config(argv, Process(rank, local_rank, 16))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    shown = [line.split()[0] for line in error.splitlines() if line.startswith("  --")]
    assert shown == flags_shown
    # a rank that ends first would have the launcher end the one that has something to say
    assert waited == ([] if flags_shown else [arguments.SECONDS_TO_SPEAK])


def test_an_error_holds_all_its_violations(tmp_path: Path) -> None:
    with pytest.raises(FlagError) as error:
        resolve(small_run(tmp_path, "--lr -1 --seed x"), 1, has_driver=False)
    assert {violation.flag for violation in error.value.violations} == {"--lr", "--seed"}
    assert "--lr must be > 0: -1.0 (command line)" in str(error.value)


def test_a_job_of_two_ranks_prints_once_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [*command, "pretrain_rl.py", *small_run(tmp_path, f"{MODEL} --lr -1 --no-such-flag")]
    job = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert job.returncode != 0
    assert job.stderr.count("2 problems with the flags, nothing was started") == 1
    assert job.stderr.count("--lr must be > 0: -1.0 (command line)") == 1
    assert "--no-such-flag is no flag" in job.stderr
    assert "exitcode  : 2" in job.stderr
