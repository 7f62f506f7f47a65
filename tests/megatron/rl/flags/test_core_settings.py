from pathlib import Path

import pytest
import torch
from megatron.core.activations import squared_relu
from torch.nn import functional as F

from megatron.rl.flags import core_settings as module
from megatron.rl.flags.core_settings import core_settings
from megatron.rl.flags.generate import all_flags, sections
from tests.megatron.rl.flags.command_line import resolved


def settings(device_type: str = "cpu", **flags: object) -> dict[str, dict]:
    defaults = {flag.name: flag.default for flag in all_flags().values()}
    return core_settings(defaults | flags, device_type)


def test_they_name_fields_of_core() -> None:
    for section, values in settings().items():
        fields = sections()[section].__dataclass_fields__
        assert set(values) <= set(fields)


@pytest.mark.parametrize(("flags", "dtype"), [("", torch.float32), ("--bf16", torch.bfloat16)])
def test_precision_follows_from_bf16(tmp_path: Path, flags: str, dtype: torch.dtype) -> None:
    config = resolved(tmp_path, flags)
    assert config.transformer.params_dtype is dtype
    assert config.transformer.pipeline_dtype is dtype
    assert config.optimizer.params_dtype is dtype
    assert config.transformer.bf16 == config.optimizer.bf16 == bool(flags)
    assert config.ddp.grad_reduce_in_fp32 == bool(flags)


def test_the_loss_is_a_sum_and_the_step_looks_at_the_gradient(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert config.transformer.calculate_per_token_loss
    assert not config.aggregation.calculate_per_token_loss
    assert not config.ddp.check_for_nan_in_grad
    assert not config.ddp.average_in_collective


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        ("", 1, (False, False, True)),
        ("--pipeline-model-parallel-size 2", 2, (True, False, True)),
        (
            "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
            2,
            (True, True, False),
        ),
    ],
)
def test_stages_exchange_shapes_and_interleaved_ones_do_not_batch(
    tmp_path: Path, flags: str, ranks: int, expected: tuple
) -> None:
    transformer = resolved(tmp_path, flags, ranks).transformer
    exchange = (
        transformer.variable_seq_lengths,
        transformer.overlap_p2p_comm,
        transformer.batch_p2p_comm,
    )
    assert exchange == expected


@pytest.mark.parametrize(
    ("flags", "function", "gated"),
    [("", F.gelu, False), ("--swiglu", F.silu, True), ("--squared-relu", squared_relu, False)],
)
def test_the_activation(tmp_path: Path, flags: str, function: object, gated: bool) -> None:
    transformer = resolved(tmp_path, flags).transformer
    assert transformer.activation_func is function
    assert transformer.gated_linear_unit is gated


FUSIONS = ("bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")


def test_nothing_is_fused_on_a_cpu() -> None:
    of_transformer = settings("cpu", swiglu=True)["transformer"]
    assert not any(of_transformer[name] for name in FUSIONS)
    assert of_transformer["use_cpu_initialization"]
    assert of_transformer["transformer_impl"] == "local"


def test_a_gpu_fuses_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformer_engine", "fused_weight_gradient_mlp_cuda"}
    monkeypatch.setattr(module, "find_spec", lambda name: name in installed or None)
    of_transformer = settings("cuda", swiglu=True)["transformer"]
    assert all(of_transformer[name] for name in FUSIONS)
    assert not of_transformer["use_cpu_initialization"]
    assert of_transformer["transformer_impl"] == "transformer_engine"
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    of_transformer = settings("cuda", swiglu=True)["transformer"]
    assert not of_transformer["gradient_accumulation_fusion"]
    assert of_transformer["transformer_impl"] == "local"


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    assert not settings("cuda", **{"swiglu": True, name: False})["transformer"][name]


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ({"swiglu": True, "add_bias_linear": False}, True),
        ({"add_bias_linear": True}, True),
        ({"add_bias_linear": False}, False),
        ({"squared_relu": True}, False),
        ({"swiglu": True, "use_te_activation_func": True}, False),
    ],
)
def test_the_activation_is_fused_where_core_can(flags: dict, fused: bool) -> None:
    assert settings("cuda", **flags)["transformer"]["bias_activation_fusion"] is fused


def test_sequence_parallelism_needs_something_to_cut(tmp_path: Path) -> None:
    assert not resolved(tmp_path, "--sequence-parallel").transformer.sequence_parallel
    two = "--sequence-parallel --tensor-model-parallel-size 2"
    assert resolved(tmp_path, two, 2).transformer.sequence_parallel


def test_fp8_parameters_of_ddp_and_transformer_agree() -> None:
    assert settings("cuda", fp8_param_gather=True)["transformer"]["fp8_param"] is True
