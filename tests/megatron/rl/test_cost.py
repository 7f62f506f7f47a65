"""What a sample costs, against operations counted while a model runs, and by hand."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.rl.arguments import resolve
from megatron.rl.config import RunConfig
from megatron.rl.cost import even_length, sample_costs
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, SHAPE, write_rollouts

WIDTH, LAYERS, HIDDEN = 32, 4, 32


def config_of(tmp_path: Path, *flags: str) -> RunConfig:
    data = write_rollouts(tmp_path / "rollouts.jsonl")
    argv = [*MODEL_FLAGS, *RUN_FLAGS, f"--rollout-data={data}", *flags]
    return resolve([*argv, "--make-vocab-size-divisible-by=1"], 1, has_driver=False)


def test_cost_is_what_a_model_of_that_shape_computes(tmp_path: Path) -> None:
    """Every key is multiplied here, seen or not: 4 * width * L^2 a layer, where we count half."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager"))
    config = config_of(tmp_path)
    for length in (1, 7, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64))
        unseen = 2 * WIDTH * LAYERS * (length * length - length)
        # rotary embedding multiplies positions with the frequencies of half a head
        rotary = 2 * length * WIDTH // 4 // 2
        flops = counter.get_total_flops() - unseen - rotary
        [cost] = sample_costs([length], config)
        # the even length is rounded to a whole number of tokens
        assert abs(cost - flops / (2 * WIDTH * LAYERS)) <= length / 2


def test_cost_grows_faster_than_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    even = even_length(config)
    assert sample_costs([], config) == []
    assert sample_costs([1, even], config) == [even + 1, 2 * even**2]


ATTENTION = 2 * HIDDEN * 8 * (4 + 2)
DENSE = 3 * HIDDEN * 48
EXPERTS = HIDDEN * 8 + 3 * HIDDEN * (2 * 16 + 24)


@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        ("", 300 * HIDDEN + 4 * (ATTENTION + DENSE)),
        ("--loss-type=value_loss --advantage-estimator=ppo", HIDDEN + 4 * (ATTENTION + DENSE)),
        ("--num-experts=8", 300 * HIDDEN + 4 * (ATTENTION + EXPERTS)),
        (
            "--num-experts=8 --moe-layer-freq=3",
            300 * HIDDEN + 4 * ATTENTION + 2 * EXPERTS + 2 * DENSE,
        ),
        (
            "--num-experts=8 --moe-layer-freq 0 1 1 1",
            300 * HIDDEN + 4 * ATTENTION + 3 * EXPERTS + DENSE,
        ),
    ],
)
def test_weights_of_every_kind_of_layer(tmp_path: Path, flags: str, weights: int) -> None:
    """A router of 8 rows, two of 8 experts of 16 and a shared one of 24; every third is 0 and 3."""
    experts = "--moe-ffn-hidden-size=16 --moe-shared-expert-intermediate-size=24"
    experts += " --moe-router-load-balancing-type=none --moe-token-dispatcher-type=alltoall"
    flags = f"{flags} {experts}" if "experts" in flags else flags
    config = config_of(tmp_path, *flags.split())
    assert even_length(config) == round(weights / (WIDTH * LAYERS)) + 1
