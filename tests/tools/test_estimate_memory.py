"""What is estimated is what ranks hold: exactly at rest, within a tenth in a step."""

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.megatron.rl.running import Running, running
from tests.megatron.rl.tiny import write_rollouts
from tests.slime_loss.reference_log_probs import peak_bytes
from tests.spawn import World
from tools import estimate_memory
from tools.memory_model import MemoryModel

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
PROMPT, RESPONSE, SAMPLES = 32, 96, 4
MODEL = [
    "--num-layers=4",
    "--hidden-size=64",
    "--ffn-hidden-size=160",
    "--num-attention-heads=4",
    "--num-query-groups=2",
    "--normalization=RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    "--vocab-size=1000",
    "--max-position-embeddings=128",
    "--micro-batch-size=4",
    "--device=cpu",
    "--lr=1e-3",
    "--rollout-batch-size=2",
]


@dataclass(frozen=True)
class Held:
    """Bytes of a rank."""

    num_parameters: int
    at_rest: list[int]
    peak: int


def measure(rank: int, argv: list[str]) -> Held:
    """Build a rank and take steps: the first gives the optimizer its state.

    Of several peaks the smallest: what gloo's threads let go of late only adds to one.
    """
    with running(rank, 2, argv) as run:
        run.trainee.step(run.micro_batches())
        gc.collect()
        return Held(
            sum(p.numel() for chunk in run.trainee.chunks for p in chunk.parameters()),
            at_rest_of(run),
            min(peak_bytes(lambda: run.trainee.step(run.micro_batches())) for _ in range(3)),
        )


def at_rest_of(run: Running) -> list[int]:
    """Parameters, gradients, optimizer state."""
    parameters = [p for chunk in run.trainee.chunks for p in chunk.parameters()]
    optimizers = getattr(run.trainee.optimizer, "chained_optimizers", [run.trainee.optimizer])
    held = 0
    for optimizer in optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                held += sum(s.nbytes for s in state.values() if torch.is_tensor(s) and s.dim())
                is_own = all(parameter.data_ptr() != other.data_ptr() for other in parameters)
                held += parameter.nbytes if is_own and parameters[0].dtype == torch.bfloat16 else 0
    return [
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.main_grad.nbytes for parameter in parameters),
        held,
    ]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {
            "tokens": [(7 * i + j) % 1000 for j in range(PROMPT + RESPONSE)],
            "response_length": RESPONSE,
            "group_index": i // SAMPLES,
            "reward": float(i % 2),
            "rollout_log_probs": [-7.0] * RESPONSE,
        }
        for i in range(2 * SAMPLES)
    ]
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rows.jsonl", rows)


LAYOUTS = {
    "dp2": [],
    "dp2 distributed optimizer": ["--use-distributed-optimizer"],
    "dp2 bf16": ["--bf16"],
    "dp2 bf16 distributed optimizer": ["--bf16", "--use-distributed-optimizer"],
    "dp2 recomputed": [
        "--recompute-granularity=full",
        "--recompute-method=uniform",
        "--recompute-num-layers=1",
    ],
    "dp2 attention recomputed": [
        "--recompute-granularity=selective",
        "--recompute-modules=core_attn",
    ],
    "dp2 gelu, biases": ["--no-swiglu", "--normalization=LayerNorm", "--add-bias-linear"],
    "dp2 block recomputed": [
        "--recompute-granularity=full",
        "--recompute-method=block",
        "--recompute-num-layers=2",
    ],
    "dp2 mlp recomputed": ["--recompute-granularity=selective", "--recompute-modules=mlp"],
    "dp2 norms of queries, untied": ["--qk-layernorm", "--untie-embeddings-and-output-weights"],
    "dp2 norms of queries, bf16": ["--qk-layernorm", "--bf16"],
    "dp2 gspo": ["--advantage-estimator=gspo"],
    "dp2 chunks": ["--log-probs-chunk-size=64"],
    "dp2 recomputed head": ["--recompute-loss-function"],
    "cp2 zigzag": ["--context-parallel-size=2"],
    "pp2 interleaved": [
        "--pipeline-model-parallel-size=2",
        "--num-virtual-stages-per-pipeline-rank=2",
    ],
    "dp2 critic": ["--loss-type=value_loss", "--advantage-estimator=ppo"],
    "cp2": ["--context-parallel-size=2", "--allgather-cp"],
    "tp2": ["--tensor-model-parallel-size=2"],
    "tp2 sequence": ["--tensor-model-parallel-size=2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size=2"],
    "pp2 untied": ["--pipeline-model-parallel-size=2", "--untie-embeddings-and-output-weights"],
}


