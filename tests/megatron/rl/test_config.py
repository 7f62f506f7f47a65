from pathlib import Path

import pytest

from megatron.rl.derived import padded_vocab_size, row_multiple
from tests.megatron.rl.flags.command_line import resolved


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tensor_parallel", "padded"),
    [
        (1000, 128, 1, 1024),
        (1024, 128, 1, 1024),
        (1025, 128, 1, 1152),
        (49152, 128, 3, 49152),
        (49153, 128, 3, 49536),
        (7, 1, 2, 8),
    ],
)
def test_the_padded_vocabulary(
    vocab_size: int, divisible_by: int, tensor_parallel: int, padded: int
) -> None:
    assert padded_vocab_size(vocab_size, divisible_by, tensor_parallel) == padded


def test_the_layout_of_a_plain_run(tmp_path: Path) -> None:
    layout = resolved(tmp_path).layout
    assert (layout.world_size, layout.data_parallel, layout.virtual_pipeline) == (1, 1, 1)
    assert (layout.vocab_size, layout.padded_vocab_size) == (1000, 1024)
    assert layout.samples_per_rollout is None
    assert layout.samples_per_step is None
    assert layout.steps_per_rollout == 1
    assert layout.micro_batches_per_rank is None
    assert layout.row_multiple == 1


def test_ranks_are_divided_over_all_kinds_of_parallelism(tmp_path: Path) -> None:
    flags = (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--context-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
    )
    layout = resolved(tmp_path, flags, 24).layout
    assert layout.data_parallel == 3
    assert (layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel) == (2, 2, 2)
    assert layout.virtual_pipeline == 2
    assert layout.padded_vocab_size == 1024
    assert layout.row_multiple == 2
    assert "24 = dp 3 x pp 2 x cp 2 x tp 2, 2 model chunks a stage" in layout.describe()


@pytest.mark.parametrize(
    ("flags", "rollout", "step", "steps", "micro_batches"),
    [
        ("--rollout-batch-size 8 --n-samples-per-prompt 4", 32, 32, 1, 16),
        ("--rollout-batch-size 8 --n-samples-per-prompt 4 --num-steps-per-rollout 4", 32, 8, 4, 4),
        ("--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 12", 32, 12, 3, 6),
        ("--global-batch-size 12 --micro-batch-size 4", None, 12, None, 2),
        ("--rollout-batch-size 8", None, None, 1, None),
        ("--rollout-batch-size 8 --num-steps-per-rollout 3", None, None, 3, None),
        ("--global-batch-size 12 --num-steps-per-rollout 3", None, 12, None, 6),
    ],
)
def test_batches_follow_from_what_is_given(
    tmp_path: Path, flags: str, rollout: int, step: int, steps: int, micro_batches: int
) -> None:
    config = resolved(tmp_path, flags, 2)
    layout = config.layout
    assert layout.samples_per_rollout == rollout
    assert layout.samples_per_step == step
    assert layout.steps_per_rollout == steps
    assert layout.micro_batches_per_rank == micro_batches
    assert config.data.global_batch_size in (step, None)


def test_steps_per_rollout_set_the_global_batch_size(tmp_path: Path) -> None:
    flags = "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-steps-per-rollout 4"
    assert resolved(tmp_path, flags).data.global_batch_size == 8


def test_dynamic_packing_bounds_tokens(tmp_path: Path) -> None:
    flags = (
        "--use-dynamic-batch-size --max-tokens-per-gpu 512 --context-parallel-size 2 "
        "--global-batch-size 16 --max-position-embeddings 300"
    )
    layout = resolved(tmp_path, flags, 2).layout
    assert layout.tokens_per_pack == 1024
    assert layout.micro_batches_per_rank is None
    assert layout.tokens_per_step == 4800
    text = layout.describe()
    assert "micro-batches per rank  as packing gives" in text
    assert "tokens per step         at most 4,800" in text
    assert "vocabulary              1,024 = 1,000 + 24 padding" in text


@pytest.mark.parametrize(
    ("fp8", "fp4", "tensor_parallel", "multiple"),
    [(None, None, 4, 4), ("hybrid", None, 4, 64), (None, "e2m1", 1, 32), ("e4m3", None, 1, 16)],
)
def test_rows_are_padded_for_kernels_and_sequence_parallelism(
    tmp_path: Path, fp8: str, fp4: str, tensor_parallel: int, multiple: int
) -> None:
    transformer = resolved(tmp_path).transformer
    transformer.fp8, transformer.fp4 = fp8, fp4
    transformer.tensor_model_parallel_size = tensor_parallel
    transformer.sequence_parallel = tensor_parallel > 1
    assert row_multiple(transformer) == multiple


def test_describe_says_what_is_not_default_and_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 7\n")
    text = resolved(tmp_path, f"--bf16 --allgather-cp --config {file}").describe()
    lines = [line.split() for line in text.splitlines()]
    assert ["bf16", "True", "command", "line"] in lines
    assert ["seed", "7", f"{file}:1"] in lines
    assert not any(line[:1] == ["log_interval"] for line in lines)
    assert "note: --allgather-cp has no effect" in text
    assert "padding" in text
