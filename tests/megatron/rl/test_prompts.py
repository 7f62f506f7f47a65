"""Prompts from files and tasks: what a row becomes, which rows are refused, and their order."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.rl.prompt_files import PromptFiles, check_prompts
from megatron.rl.prompt_tasks import HELD_OUT, TaskConfig, TaskPrompts
from megatron.rl.prompts import Prompt, PromptConfig, PromptMaker, PromptSource
from megatron.rl.samples import BadRowsError
from megatron.rl.sources.order import epoch_order
from slime_loss.checked_config import ConfigError
from tests.megatron.rl.prompting import Letters

Write = Callable[..., str]
TOKENIZER = Letters()
DIALOGUE = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1"}]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(rows: Sequence[Any], name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        encoded = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return str(path)

    return lines


def check(path: str, **fields: Any) -> PromptFiles:
    return check_prompts([path], PromptConfig(**fields), TOKENIZER)


def text_of(prompt: Prompt) -> str:
    return TOKENIZER.decode(prompt.prompt_ids)


class TestRows:
    def test_text_messages_and_ids(self, write: Write) -> None:
        rows = [
            {"prompt": "1+1", "metadata": {"level": 3}, "other": None},
            {"prompt": DIALOGUE},
            {"prompt": "shown only", "prompt_ids": [65, 66]},
            {"prompt": [67, 68]},
        ]
        prompts = check(write(rows), apply_chat_template=True).read([0, 1, 2, 3])
        assert [text_of(p) for p in prompts] == [
            "<user>1+1",
            "<system>be short<user>1+1",
            "AB",
            "CD",
        ]
        assert [p.text for p in prompts] == ["1+1", None, None, None]
        assert [p.messages for p in prompts] == [None, DIALOGUE, None, None]
        assert [p.metadata for p in prompts] == [{"level": 3}, {}, {}, {}]
        assert [p.label for p in prompts] == [None] * 4
        assert prompts[0].prompt_ids.dtype == np.int64
        assert prompts[3].origin.endswith("prompts.jsonl:4")

    def test_fields_by_their_keys(self, write: Write) -> None:
        path = write([{"question": "a", "answer": 7, "info": {"x": 1}}])
        keys = {"input_key": "question", "label_key": "answer", "metadata_key": "info"}
        (prompt,) = check(path, **keys).read([0])
        assert (text_of(prompt), prompt.label, prompt.metadata) == ("a", "7", {"x": 1})

    def test_parquet_gives_the_same(self, write: Write, tmp_path: Path) -> None:
        named = [DIALOGUE[0], DIALOGUE[1] | {"name": "me"}]
        rows = [{"prompt": named, "label": str(i), "metadata": {"n": i}} for i in range(10)]
        path = str(tmp_path / "prompts.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
        fields = {"label_key": "label", "apply_chat_template": True}
        parquet, jsonl = check(path, **fields), check(write(rows), **fields)
        assert parquet.fingerprint == jsonl.fingerprint
        order = [7, 0, 9, 3]
        for ours, theirs in zip(parquet.read(order), jsonl.read(order), strict=True):
            assert text_of(ours) == text_of(theirs)
            assert (ours.label, ours.metadata) == (theirs.label, theirs.metadata)
            assert ours.messages == theirs.messages == named

    def test_blank_lines_are_no_rows(self, write: Write) -> None:
        files = check(write([b"", {"prompt": "a"}, b"  ", {"prompt": "b"}]))
        assert [text_of(p) for p in files.read([1, 0])] == ["b", "a"]
        assert files.read([1])[0].origin.endswith(":4")


BAD_ROWS = [
    ({"prmpt": "a"}, "prompt must be given (fields of the row: prmpt): prompt=None; fix: check"),
    ({"prompt": ""}, "prompt must have a token: prompt=none"),
    ({"prompt": []}, "prompt must be a text, a list of messages or a list of ids: prompt=[]"),
    ({"prompt": 3}, "prompt must be a text, a list of messages or a list of ids: prompt=3"),
    ({"prompt": DIALOGUE}, "prompt must be a text without a chat template"),
    ({"prompt": [{"role": "user"}]}, "prompt[0] must have a role and a content that are text"),
    ({"prompt": [{"role": "u", "content": ""}, 3]}, "prompt[1] must have a role and a content"),
    ({"prompt": "wörld"}, "prompt must be what the tokenizer takes (text must be ASCII"),
    ({"prompt_ids": [1, 128]}, "prompt_ids[1] must be an id in [0, 128): prompt_ids[1]=128"),
    ({"prompt_ids": [1, True]}, "prompt_ids[1] must be an id in [0, 128)"),
    ({"prompt": "a", "metadata": 3}, "metadata must be an object: metadata=3"),
    ({"prompt": "abcdefghijk"}, "prompt must have at most 10 tokens: prompt=11 tokens; fix:"),
    (b'{"prompt": "a', "line must be one whole JSON object"),
    (b"[1]", "line must be a JSON object: line=[1]"),
    (b'{"prompt": "\xff"}', "line must be one whole JSON object"),
]


class TestBadRows:
    @pytest.mark.parametrize(("row", "message"), BAD_ROWS)
    def test_are_named_with_their_line(self, write: Write, row: Any, message: str) -> None:
        path = write([{"prompt": "a"}, row])
        with pytest.raises(BadRowsError) as refused:
            check(path, max_prompt_length=10)
        first, second = str(refused.value).splitlines()
        assert first == "prompt data has 1 error(s):"
        assert second.startswith(f"  {path}:2: {message}")

    def test_a_label_that_is_asked_for(self, write: Write) -> None:
        path = write([{"prompt": "a", "label": "1"}, {"prompt": "a", "label": None}])
        with pytest.raises(BadRowsError, match=r":2: label must be given: label=None; fix: give"):
            check(path, label_key="label")
        assert check(path).read([1])[0].label is None

    def test_can_be_skipped_and_are_counted(self, write: Write) -> None:
        files = check(write([{"prompt": 3}, {"prompt": "a"}, b"{"]), bad_rows="skip")
        assert (len(files), files.num_bad_rows) == (1, 2)

    def test_long_ones_can_be_dropped_and_are_counted(self, write: Write) -> None:
        rows = [{"prompt": "x" * n} for n in (5, 20, 10, 11)]
        files = check(write(rows), max_prompt_length=10, long_prompts="drop")
        assert (len(files), files.num_long) == (2, 2)
        assert [len(p.prompt_ids) for p in files.read([0, 1])] == [5, 10]
        with pytest.raises(BadRowsError, match=r"must leave a prompt: file=none \(4 too long"):
            check(write(rows), max_prompt_length=4, long_prompts="drop")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("p.jsonl", b"", "file must hold rows: file=empty"),
            ("p.jsonl", b"\n\n", "file must hold rows: file=blank"),
            ("p.txt", b"hi\n", "file must end in .jsonl"),
            ("p.pt", b"hi\n", "file must end in .jsonl or .parquet"),
            ("p.parquet", b"hi\n", "file must be a whole Parquet file"),
        ],
    )
    def test_files_that_cannot_be_used(
        self, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadRowsError) as refused:
            check(str(tmp_path / name), bad_rows="skip")
        assert f"{tmp_path / name}: {message}" in str(refused.value)

    def test_a_path_that_leads_nowhere(self) -> None:
        with pytest.raises(BadRowsError, match=r"/no/such\.jsonl: file must be readable"):
            check("/no/such.jsonl")

    def test_columns_that_are_not_there(self, tmp_path: Path) -> None:
        path = str(tmp_path / "p.parquet")
        pq.write_table(pa.table({"x": [1]}), path)
        fix = "name columns as the fields are called: prompt, metadata, prompt_ids"
        with pytest.raises(BadRowsError, match=f"must have a column that is read.*{fix}"):
            check(path)

    def test_a_file_that_changes_during_the_run(self, write: Write) -> None:
        files = check(write([{"prompt": "a", "metadata": {"n": 1}}]))
        write([{"prompt": "a", "metadata": {"n": 2}}])
        with pytest.raises(BadRowsError, match=r"must be the file that was checked.*another"):
            files.read([0])


class TestFingerprint:
    ROWS = ({"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"})

    def test_is_of_the_prompts(self, write: Write) -> None:
        known = check(write(self.ROWS)).fingerprint
        assert check(write(self.ROWS, name="elsewhere.jsonl")).fingerprint == known
        changed = [
            check(write(self.ROWS[::-1])),
            check(write(self.ROWS[:1])),
            check(write(self.ROWS), label_key="label"),
            check(write(self.ROWS), apply_chat_template=True),
        ]
        assert len({known, *(files.fingerprint for files in changed)}) == 5


class TestOrder:
    def test_every_epoch_has_every_prompt_once_in_its_own_order(self, write: Write) -> None:
        files = check(write([{"prompt": f"{i}"} for i in range(50)]))
        source = PromptSource(files, seed=3)
        positions = [source.position(j) for j in range(150)]
        epochs = [positions[i : i + 50] for i in (0, 50, 100)]
        assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert epochs[1] == epoch_order(50, 3, 1).tolist()

    def test_is_a_function_of_the_number_alone(self, write: Write) -> None:
        files = check(write([{"prompt": f"{i}"} for i in range(7)]))
        source = PromptSource(files, seed=1)
        at_once = [text_of(p) for p in source.take(0, 20)]
        resumed = PromptSource(files, seed=1)
        assert [text_of(resumed.take(j, 1)[0]) for j in reversed(range(20))] == at_once[::-1]
        assert at_once != [text_of(p) for p in PromptSource(files, seed=2).take(0, 20)]

    def test_without_shuffling(self, write: Write) -> None:
        files = check(write([{"prompt": c} for c in "abc"]))
        taken = PromptSource(files, shuffle=False).take(2, 4)
        assert [text_of(p) for p in taken] == ["c", "a", "b", "c"]

    def test_what_cannot_be(self, write: Write) -> None:
        files = check(write([{"prompt": "a"}]))
        with pytest.raises(ValueError, match="seed must not be negative: seed=-1"):
            PromptSource(files, seed=-1)
        with pytest.raises(ValueError, match="number must not be negative: number=-1"):
            PromptSource(files).take(-1, 1)


def maker(**fields: Any) -> PromptMaker:
    return PromptMaker(PromptConfig(**fields), TOKENIZER)


class TestTasks:
    def test_items_are_made_by_number(self) -> None:
        prompts = TaskPrompts(TaskConfig("chain_sum", {"max_terms": 2}, size=50), maker())
        first, again = prompts.read([7, 7])
        assert text_of(first) == text_of(again) == first.text
        left, operator, right = first.text.split(": ")[1].split(" ")[:3]
        value = int(left) + int(right) * (1 if operator == "+" else -1)
        assert first.label == str(value)
        assert first.origin == "task chain_sum:7"
        assert first.metadata == {
            "task": "chain_sum",
            "task_parameters": {"max_terms": 2},
            "seed": 0,
            "size": 50,
            "item": 7,
        }
        assert len(prompts) == 50

    def test_held_out_items_have_seeds_of_their_own(self) -> None:
        size = 200
        parameters = {"min_digits": 4, "min_terms": 5}
        sets = [
            TaskPrompts(TaskConfig("chain_sum", parameters, size, seed, held), maker())
            for seed, held in ((0, False), (size, False), (0, True), (size, True))
        ]
        texts = [{text_of(p) for p in prompts.read(range(size))} for prompts in sets]
        assert len(set.union(*texts)) == 4 * size
        last = TaskConfig("chain_sum", size=1, seed=HELD_OUT - 1)
        assert last.seed < HELD_OUT
        with pytest.raises(ConfigError, match="seed plus size must be at most 1073741824: seed=1"):
            TaskConfig("chain_sum", size=2, seed=HELD_OUT - 1)

    def test_a_system_prompt(self) -> None:
        config = TaskConfig("chain_sum", size=1, system_prompt="be short")
        question = TaskPrompts(TaskConfig("chain_sum", size=1), maker()).read([0])[0].text
        (plain,) = TaskPrompts(config, maker()).read([0])
        assert plain.text == f"be short\n\n{question}"
        (chat,) = TaskPrompts(config, maker(apply_chat_template=True)).read([0])
        assert text_of(chat) == f"<system>be short<user>{question}"

    def test_long_items(self) -> None:
        config = TaskConfig("chain_sum", size=100)
        lengths = [len(p.prompt_ids) for p in TaskPrompts(config, maker()).read(range(100))]
        limit = int(np.median(lengths))
        kept = TaskPrompts(config, maker(max_prompt_length=limit, long_prompts="drop"))
        short = [length for length in lengths if length <= limit]
        assert [len(p.prompt_ids) for p in kept.read(range(len(kept)))] == short
        assert kept.num_long == 100 - len(short) > 0
        first = next(i for i, length in enumerate(lengths) if length > limit)
        with pytest.raises(BadRowsError, match=f"task chain_sum:{first + 1}: prompt must have at"):
            TaskPrompts(config, maker(max_prompt_length=limit))
        with pytest.raises(BadRowsError, match="must have a prompt that is short enough"):
            TaskPrompts(config, maker(max_prompt_length=1, long_prompts="drop"))

    def test_the_fingerprint_is_of_the_items(self) -> None:
        changes = [
            {},
            {"seed": 1},
            {"size": 11},
            {"held_out": True},
            {"task": "basic_arithmetic"},
            {"task_parameters": {"max_terms": 3}},
            {"system_prompt": "be short"},
        ]
        configs = [TaskConfig(**({"task": "chain_sum", "size": 10} | change)) for change in changes]
        prints = [TaskPrompts(config, maker()).fingerprint for config in configs]
        assert len(set(prints)) == len(changes)
        assert TaskPrompts(configs[0], maker()).fingerprint == prints[0]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"task": "chain_sums"}, "task must be one of reasoning-gym's .chain_sum"),
            (
                {"task": "chain_sum", "task_parameters": {"max_term": 3}},
                "task_parameters must suit the task chain_sum .*max_term",
            ),
            (
                {"task": "chain_sum", "task_parameters": {"min_terms": 30}},
                "task_parameters must suit the task chain_sum .*max_terms must be >= min_terms",
            ),
            ({"task": "chain_sum", "size": 0}, "size must be positive: size=0"),
            ({"task": "chain_sum", "seed": -1}, "seed must not be negative"),
            ({"task": "chain_sum", "task_parameters": {"seed": 1}}, "must not have seed or size"),
        ],
    )
    def test_what_cannot_be(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            TaskPrompts(TaskConfig(**fields), maker())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_prompt_length": 0}, "max_prompt_length must be positive: max_prompt_length=0"),
        ({"input_key": ""}, "input_key must not be empty"),
        ({"input_key": "metadata"}, "metadata_key must differ from the other keys"),
        ({"label_key": "prompt"}, "metadata_key must differ from the other keys"),
        ({"long_prompts": "cut"}, "long_prompts must be one of error, drop"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptConfig(**fields)