IN_EVERY_RUN = ("dp2", "dp2 bf16 distributed optimizer", "dp2 recomputed", "tp2 sequence", "pp2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_is_what_ranks_hold(two_ranks: World, rollouts: Path, name: str) -> None:
    argv = [*MODEL, f"--rollout-data={rollouts}", *LAYOUTS[name]]
    found = two_ranks.run(measure, argv)
    config = estimate_memory.planned_config(argv, 2, has_driver=False)
    rows = estimate_memory.rows_of(config, None)
    model = MemoryModel(config, rows, rows * RESPONSE // (PROMPT + RESPONSE))
    for rank, held in enumerate(found):
        stage = model.stages()[rank if "pp2" in name else 0]
        at_rest = [part.num_bytes for part in stage.held]
        assert held.num_parameters == stage.num_parameters
        assert held.at_rest[:2] == at_rest[:2]
        assert held.at_rest[2] == pytest.approx(at_rest[2], rel=0.002)  # shards are not quite equal
        assert held.peak == pytest.approx(stage.peak - sum(at_rest), rel=0.1)


def estimated(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert estimate_memory.main([*argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert estimate_memory.main([*argv]) == 2
    return capsys.readouterr().err


PLANNED = [*MODEL, "--ranks=8", "--rollout-data=not_there.jsonl"]


def test_knows_the_parameters_of_a_published_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    argv = ["--ranks=1", f"--hf-checkpoint={tmp_path}", "--rollout-data=rows.jsonl", "--lr=1e-6"]
    argv += ["--use-dynamic-batch-size", "--max-tokens-per-gpu=1024", "--bf16", "--json"]
    stage = json.loads(estimated(capsys, *argv))["stages"][0]
    assert stage["num_parameters"] == 8_190_735_360
    assert [part["num_bytes"] for part in stage["held"]] == [
        factor * 8_190_735_360 for factor in (2, 4, 12)
    ]


def test_json_and_table_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*PLANNED, "--pipeline-model-parallel-size=2"]
    answer = json.loads(estimated(capsys, *argv, "--json"))
    assert answer["peak"] == max(stage["peak"] for stage in answer["stages"])
    table = estimated(capsys, *argv)
    assert f"peak {answer['peak'] / 2**20:,.1f}".split() in [
        line.split()[:2] for line in table.splitlines()
    ]
    peaks = [f"{stage['stage']}: {stage['peak'] / 2**20:,.1f}" for stage in answer["stages"]]
    assert ", ".join(peaks) in table


def test_a_gpu_need_not_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [word for word in PLANNED if word != "--device=cpu"]
    assert "float32 on cuda" in estimated(capsys, *argv)


def test_fewer_tokens_hold_less(capsys: pytest.CaptureFixture[str]) -> None:
    def parts(*tokens: str) -> dict[str, int]:
        argv = ["--json", "--log-probs-chunk-size=64", *tokens]
        (stage,) = json.loads(estimated(capsys, *PLANNED, *argv))["stages"]
        return {p["name"]: p["num_bytes"] for p in [stage["kept"], *stage["working"]]}

    whole, half = parts("--tokens=4096"), parts("--tokens=2048")
    assert whole["activations"] == 2 * half["activations"]
    few = parts("--tokens=4096", "--trained-share=0.25")
    assert few["activations"] == whole["activations"]
    # hidden states and their gradients in float32
    assert whole["head"] - few["head"] == 0.75 * 4096 * 64 * 8


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-experts=4", "--no-swiglu"], "is not covered by the formulas: --num-experts=4"),
        (
            [
                "--pipeline-model-parallel-size=2",
                "--pipeline-model-parallel-layout=Et|tttL",
            ],
            "is not covered by the formulas: --pipeline-model-parallel-layout=Et|tttL",
        ),
        (["--tensor-model-parallel-size=3"], "--tensor-model-parallel-size"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_refuses_what_it_cannot_estimate(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refused(capsys, *PLANNED, *argv)


@pytest.mark.parametrize("flag", ["--ranks=0", "--tokens=0", "--trained-share=1.5"])
def test_refuses_numbers_that_cannot_be(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        estimate_memory.main([*PLANNED, flag])
    assert flag.partition("=")[0] in capsys.readouterr().err
