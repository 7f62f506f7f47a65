"""Scoring: the functions built in, functions of the user's, and what becomes of bad ones."""

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.rl.prompt_tasks import TaskConfig, TaskPrompts
from megatron.rl.prompts import PromptConfig, PromptMaker
from megatron.rl.reward_functions import RewardInput, extract_answer, load_reward, reward_of
from megatron.rl.rewards import RewardConfig, RewardError, RewardPool, SampleError
from slime_loss.checked_config import ConfigError
from tests.megatron.rl.prompting import Letters

SLOW = 60.0
"""A time limit that a busy machine does not reach."""


def sample(response: str, index: int = 0, **fields: Any) -> RewardInput:
    return RewardInput(index=index, response=response, **fields)


class TestAnswers:
    @pytest.mark.parametrize(
        ("response", "answer"),
        [
            ("  7 \n", "7"),
            ("so <answer> 7 </answer> it is", "7"),
            ("<answer>6</answer> no, <answer>\n7</answer>", "7"),
            ("<answer>6</answer> or <answer>7", "6"),
            ("</answer> 7", "</answer> 7"),
            ("", ""),
        ],
    )
    def test_are_the_last_ones_marked(self, response: str, answer: str) -> None:
        assert extract_answer(response) == answer


class TestExact:
    @pytest.mark.parametrize(
        ("response", "label", "expected"),
        [("7", "7", 1.0), ("<answer>7</answer>", " 7 ", 1.0), ("7.0", "7", 0.0), ("17", "7", 0.0)],
    )
    def test_is_letter_by_letter(self, response: str, label: str, expected: float) -> None:
        assert load_reward("exact")(sample(response, label=label)) == expected

    def test_needs_a_label(self) -> None:
        with pytest.raises(ValueError, match=r"label must be given .--label-key"):
            load_reward("exact")(sample("7"))


class TestMath:
    @pytest.mark.parametrize(
        ("response", "label", "expected"),
        [
            ("so it is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
            ("The answer is $x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
            ("The answer is 3.", "4", 0.0),
            ("I do not know", "4", 0.0),
            ("\\boxed{4}", "\\boxed{4}", 1.0),
        ],
    )
    def test_compares_values(self, response: str, label: str, expected: float) -> None:
        assert load_reward("math")(sample(response, label=label)) == expected

    def test_a_label_that_is_no_expression(self) -> None:
        with pytest.raises(ValueError, match="label must be a mathematical expression: label=''"):
            load_reward("math")(sample("4", label=""))


class Bytes(Letters):
    """A token for each byte of UTF-8."""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


class TestTask:
    @pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "acre", "gcd"])
    def test_scores_its_own_answers(self, task: str) -> None:
        maker = PromptMaker(PromptConfig(apply_chat_template=True), Bytes())
        config = TaskConfig(task, size=20, seed=5)
        score = load_reward(f"reasoning-gym:{task}")
        for prompt in TaskPrompts(config, maker).read(range(20)):
            fields = {"label": prompt.label, "metadata": prompt.metadata}
            right = f"I think: <answer>{prompt.label}</answer>"
            assert score(sample(right, **fields)) == 1.0
            assert score(sample("<answer>nothing</answer>", **fields)) < 1.0

    def test_items_of_another_origin_are_scored_by_their_label(self) -> None:
        score = load_reward("reasoning-gym:chain_sum")
        assert score(sample("12", label="12")) == 1.0
        assert score(sample("13", label="12")) == 0.0

    def test_samples_of_another_task_are_refused(self) -> None:
        with pytest.raises(ValueError, match="metadata must be of the task chain_sum: task='gcd'"):
            load_reward("reasoning-gym:chain_sum")(sample("1", metadata={"task": "gcd"}))


