"""A checkpoint can be read by one process on a CPU, wherever and however it was trained."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.rl.arguments import resolve, saved_config
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, write_rollouts
from tools.export_hf import one_process

TWO_STAGES = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}


@pytest.mark.parametrize(
    "flags",
    [
        {"attention_backend": "flash"},
        {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True},
        {"optimizer_cpu_offload": True},
        {"fp8": "hybrid", "bf16": True},
        {"fp8": "hybrid", "fp8_param_gather": True, "bf16": True},
        {"nccl_ub": True},
        TWO_STAGES | {"num_layers_in_first_pipeline_stage": 1},
        TWO_STAGES | {"num_layers_in_last_pipeline_stage": 3},
        TWO_STAGES | {"pipeline_model_parallel_layout": "Et|tttL"},
        TWO_STAGES | {"microbatch_group_size_per_vp_stage": 4},
    ],
    ids=str,
)
def test_the_run_may_have_had_other_hardware_and_layout(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl")
    run = resolve([*MODEL_FLAGS, *RUN_FLAGS, f"--rollout-data={rollouts}"], 1, has_driver=False)
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump(yaml.safe_load(run.to_yaml()) | flags))
    config = saved_config(str(saved), **one_process())
    assert (config.layout.world_size, config.layout.pipeline_parallel) == (1, 1)
    assert config.transformer.num_layers == run.transformer.num_layers
