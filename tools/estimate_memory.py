"""Estimate what each rank of a run holds in memory, from the run's own flags, without starting it.

Takes the flags of pretrain_rl.py, on any machine. The formulas are in docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron.rl.arguments import FlagError, planned_config
from megatron.rl.config import RunConfig
from tools.memory_model import MemoryModel, MemoryModelError, StageMemory

EXAMPLE = """\
example:
  python tools/estimate_memory.py --ranks 2 --config examples/grpo.yaml
  python tools/estimate_memory.py --ranks 8 --config runs/first/tensorboard/config.yaml \\
      --tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-gpu 16384

Every other flag is the run's. Without --device it is estimated for GPUs.

not counted: the CUDA context and NCCL's buffers (1 to 3 GiB), fragmentation of the allocator,
the rollout files' rows, buffers of the pipeline's exchange
"""
MIB = 2**20


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """This program's flags, and the words that are the run's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s --ranks N [--tokens N] [--trained-share X] [--json] [flag of the run ...]",
    )
    parser.add_argument("--ranks", type=_positive, required=True, metavar="N", help="of the job")
    parser.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help="tokens of a micro-batch on one rank (default: --max-tokens-per-gpu, or "
        "--micro-batch-size samples of --max-position-embeddings)",
    )
    parser.add_argument(
        "--trained-share",
        type=_share,
        default=1.0,
        metavar="X",
        help="share of the tokens that train, in (0, 1]; the head works on these alone "
        "(default: 1, the most it can be)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    return parser.parse_known_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive: {value}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1]: {value}")
    return value


def rows_of(config: RunConfig, tokens: int | None) -> int:
    """Rows of the largest micro-batch on one rank, padding included.

    Raises:
        MemoryModelError: nothing bounds them.
    """
    layout, data = config.layout, config.data
    most, longest = data.max_tokens_per_gpu, config.model.max_position_embeddings
    if tokens is None and data.use_dynamic_batch_size:
        tokens = most
    elif tokens is None and longest is not None:
        tokens = -(-data.micro_batch_size * longest // layout.context_parallel)
    if tokens is None:
        raise MemoryModelError(
            "the tokens of a micro-batch must be bounded: --max-position-embeddings=None; "
            "fix: give --tokens N, those of a micro-batch on one rank"
        )
    return -(-tokens // layout.row_multiple) * layout.row_multiple


def estimate(config: RunConfig, tokens: int | None, trained_share: float) -> list[StageMemory]:
    """What a rank of each pipeline stage holds.

    Raises:
        MemoryModelError: the formulas do not cover the run.
    """
    rows = rows_of(config, tokens)
    return MemoryModel(config, rows, max(round(rows * trained_share), 1)).stages()


def as_table(config: RunConfig, stages: Sequence[StageMemory]) -> str:
    """Every part of the largest stage with its formula, and the peak of each."""
    worst = max(stages, key=lambda stage: stage.peak)
    dtype = str(config.transformer.params_dtype).removeprefix("torch.")
    lines = [
        config.layout.describe(),
        "",
        f"stage {worst.stage} of {len(stages)}, {worst.num_parameters:,} parameters a rank, {dtype}"
        f" on {config.device_type}",
        f"{'':34}{'MiB':>12}",
    ]
    at_work = {part.name for part in worst.working}
    most = max(worst.working, key=lambda part: part.num_bytes)
    for part in worst.parts:
        takes_turns = part.name in at_work and part is not most
        number = f"({_mib(part.num_bytes)})" if takes_turns else f"{_mib(part.num_bytes)} "
        lines.append(f"{part.name:<34}{number:>13}  {part.formula}")
    lines.append(f"{'peak':<34}{_mib(worst.peak):>12}   in brackets: not at the same time")
    if len(stages) > 1:
        peaks = ", ".join(f"{stage.stage}: {_mib(stage.peak)}" for stage in stages)
        lines.append(f"{'peak by stage':<34}{peaks}")
    return "\n".join(lines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"


def as_json(stages: Sequence[StageMemory]) -> str:
    """Every part of every stage."""
    found = [asdict(stage) | {"peak": stage.peak} for stage in stages]
    return json.dumps({"peak": max(stage.peak for stage in stages), "stages": found}, indent=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate; returns the exit code, 2 where flags are refused or not covered."""
    arguments, words = parse_arguments(argv)
    try:
        config = planned_config(words, arguments.ranks, has_driver=True)
        stages = estimate(config, arguments.tokens, arguments.trained_share)
    except (FlagError, MemoryModelError) as error:
        print(f"estimate_memory.py: {error}", file=sys.stderr)
        return 2
    print(as_json(stages) if arguments.json else as_table(config, stages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
