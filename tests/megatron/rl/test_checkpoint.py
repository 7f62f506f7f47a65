"""What is saved is what is loaded: bit for bit on the same ranks, to rounding on others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core import parallel_state

from megatron.rl.build import restore
from megatron.rl.checkpoint import Progress
from megatron.rl.checkpoint_files import TRACKER, CheckpointError, find_checkpoint, read_tracker
from tests.megatron.rl.checkpoints import (
    EXPERTS,
    LAYOUTS,
    Outcome,
    load_and_go_on,
    run_flags,
    save_after_two,
    save_steps,
    third_step,
    with_everyones_old,
)
from tests.megatron.rl.running import running
from tests.megatron.rl.tiny import (
    MODEL_FLAGS,
    RUN_FLAGS,
    rollout_rows,
    with_every_field,
    write_llama,
    write_rollouts,
)
from tests.spawn import World

CHANGES = [
    ("tp2 sp", "pp2"),
    ("pp2", "dp2"),
    ("cp2", "tp2 sp"),
    ("dp2", "cp2"),
    ("dp2 distributed optimizer", "tp2 distributed optimizer"),
]


def load_and_go_on_alone(rank: int, argv: list[str]) -> Outcome:
    with running(rank, 1, argv) as run:
        restored = run.checkpointer.load()
        assert restored is not None
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


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    with World(1, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_flags(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rollouts = write_rollouts(tmp_path_factory.mktemp("experts") / "rollouts.jsonl")
    batches = ["--rollout-batch-size=4", "--global-batch-size=5", "--micro-batch-size=2"]
    return [*MODEL_FLAGS, *EXPERTS, *RUN_FLAGS, *batches, f"--rollout-data={rollouts}"]


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
    check_same_numbers(two_ranks.run(load_and_go_on, [*flags, *LAYOUTS[after], *places]), expected)


def check_same_numbers(outcomes: list[Outcome], expected: Outcome) -> None:
    for got in outcomes:
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
        assert "iter_0000006 is broken: metadata.json is missing" in message
    (tmp_path / TRACKER).write_text("")
    for message in two_ranks.run(refusal, [*flags, f"--load={tmp_path}"]):
        assert f"{TRACKER} must hold the number of a step" in message


def test_a_run_does_not_replace_checkpoints_that_it_does_not_go_on_from(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    argv = [*flags, f"--save={tmp_path}/run", "--no-load-optim"]
    two_ranks.run(save_steps, argv, [2, 4])
    two_ranks.run(save_steps, [*argv, f"--save={tmp_path}/other"], [2])
    for load, start in ([], 1), ([f"--load={tmp_path}/other"], 3):
        for message in two_ranks.run(refusal_to_begin, [*argv, *load]):
            assert f"{tmp_path}/run has step 4, and this run starts at step {start}; " in message
    for load in ("run", "run/../run/", "run/iter_0000002"):
        assert two_ranks.run(refusal_to_begin, [*argv, f"--load={tmp_path}/{load}"]) == ["", ""]


def test_a_run_in_float32_goes_on_in_float64(
    two_ranks: World, flags: list[str], tmp_path: Path
) -> None:
    argv = [*flags, f"--save={tmp_path}", f"--load={tmp_path}"]
    saved = two_ranks.run(save_after_two, argv)[0]
    got = two_ranks.run(load_and_go_on, [*argv, "--fp64"])[0]
    assert got.metrics["loss"] == pytest.approx(saved.metrics["loss"], rel=0, abs=1e-6)


@pytest.mark.parametrize("more", [[], ["--use-distributed-optimizer"]])
def test_experts_go_on_bit_for_bit(
    two_ranks: World, experts: list[str], tmp_path: Path, more: list[str]
) -> None:
    places = [f"--save={tmp_path}", f"--load={tmp_path}", *more]
    shared = [*experts, "--expert-model-parallel-size=2", *places]
    expected = with_everyones_old(two_ranks.run(save_after_two, shared))
    assert two_ranks.run(load_and_go_on, shared) == expected
    for message in two_ranks.run(refusal, [*experts, *places]):
        assert "'ep': 2" in message
        assert "--no-load-optim" in message


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "dp2 overlapped"])
def test_one_rank_goes_on_with_the_same_loss(
    two_ranks: World, one_rank: World, flags: list[str], tmp_path: Path, name: str
) -> None:
    places = [f"--save={tmp_path}", f"--load={tmp_path}"]
    alone = ["--use-distributed-optimizer"] if "distributed optimizer" in name else []
    saved = two_ranks.run(save_after_two, [*flags, *LAYOUTS[name], *places])
    got = one_rank.run(load_and_go_on_alone, [*flags, *alone, *places])
    check_same_numbers(got, with_everyones_old(saved)[0])
    assert got[0].metrics["loss"] == pytest.approx(saved[0].metrics["loss"], rel=0, abs=1e-6)