class TestValues:
    @pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array([1.0]), np.int64(1)])
    def test_numbers_of_any_kind(self, value: Any) -> None:
        assert reward_of(value, None) == (1.0, {})

    def test_a_part_of_a_dict(self) -> None:
        assert reward_of({"score": 1, "form": 0.5}, "score") == (1.0, {"score": 1.0, "form": 0.5})

    @pytest.mark.parametrize(
        ("value", "key", "message"),
        [
            (float("nan"), None, "reward must be a finite number: reward=nan"),
            (float("inf"), None, "reward must be a finite number: reward=inf"),
            (None, None, "reward must be a finite number: reward=None"),
            ("1", None, "reward must be a finite number: reward='1'"),
            (1.0, "score", "reward must be a dict, since reward_key=score"),
            ({"a": 1, "b": 2}, None, "reward must be a number, or reward_key one of its parts: a"),
            ({"a": 1}, "b", "reward_key must be one of the reward's parts .a.: 'b'"),
            ({"a": 1, "b": None}, "a", "b must be a finite number: b=None"),
        ],
    )
    def test_all_else_is_refused(self, value: Any, key: str | None, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            reward_of(value, key)


OWN = '''
import os, subprocess, sys, time

def by_response(sample):
    """What the response says is done."""
    print("printed")
    print(sys.stdin.read(), end="")
    return getattr(sys.modules[__name__], sample.response)(sample)

def one(sample): return 1.0
def pid(sample): return float(os.getpid())
def length(sample): return float(len(sample.prompt_ids) + 10 * len(sample.response_ids))
def known(sample):
    return float((sample.prompt, sample.label, sample.metadata) == ("p", "l", {"m": 1}))
def nan(sample): return float("nan")
def fail(sample): raise KeyError("no such thing")
def leave(sample): sys.exit(0)
def die(sample): os._exit(3)
def crash(sample): os.kill(os.getpid(), 11)
def hang(sample):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(sample.metadata["file"], "w") as file: file.write(str(child.pid))
    while True:
        try: time.sleep(3600)
        except BaseException: pass

def parts(sample):
    if sample.response == "none": return 1.0
    score = {"score": float(len(sample.response)), "form": 0.5}
    return score | ({"extra": 2.0} if sample.response == "abc" else {})

async def waits(sample): return 1.0
def none(): return 1.0
number = 3
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(OWN, encoding="utf-8")
    (folder / "broken_rewards.py").write_text("1 / 0", encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def config(**fields: Any) -> RewardConfig:
    defaults = {"reward": "own_rewards:by_response", "time_limit": SLOW, "num_workers": 1}
    return RewardConfig(**(defaults | fields))


def is_alive(pid: str) -> bool:
    """Whether a process runs; one that nobody waited for yet has ended too."""
    try:
        return not Path("/proc", pid, "stat").read_text().split(") ")[1].startswith("Z")
    except OSError:
        return False


@pytest.mark.usefixtures("own")
class TestPool:
    def test_one_bad_sample_costs_its_own_reward_alone(self) -> None:
        names = ["one", "fail", "nan", "leave", "die", "crash", "one"]
        with RewardPool(config()) as pool:
            found = pool.score([sample(name, index=100 + i) for i, name in enumerate(names)])
        assert found.scored.tolist() == [True, False, False, False, False, False, True]
        np.testing.assert_array_equal(found.rewards, [1.0] + [np.nan] * 5 + [1.0])
        assert found.num_errors == 5
        assert [str(error) for error in found.errors] == [
            "sample 101: KeyError: 'no such thing'",
            "sample 102: ValueError: reward must be a finite number: reward=nan",
            "sample 103: SystemExit: 0",
            "sample 104: its process ended (exit code 3)",
            "sample 105: its process ended (SIGSEGV)",
        ]

    def test_what_hangs_is_killed_with_all_it_started(self, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        hung = sample("hang", index=7, metadata={"file": str(file)})
        with RewardPool(config(time_limit=5.0)) as pool:
            found = pool.score([hung, sample("one")])
        assert found.errors == (SampleError(7, "took more than 5 s to score"),)
        assert found.scored.tolist() == [False, True]
        assert not is_alive(file.read_text())

    def test_closing_does_not_wait(self, tmp_path: Path) -> None:
        files = [tmp_path / str(i) for i in range(20)]
        hung = [sample("hang", metadata={"file": str(file)}) for file in files]
        pool = RewardPool(config(time_limit=1e6, num_workers=2))
        with ThreadPoolExecutor(1) as thread:
            scored = thread.submit(pool.score, hung)
            while not (files[1].exists() and files[1].read_text()):
                time.sleep(0.1)
            pool.close()
            assert scored.exception() is not None
        assert [file.exists() for file in files] == [True, True] + [False] * 18
        assert not is_alive(files[1].read_text())
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.score([sample("one")])

    def test_what_hangs_ends_with_the_run(self, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        hung = sample("hang", metadata={"file": str(file)})
        given = [sys.path, ("own_rewards:by_response", None), hung]
        run = (
            "import os, subprocess, sys\n"
            "from megatron.rl.reward_worker import COMMAND\n"
            "command = [sys.executable, '-c', COMMAND]\n"
            "pipe = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}\n"
            "worker = subprocess.Popen(command, start_new_session=True, **pipe)\n"
            "worker.stdin.write(sys.stdin.buffer.read()); worker.stdin.flush()\n"
            f"while not (os.path.exists({str(file)!r}) and os.path.getsize({str(file)!r})): pass\n"
            "print(worker.pid, flush=True); os._exit(9)\n"
        )
        requests = b"".join(pickle.dumps(request) for request in given)
        done = subprocess.run(
            [sys.executable, "-c", run],
            input=requests,
            stdout=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=SLOW,
        )
        assert done.returncode == 9
        for pid in (done.stdout.decode().strip(), file.read_text()):
            deadline = time.monotonic() + SLOW
            while is_alive(pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not is_alive(pid)

    def test_samples_are_handed_over_whole_and_in_order(self) -> None:
        fields = {"prompt": "p", "label": "l", "metadata": {"m": 1}}
        ids = {"prompt_ids": np.arange(3), "response_ids": np.arange(100_000)}
        given = [sample("length", **ids), sample("known", **fields), *[sample("pid")] * 20]
        with RewardPool(config(num_workers=2)) as pool:
            found = pool.score(given)
            assert len(pool.score([]).rewards) == 0
        assert found.rewards[:2].tolist() == [1_000_003.0, 1.0]
        assert len(set(found.rewards[2:])) <= 2
        assert os.getpid() not in found.rewards[2:]
        assert found.num_errors == 0

    def test_errors_may_end_the_run(self) -> None:
        given = [sample("fail", index=i) for i in range(7)]
        with RewardPool(config(reward_errors="error")) as pool:
            with pytest.raises(RewardError) as refused:
                pool.score(given)
            assert pool.score([sample("one")]).rewards.tolist() == [1.0]
        lines = str(refused.value).splitlines()
        assert lines[0] == "reward own_rewards:by_response failed for 7 sample(s):"
        assert lines[1] == "  sample 0: KeyError: 'no such thing'"
        assert lines[-1] == "  ... and 2 more"

    def test_parts(self) -> None:
        fields = {"reward": "own_rewards:parts", "reward_key": "score"}
        with RewardPool(config(**fields)) as pool:
            found = pool.score([sample("ab"), sample("none"), sample("abc")])
        np.testing.assert_array_equal(found.rewards, [2.0, np.nan, 3.0])
        np.testing.assert_array_equal(found.parts["extra"], [np.nan, np.nan, 2.0])
        assert found.part_means() == {"score": 2.5, "form": 0.5, "extra": 2.0}

    def test_the_function_that_the_document_shows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = (Path(__file__).parents[3] / "docs" / "prompts_and_rewards.md").read_text("utf-8")
        (code,) = re.findall(r"```python\n# my_rewards\.py\n(.*?)```", text, flags=re.DOTALL)
        (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        ids = {"label": "7", "response_ids": np.arange(100)}
        with RewardPool(config(reward="my_rewards:reward", reward_key="score")) as pool:
            found = pool.score([sample("it is 7", **ids), sample("8", **ids)])
        assert found.rewards.tolist() == [1.0, 0.0]
        assert found.part_means() == {"score": 0.5, "short": 0.0}

    @pytest.mark.parametrize(
        ("reward", "message"),
        [
            ("no_such_module:f", "must name a module that can be imported .ModuleNotFoundError"),
            ("broken_rewards:f", "must name a module that can be imported .ZeroDivisionError"),
            ("own_rewards:missing", "must name a function of .*own_rewards.py: 'missing'"),
            ("own_rewards:number", "must name a function of .*own_rewards.py: 'number'"),
            ("own_rewards:waits", "must name a plain function, not an async one"),
            ("own_rewards:none", "must name a function of one argument .too many positional"),
            ("reasoning-gym:chain_sums", "task must be one of reasoning-gym's .chain_sum"),
        ],
    )
    def test_functions_that_cannot_be_used(self, reward: str, message: str) -> None:
        with pytest.raises(ConfigError, match=f"reward must be a reward function .*{message}"):
            RewardPool(config(reward=reward))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": ""}, "reward must be one of exact, math, reasoning-gym:TASK or module:func"),
        ({"reward": "accuracy"}, "reward must be one of exact, math"),
        ({"reward": "reasoning-gym:"}, "reward must be one of exact, math"),
        ({"reward": "exact", "time_limit": 0.0}, "time_limit must be positive"),
        ({"reward": "exact", "num_workers": 0}, "num_workers must be positive"),
        ({"reward": "exact", "reward_errors": "drop"}, "reward_errors must be one of skip, error"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardConfig(**fields)
