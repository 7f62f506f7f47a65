"""What is saved is what is loaded: bit for bit on the same ranks, to rounding on others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.rl.build import restore
from megatron.rl.checkpoint import Progress
from megatron.rl.checkpoint_files import (
    TRACKER,
    CheckpointError,
    find_checkpoint,
    read_tracker,
)
from megatron.rl.rollout import Computed
from tests.megatron.rl.running import Running, running
from tests.megatron.rl.tiny import (
    MODEL_FLAGS,
    RUN_FLAGS,
    rollout_rows,
    with_every_field,
    write_llama,
    write_qwen3,
    write_rollouts,
)
from tests.spawn import World

LAYOUTS = {
    "tp2 sp": ["--tensor-model-parallel-size=2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size=2"],
    "cp2": ["--context-parallel-size=2", "--allgather-cp"],
    "dp2": [],
    "dp2 distributed optimizer": ["--use-distributed-optimizer"],
    "dp2 overlapped": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--ddp-bucket-size=4000",
    ],
    "tp2 distributed optimizer": [
        "--use-distributed-optimizer",
        "--tensor-model-parallel-size=2",
    ],
}
CHANGES = [
    ("tp2 sp", "pp2"),
    ("pp2", "dp2"),
    ("cp2", "tp2 sp"),
    ("dp2", "cp2"),
    ("dp2 distributed optimizer", "tp2 distributed optimizer"),
]


@dataclass(frozen=True)
class Outcome:
    """The third step of a run, and the state of this rank's generators before it."""

    metrics: dict[str, float]
    learning_rate: float
    draw: float
    progress: Progress
    old: dict[int, list[float]]
    advantages: dict[int, list[float]]


def third_step(run: Running, progress: Progress, computed: Computed) -> Outcome:
    learning_rate = run.trainee.learning_rate
    draw = float(torch.rand(()))
    result = run.trainee.step(run.micro_batches(2, computed))
    return Outcome(
        {**result.metrics, "grad_norm": result.grad_norm},
        learning_rate,
        draw,
        progress,
        {position: old.tolist() for position, old in old_outputs(computed).items()},
        {position: values.tolist() for position, values in computed.advantages.items()},
    )


def old_outputs(computed: Computed) -> Mapping[int, Tensor]:
    """What a checkpoint holds of it."""
    return computed.old_log_probs or computed.values


