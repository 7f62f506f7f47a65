import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import ReadOptions, check_rollouts

WriteDump = Callable[..., str]

RULES = RowRules(vocab_size=50, need_reward=True, need_group=True)


def sample_of(index: int, **changes: Any) -> dict[str, Any]:
    """What slime's `Sample.to_dict` holds."""
    return {
        "group_index": index // 2,
        "index": index,
        "prompt": [{"role": "user", "content": "2 + 3"}],
        "tokens": [1, 5, 7, 11, 13],
        "multimodal_inputs": None,
        "response": "5",
        "response_length": 2,
        "label": "5",
        "reward": {"score": 0.5, "length": 2},
        "loss_mask": None,
        "weight_versions": ["3"],
        "rollout_log_probs": [-0.5, -1.25],
        "rollout_routed_experts": np.zeros((5, 2, 2), np.int32),
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": "truncated",
        "metadata": {"level": 3},
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_verify_ct": 0},
        "prefix_cache_info": {"cached_tokens": 0},
    } | changes


@pytest.fixture
def write_dump(tmp_path: Path) -> WriteDump:
    def write(samples: object, name: str = "rollout_0.pt") -> str:
        torch.save({"rollout_id": 0, "samples": samples}, tmp_path / name)
        return str(tmp_path / name)

    return write


def errors_of(path: str, trust_pickle: bool = False) -> str:
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([path], RULES, ReadOptions(trust_pickle=trust_pickle))
    return str(caught.value)


def test_a_dump_is_read_as_slime_trains_it(write_dump: WriteDump) -> None:
    samples = [
        sample_of(0),
        sample_of(
            1,
            loss_mask=[0, 1],
            reward={"score": np.float32(0.25)},
            status="completed",
            values=torch.tensor([0.5, -2.0]),
            rollout_index=np.int64(0),
        ),
        sample_of(2, remove_sample=True, status="failed"),
        sample_of(
            3,
            tokens=torch.tensor([1, 2, 3, 4]),
            rollout_log_probs=np.array([-0.5, -4.0], np.float32),
            loss_mask=[np.int64(1), np.int64(1)],
            rollout_top_p_token_ids=torch.tensor([3, 4, 9], dtype=torch.int32),
            rollout_top_p_token_offsets=torch.tensor([0, 1, 3], dtype=torch.int32),
        ),
    ]
    files = check_rollouts([write_dump(samples)], RowRules(vocab_size=50, reward_key="score"))
    assert files.rows["reward"].tolist() == [0.5, 0.25, 0.5, 0.5]
    assert files.rows["num_trained_tokens"].tolist() == [2, 1, 0, 2]
    last, removed, masked, first = files.read([3, 2, 1, 0])
    assert first.tokens.tolist() == [1, 5, 7, 11, 13]
    assert first.rollout_log_probs.tolist() == [-0.5, -1.25]
    assert first.prompt == '[{"role": "user", "content": "2 + 3"}]'
    assert (first.status, first.label, first.response) == ("truncated", "5", "5")
    assert (first.group_index, masked.group_index, removed.group_index) == (0, 0, 1)
    assert first.origin.endswith("rollout_0.pt:1")
    assert masked.loss_mask.tolist() == [False, True]
    assert masked.values.tolist() == [0.5, -2.0]
    assert removed.loss_mask.tolist() == [False, False]
    assert last.tokens.tolist() == [1, 2, 3, 4]
    assert last.kept_ids.tolist() == [3, 4, 9]
    assert last.kept_offsets.tolist() == [0, 1, 3]


def test_a_group_never_spans_dumps(write_dump: WriteDump) -> None:
    paths = [write_dump([sample_of(0), sample_of(1)], f"rollout_{i}.pt") for i in range(2)]
    files = check_rollouts(paths, RowRules())
    assert files.rows["group"].tolist() == [0, 0, 1, 1]


def test_bad_samples_are_named_by_their_number(write_dump: WriteDump) -> None:
    samples = [
        sample_of(0, reward=1.0),
        sample_of(1, reward=1.0, response="", response_length=0, status="aborted"),
        sample_of(2, reward=float("nan")),
        sample_of(3, reward=1.0, tokens=torch.tensor([1, 2, 99])),
        "text",
    ]
    path = write_dump(samples)
    with pytest.raises(BadRowsError) as caught:
        check_rollouts([path], RULES)
    found = [(error.line, error.field, error.value) for error in caught.value.errors]
    assert found == [
        (2, "response_length", "0"),
        (3, "reward", "nan"),
        (4, "tokens[2]", "99"),
        (5, "line", "text"),
    ]


class Innocent:
    """A class of the dump's writer."""


class Malicious:
    """Unpickling it calls `os.mkdir`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_pickle_runs_no_code(write_dump: WriteDump, tmp_path: Path) -> None:
    path = write_dump([sample_of(0, metadata=Malicious(tmp_path / "owned"))])
    message = errors_of(path)
    assert f"{path}: file must hold plain values only" in message
    assert "mkdir" in message
    assert "fix: write the samples as JSONL, or pass --trust-pickle" in message
    assert not (tmp_path / "owned").exists()


def test_a_trusted_pickle_may(write_dump: WriteDump) -> None:
    path = write_dump([sample_of(0, reward=1.0, metadata=Innocent())])
    assert "Innocent" in errors_of(path)
    files = check_rollouts([path], RULES, ReadOptions(trust_pickle=True))
    assert files.read([0])[0].reward == 1.0


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_is_no_dump_is_refused(write_dump: WriteDump, tmp_path: Path) -> None:
    path = tmp_path / "rollout_0.pt"
    for content in ([1, 2], {"rollout_id": 0}, {"samples": {"a": 1}}, torch.ones(3)):
        torch.save(content, path)
        assert 'must be a slime dump, {"rollout_id", "samples": [dict]}' in errors_of(str(path))
    whole = Path(write_dump([sample_of(0)])).read_bytes()
    for content in (b"text", whole[:-200], pickle.dumps({"samples": []}), bytes(64)):
        path.write_bytes(content)
        message = errors_of(str(path), trust_pickle=content == b"text")
        assert f"{path}: file must " in message
    assert "must hold rows" in errors_of(write_dump([]))
