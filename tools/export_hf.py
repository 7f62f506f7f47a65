"""Write the weights of a training checkpoint as a Hugging Face directory.

Reads a checkpoint of any parallel layout in this one process, on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron.rl.arguments import FlagError, saved_config
from megatron.rl.checkpoint_files import CONFIG, CheckpointError, find_checkpoint
from megatron.rl.checkpoint_model import load_model_weights
from megatron.rl.flags.generate import all_flags
from megatron.rl.hf import architecture_of, export_hf_weights, export_new_hf_weights
from megatron.rl.initialize import World, distributed
from megatron.rl.model import build_model

EXAMPLE = """\
example:
  python tools/export_hf.py --checkpoint runs/first/checkpoints --output exported
"""
OF_THE_RUN = """
    hf_checkpoint overlap_grad_reduce sequence_parallel context_parallel_size
    tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    pipeline_model_parallel_layout num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage
    attention_backend fp8 fp8_param_gather fp4 moe_grouped_gemm use_precision_aware_optimizer
    optimizer_cpu_offload cpu_offloading nccl_ub
"""
"""Flags of layout and hardware, which the weights do not depend on and one CPU may not have."""


def main() -> None:
    """Parse, load, export."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a --save directory (its newest checkpoint) or one iter_ directory in it",
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--source",
        type=Path,
        help="Hugging Face directory that decides files, dtypes and tokenizer; by default the "
        "run's --hf-checkpoint, and without one a config.json is made from the run's flags",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the written weights; by default the source's: small updates of weights trained "
        "in float32 may be lost to its rounding",
    )
    arguments = parser.parse_args()
    dtype = arguments.dtype and getattr(torch, arguments.dtype)
    try:
        export(arguments.checkpoint, arguments.output, arguments.source, dtype)
    except (CheckpointError, FlagError, ValueError, OSError) as error:
        sys.exit(f"export_hf.py: {error}")
    print(arguments.output)


def export(
    checkpoint: Path, output: Path, source: Path | None, dtype: torch.dtype | None = None
) -> None:
    """Load the weights into one process and write them."""
    found = find_checkpoint(checkpoint)
    config = saved_config(str(found / CONFIG), **one_process())
    if config.is_critic:
        raise ValueError(
            f"{found} is a critic's, whose value head no Hugging Face language model has: "
            "loss_type=value_loss"
        )
    source = source or source_of(found / CONFIG)
    with distributed(config, World()) as grid:
        chunks = build_model(config, grid)
        load_model_weights(config, chunks, found)
        if source is not None:
            export_hf_weights(chunks, source, output, dtype=dtype, show_progress=True)
        else:
            architecture = architecture_of(config.transformer, config.model)
            chunks = [chunk.to(dtype) for chunk in chunks]
            export_new_hf_weights(chunks, architecture, output, show_progress=True)


def one_process() -> dict[str, Any]:
    """What takes the place of the run's own flags: one process on the CPU."""
    return {"device": "cpu"} | {name: all_flags()[name].default for name in OF_THE_RUN.split()}


def source_of(config_file: Path) -> Path | None:
    """The Hugging Face directory that the run began with, if it had one."""
    named = yaml.safe_load(config_file.read_text(encoding="utf-8")).get("hf_checkpoint")
    if named is not None and not Path(named).is_dir():
        raise ValueError(f"the run's --hf-checkpoint is gone, give --source: hf_checkpoint={named}")
    return named and Path(named)


if __name__ == "__main__":
    main()
