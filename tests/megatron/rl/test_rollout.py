"""A rollout gives the loss the streams that the flags ask for, whatever else its rows hold."""

from pathlib import Path

import pytest

from megatron.rl.arguments import resolve
from megatron.rl.build import check_data, make_source
from megatron.rl.rollout import plan_rollout
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
    assert plan_rollout(0, source.rollout(0), config).streams == streams
