"""What a rank has of a rollout: its samples, the streams that the flags ask for, a digest."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.rl.arguments import resolve
from megatron.rl.data import check_data, make_source
from megatron.rl.rollout import Rollout, plan_rollout, read_rollout
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, rollout_rows, write_rollouts


@pytest.mark.parametrize(
    ("flags", "streams"),
    [
        ([], {"rollout_log_probs"}),
        (["--rollout-top-p=0.9"], {"rollout_log_probs", "kept_ids"}),
        (["--use-kl-loss"], {"rollout_log_probs", "ref_log_probs"}),
        (["--loss-type=sft_loss"], set()),
    ],
)
def test_streams_follow_from_the_flags(tmp_path: Path, flags: list[str], streams: set[str]) -> None:
    rows = rollout_rows()
    for row in rows:
        length = row["response_length"]
        row["ref_log_probs"] = row["rollout_log_probs"]
        row["rollout_top_p_token_ids"] = row["tokens"][-length:]
        row["rollout_top_p_token_offsets"] = list(range(length + 1))
    data = write_rollouts(tmp_path / "rollouts.jsonl", rows)
    argv = [*MODEL_FLAGS, *RUN_FLAGS, f"--rollout-data={data}", *flags]
    config = resolve(argv, 1, has_driver=False)
    source = make_source(config, check_data(config))
    assert plan_rollout(0, source.files.rows[source.rollout_rows(0)], config).streams == streams


def read(folder: Path, rows: list[dict], dp_rank: int = 0) -> Rollout:
    """The first rollout, as one of two replicas has it."""
    data = write_rollouts(folder / "rollouts.jsonl", rows)
    argv = [*MODEL_FLAGS, *RUN_FLAGS, f"--rollout-data={data}", "--num-steps-per-rollout=2"]
    config = resolve(argv, 2, has_driver=False)
    return read_rollout(0, make_source(config, check_data(config)).rollout(0, 0), config, dp_rank)


def test_a_rank_reads_the_samples_that_it_trains(tmp_path: Path) -> None:
    rows = rollout_rows()
    rollouts = [read(tmp_path, rows, rank) for rank in (0, 1)]
    for rank, rollout in enumerate(rollouts):
        own = [i for step in rollout.steps for pack in step.micro_batches[rank] for i in pack]
        assert own == list(rollout.samples) == rollout.positions(rank)
        for position, sample in rollout.samples.items():
            assert sample.index == rollout.rows["index"][position]
            assert sample.tokens.tolist() == rows[sample.index]["tokens"]
    assert sorted([*rollouts[0].samples, *rollouts[1].samples]) == list(range(len(rows)))


def other_tokens(rows: list[dict]) -> None:
    rows[3]["tokens"].reverse()  # the file keeps its size, and so do later lines their places


def other_mask(rows: list[dict]) -> None:
    rows[3]["loss_mask"].reverse()


def other_log_probs(rows: list[dict]) -> None:
    rows[3]["rollout_log_probs"].reverse()


def other_reward(rows: list[dict]) -> None:
    rows[3]["reward"] = 1.0 - rows[3]["reward"]


@pytest.mark.parametrize("change", [other_tokens, other_mask, other_log_probs, other_reward])
def test_the_digest_is_of_everything_in_the_samples_of_all_ranks(
    change: Callable[[list[dict]], None], tmp_path: Path
) -> None:
    rows = rollout_rows()
    before = read(tmp_path, rows, 0).digest
    assert read(tmp_path, rows, 1).digest == before
    change(rows)
    assert read(tmp_path, rows, 1).digest != before