def with_everyones_old(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes, each with the old log-probs of all ranks, as a checkpoint has them."""
    together = {position: old for outcome in outcomes for position, old in outcome.old.items()}
    return [replace(outcome, old=together) for outcome in outcomes]


def save_after_two(rank: int, argv: list[str]) -> Outcome:
    """Two steps, a save within the rollout, and the third step of the run that goes on."""
    with running(rank, 2, argv) as run:
        for step in (0, 1):
            run.trainee.step(run.micro_batches(step))
            run.checkpointer.scheduler.step(increment=1)
        torch.rand(3)  # a generator that has moved since the start
        progress = Progress(step=2, rollout=0, step_in_rollout=2, consumed_samples=10)
        run.checkpointer.save(progress, old_outputs(run.computed))
        return third_step(run, progress, run.computed)


def load_and_go_on(rank: int, argv: list[str]) -> Outcome:
    with running(rank, 2, argv) as run:
        restored = run.checkpointer.load()
        assert restored is not None
        if run.trainee.config.checkpoint.finetune:
            assert not restored.old_outputs
        if not restored.old_outputs:
            return third_step(run, restored.progress, run.computed)
        return third_step(run, restored.progress, run.computed_from(restored.old_outputs))


def start_anew(rank: int, argv: list[str]) -> Outcome:
    with running(rank, 2, argv) as run:
        return third_step(run, Progress(), run.computed)


def refusal(rank: int, argv: list[str]) -> str:
    with running(rank, 2, argv) as run:
        try:
            run.checkpointer.load()
        except CheckpointError as error:
            return str(error)
    return ""


def refusal_to_begin(rank: int, argv: list[str]) -> str:
    try:
        with running(rank, 2, argv) as run:
            restore(run.trainee.config, run.checkpointer)
    except CheckpointError as error:
        parallel_state.destroy_model_parallel()
        return str(error)
    return ""


def save_steps(rank: int, argv: list[str], steps: list[int]) -> None:
    with running(rank, 2, argv) as run:
        for step in steps:
            run.checkpointer.save(Progress(step=step), {})


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("run")
    return [
        *RUN_FLAGS,
        "--rollout-batch-size=4",
        "--global-batch-size=5",
        "--micro-batch-size=2",
        "--lr-decay-style=cosine",
        f"--hf-checkpoint={write_qwen3(folder / 'hf')}",
        f"--rollout-data={write_rollouts(folder / 'rollouts.jsonl', with_every_field())}",
        "--advantage-estimator=reinforce_plus_plus",
        "--kl-coef=0.1",
        "--gamma=0.9",
        "--normalize-advantages",
    ]


@pytest.fixture(scope="module")
def critic_flags(flags: list[str]) -> list[str]:
    ppo = ["--loss-type=value_loss", "--advantage-estimator=ppo", "--lambd=0.9"]
    no_policy = ("--normalize-advantages", "--advantage-estimator")
    return [flag for flag in flags if not flag.startswith(no_policy)] + ppo


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_ranks_go_on_bit_for_bit(
    two_ranks: World, flags: list[str], tmp_path: Path, name: str
) -> None:
    argv = [*flags, *LAYOUTS[name], f"--save={tmp_path}", f"--load={tmp_path}"]
    expected = with_everyones_old(two_ranks.run(save_after_two, argv))
    assert two_ranks.run(load_and_go_on, argv) == expected
    assert any(outcome.advantages for outcome in expected)


@pytest.mark.parametrize("name", ["tp2 sp", "pp2", "dp2 distributed optimizer"])
def test_a_critic_goes_on_bit_for_bit(
    two_ranks: World, critic_flags: list[str], tmp_path: Path, name: str
) -> None:
    two_ranks.run(save_after_two, [*critic_flags, f"--save={tmp_path}/learned"])
    argv = [*critic_flags, *LAYOUTS[name], f"--pretrained-checkpoint={tmp_path}/learned"]
    argv += [f"--save={tmp_path}/run", f"--load={tmp_path}/run"]
    expected = with_everyones_old(two_ranks.run(save_after_two, argv))
    assert two_ranks.run(load_and_go_on, argv) == expected
    assert any(any(values) for values in expected[0].old.values())


def test_a_critic_begins_from_a_policy(
    two_ranks: World, flags: list[str], critic_flags: list[str], tmp_path: Path
) -> None:
    two_ranks.run(save_after_two, [*flags, f"--save={tmp_path}/policy"])
    [expected, _] = two_ranks.run(start_anew, critic_flags)
    argv = [*critic_flags, *LAYOUTS["pp2"], f"--pretrained-checkpoint={tmp_path}/policy"]
    for got in two_ranks.run(start_anew, argv):
        assert got.metrics["values_mean"] == 0
        assert got.metrics["grad_norm"] > 0
        assert got.metrics["grad_norm"] != pytest.approx(expected.metrics["grad_norm"], rel=1e-3)


def test_a_policy_is_no_critic(
    two_ranks: World, flags: list[str], critic_flags: list[str], tmp_path: Path
) -> None:
    two_ranks.run(save_steps, [*critic_flags, f"--save={tmp_path}"], [1])
    for argv in ([f"--load={tmp_path}"], [f"--pretrained-checkpoint={tmp_path}"]):
        for message in two_ranks.run(refusal_to_begin, [*flags, *argv]):
            assert "is_critic: checkpoint True, this run False" in message


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_other_ranks_go_on_with_the_same_numbers(
    two_ranks: World, flags: list[str], tmp_path: Path, before: str, after: str
) -> None:
    places = [f"--save={tmp_path}", f"--load={tmp_path}"]
    saved = two_ranks.run(save_after_two, [*flags, *LAYOUTS[before], *places])
    expected = with_everyones_old(saved)[0]
    for got in two_ranks.run(load_and_go_on, [*flags, *LAYOUTS[after], *places]):
        assert got.progress == expected.progress
        assert got.old == expected.old
        assert got.learning_rate == expected.learning_rate
        assert got.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert got.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_flags_decide_what_is_loaded(two_ranks: World, flags: list[str], tmp_path: Path) -> None:
    # old log-probs that the weights do not change, so that the weights alone can be compared
    flags = [*flags, "--use-rollout-logprobs"]
    argv = [*flags, f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    [expected, _] = two_ranks.run(save_after_two, argv)
    argv[-2] = f"--save={tmp_path}/other"
    [anew, _] = two_ranks.run(load_and_go_on, [*argv, "--finetune"])
    assert anew.progress == Progress()
    assert anew.learning_rate == 1e-3
    assert anew.metrics == expected.metrics
    [without_optimizer, _] = two_ranks.run(load_and_go_on, [*argv, "--no-load-optim"])
    assert without_optimizer.progress == expected.progress
    assert without_optimizer.learning_rate == 1e-3
    assert without_optimizer.draw == expected.draw
    [without_rng, _] = two_ranks.run(load_and_go_on, [*argv, "--no-load-rng"])
    assert without_rng.learning_rate == expected.learning_rate
    assert without_rng.draw != expected.draw


def test_a_pretrained_checkpoint_gives_the_weights_alone(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    flags = [*flags, "--use-rollout-logprobs"]
    [expected, _] = two_ranks.run(save_after_two, [*flags, f"--save={tmp_path}"])
    argv = [*flags, *LAYOUTS["pp2"], f"--pretrained-checkpoint={tmp_path}"]
    for got in two_ranks.run(start_anew, argv):
        assert got.learning_rate == 1e-3
        for name, value in expected.metrics.items():
            assert got.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_a_pretrained_checkpoint_must_be_of_the_same_model(
    two_ranks: World, tmp_path: Path
) -> None:
    data = write_rollouts(tmp_path / "rollouts.jsonl")
    argv = [*MODEL_FLAGS, *RUN_FLAGS, "--global-batch-size=5", f"--rollout-data={data}"]
    two_ranks.run(save_steps, [*argv, f"--save={tmp_path}"], [1])
    same_shapes = ["--num-attention-heads=8", "--num-query-groups=4", "--kv-channels=4"]
    same_shapes += ["--rotary-base=5000"]
    argv += [*same_shapes, f"--pretrained-checkpoint={tmp_path}"]
    for message in two_ranks.run(refusal_to_begin, argv):
        assert "num_attention_heads: checkpoint 4, this run 8" in message
        assert "rotary_base: checkpoint 10000.0, this run 5000.0" in message


def test_what_does_not_fit_is_named(two_ranks: World, flags: list[str], tmp_path: Path) -> None:
    places = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    two_ranks.run(save_after_two, [*flags, *places])
    places[0] = f"--save={tmp_path}/other"

    other_model = write_llama(tmp_path / "llama", tied=True)
    other = [f if not f.startswith("--hf") else f"--hf-checkpoint={other_model}" for f in flags]
    for message in two_ranks.run(refusal, [*other, *places]):
        assert "qk_layernorm: checkpoint True, this run False" in message
        assert "untie_embeddings_and_output_weights: checkpoint True, this run False" in message

    rows = write_rollouts(tmp_path / "rollouts.jsonl", with_every_field(rollout_rows(seed=5)))
    other = [f if not f.startswith("--rollout-data") else f"--rollout-data={rows}" for f in flags]
    for message in two_ranks.run(refusal, [*other, "--global-batch-size=4", *places]):
        assert "rollouts: checkpoint " in message
        assert "global_batch_size: checkpoint 5, this run 4" in message
        assert "--finetune" in message

    changed = with_every_field()
    changed[3]["tokens"][-1] ^= 1
    rows = write_rollouts(tmp_path / "changed.jsonl", changed)
    other = [f if not f.startswith("--rollout-data") else f"--rollout-data={rows}" for f in flags]
    for message in two_ranks.run(refusal, [*other, "--rollout-batch-size=3", *places]):
        assert "rollouts: checkpoint " in message
        assert "rollout_batch_size: checkpoint 4, this run 3" in message

    for message in two_ranks.run(refusal, [*flags, "--use-distributed-optimizer", *places]):
        assert "use_distributed_optimizer: checkpoint False, this run True" in message

    for message in two_ranks.run(refusal, [*flags, "--lr=2e-3", *places]):
        assert "learning rate" in message
        assert "--override-opt-param-scheduler" in message

    overlapped = [*flags, *LAYOUTS["dp2 overlapped"]]
    two_ranks.run(save_after_two, [*overlapped, f"--save={tmp_path}/overlapped"])
    elsewhere = [*overlapped, "--tensor-model-parallel-size=2", f"--load={tmp_path}/overlapped"]
    for message in two_ranks.run(refusal, elsewhere):
        assert "optimizer state of one layout" in message
        assert "--no-load-optim" in message

    two_ranks.run(save_after_two, [*flags, *places, "--no-save-optim"])
    places[1] = f"--load={tmp_path}/other"
    for message in two_ranks.run(refusal, [*flags, *places]):
        assert "no optimizer state" in message
        assert "--no-load-optim" in message


@pytest.mark.parametrize("distributed", [[], ["--use-distributed-optimizer"]])
def test_the_rate_is_the_flags_or_the_checkpoints_as_asked(
    two_ranks: World, flags: list[str], tmp_path: Path, distributed: list[str]
) -> None:
    slow = [*flags, *distributed, "--lr-decay-style=linear", "--lr-decay-iters=9"]
    fast = [*slow, "--lr=2e-3"]
    of_slow = two_ranks.run(save_after_two, [*slow, f"--save={tmp_path}/slow"])[0].learning_rate
    of_fast = two_ranks.run(save_after_two, [*fast, f"--save={tmp_path}/fast"])[0].learning_rate
    assert of_fast == pytest.approx(2 * of_slow, rel=1e-12)
    for choice, expected in (("override", of_fast), ("use-checkpoint", of_slow)):
        resumed = [*fast, f"--load={tmp_path}/slow", f"--{choice}-opt-param-scheduler"]
        for outcome in two_ranks.run(load_and_go_on, resumed):
            assert outcome.learning_rate == expected


def test_a_broken_checkpoint_gives_way_to_the_newest_complete_one(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    two_ranks.run(save_steps, [*flags, f"--save={tmp_path}"], [2, 4, 6])
    assert read_tracker(tmp_path) == 6
    assert find_checkpoint(tmp_path).name == "iter_0000006"
    (tmp_path / "iter_0000006" / "metadata.json").unlink()
    assert find_checkpoint(tmp_path).name == "iter_0000004"
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path / "iter_0000006")
    for step in (2, 4):
        (tmp_path / f"iter_{step:07d}" / "metadata.json").unlink()
    for message in two_ranks.run(refusal, [*flags, f"--load={tmp_path}"]):
        assert "iter_0000006 is missing or incomplete" in message
    (tmp_path / TRACKER).write_text("")
    for message in two_ranks.run(refusal, [*flags, f"--load={tmp_path}"]):
        assert f"{TRACKER} must hold the number of a step" in message


def test_retain_interval_keeps_multiples_and_the_newest(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    argv = [*flags, f"--save={tmp_path}", "--save-interval=1", "--save-retain-interval=3"]
    two_ranks.run(save_steps, argv, [1, 2, 3, 4, 5])
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000003",
        "iter_0000005",
    ]
