"""Rollouts that arrive during a run: taken in order, each once, whatever ends the run between."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import folder as watched
from megatron.rl.sources.check import ReadOptions
from megatron.rl.sources.files import RolloutRows
from megatron.rl.sources.folder import END, WatchedFolder
from megatron.rl.sources.source import EndOfRolloutsError
from megatron.rl.sources.spool import Entry, Spool, SpoolError
from megatron.rl.sources.spooled import SpooledSource
from megatron.rl.together import gathered, on_first_rank
from tests.megatron.rl.tiny import rollout_rows, write_rollouts
from tests.spawn import World


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "POLL_SECONDS", 0.0)


def source(tmp_path: Path, **fields: object) -> SpooledSource:
    """As a process that starts now would have it."""
    maker = WatchedFolder(tmp_path / "drop", samples_per_rollout=16)
    opened = SpooledSource(
        Spool(tmp_path / "spool"),
        maker,
        RowRules(),
        ReadOptions(),
        **fields,
    )
    opened.open()
    return opened


def drop(tmp_path: Path, name: str, rows: list[dict] | None = None, seed: int = 0) -> None:
    (tmp_path / "drop").mkdir(exist_ok=True)
    hidden = write_rollouts(tmp_path / "drop" / ".hidden", rows or rollout_rows(seed=seed))
    hidden.rename(tmp_path / "drop" / name)


def rewards(rows: RolloutRows) -> list[float]:
    return rows.files.rows["reward"][rows.places].tolist()


def lengths(rows: RolloutRows) -> list[int]:
    return [sample.total_length for sample in rows.files.read(rows.places)]


def test_files_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    taken = source(tmp_path)
    assert taken.rollout(0, 0) is None  # the folder itself is not there yet
    for number in (10, 9, 2):
        drop(tmp_path, f"r{number}.jsonl", seed=number)
    drop(tmp_path, "_r1.jsonl")
    drop(tmp_path, "r1.jsonl.tmp")
    names = [Path(taken.rollout(k, 0).files.paths[0]).name for k in range(3)]
    assert names == ["r2.jsonl", "r9.jsonl", "r10.jsonl"]
    assert taken.rollout(3, 0) is None
    (tmp_path / "drop" / END).touch()
    with pytest.raises(EndOfRolloutsError, match="END: 3 rollouts were all"):
        taken.rollout(3, 0)


def test_a_restart_finds_what_it_was_given_and_takes_nothing_twice(tmp_path: Path) -> None:
    for number in range(3):
        drop(tmp_path, f"r{number}.jsonl", seed=number)
    first = source(tmp_path)
    given = [lengths(first.rollout(k, 0)) for k in range(2)]
    drop(tmp_path, "r00.jsonl", seed=7)  # sorts before what was taken
    again = source(tmp_path)
    assert [lengths(again.rollout(k, 0)) for k in range(2)] == given
    assert Path(again.rollout(2, 0).files.paths[0]).name == "r2.jsonl"
    assert again.rollout(3, 0) is None


def test_a_file_that_comes_too_late_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = source(tmp_path)
    for number in (1, 2):
        drop(tmp_path, f"r{number}.jsonl")
        taken.rollout(number - 1, 0)
    drop(tmp_path, "r0.jsonl")
    assert taken.rollout(2, 0) is None
    assert taken.rollout(2, 0) is None
    assert caplog.text.count("r0.jsonl in") == 1
    assert caplog.text.count("came too late") == 1  # and none of those that were taken


def test_a_wait_says_what_for_and_not_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megatron.rl.sources")
    taken = source(tmp_path)
    drop(tmp_path, "a.jsonl")
    taken.rollout(0, 0)
    for _ in range(5):
        assert taken.rollout(1, 0) is None
    assert caplog.text.count("waiting 0 min for the file of rollout 1 behind a.jsonl") == 1


def test_a_bad_file_is_not_noted_and_is_read_again_once_mended(tmp_path: Path) -> None:
    drop(tmp_path, "a.jsonl", [{"tokens": [1, 2], "response_length": 2}])
    with pytest.raises(BadRowsError, match=r"a.jsonl:1: response_length"):
        source(tmp_path).rollout(0, 0)
    drop(tmp_path, "a.jsonl")
    assert len(source(tmp_path).rollout(0, 0).places) == 16


def test_a_file_that_changed_since_it_was_taken_is_refused(tmp_path: Path) -> None:
    drop(tmp_path, "a.jsonl")
    source(tmp_path).rollout(0, 0)
    drop(tmp_path, "a.jsonl", seed=1)
    with pytest.raises(SpoolError, match=r"rollout 0 must be what it was.*a.jsonl changed"):
        source(tmp_path).rollout(0, 0)


def test_the_spool_of_another_run_is_refused(tmp_path: Path) -> None:
    source(tmp_path)
    with pytest.raises(SpoolError, match=r"seed is 2, was None.*--rollout-dir"):
        Spool(tmp_path / "spool").open({"seed": 2, **WatchedFolder(tmp_path).identity()})


def test_a_broken_or_missing_entry_is_named(tmp_path: Path) -> None:
    drop(tmp_path, "a.jsonl")
    taken = source(tmp_path)
    taken.rollout(0, 0)
    entry = tmp_path / "spool" / "rollout_0000000.json"
    entry.write_text(entry.read_text()[:10])
    with pytest.raises(SpoolError, match=r"rollout_0000000.json must name the files"):
        source(tmp_path).rollout(0, 0)
    entry.unlink()
    with pytest.raises(SpoolError, match="must hold rollout 0, behind which rollout 1 goes on"):
        source(tmp_path).rollout(1, 0)


def test_stale_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [row | {"weight_version": row["index"]} for row in rollout_rows()]
    rows[3].pop("weight_version")
    drop(tmp_path, "a.jsonl", rows)
    found = source(tmp_path, max_staleness=4).rollout(0, 10)
    kept = found.files.rows["index"][found.places]
    assert sorted(kept.tolist()) == [3, *range(6, 16)]  # a sample without a version is kept
    assert found.scalars["rollout/stale_samples"] == 5
    assert found.scalars["rollout/staleness/max"] == 10
    everything = source(tmp_path).rollout(0, 10)
    assert len(everything.places) == 16
    assert "rollout/stale_samples" not in everything.scalars


def test_rows_that_were_made_are_written_whole_and_found_by_any_folder_name(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.open({})
    name = spool.write_rows(4, rollout_rows())
    spool.put(4, Entry((name,), {"prompt": 4}, {"rollout/x": 0.5}))
    moved = Spool((tmp_path / "spool").rename(tmp_path / "moved"))
    entry = moved.get(4)
    assert entry == Entry((name,), {"prompt": 4}, {"rollout/x": 0.5})
    [path] = moved.paths(entry)
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == rollout_rows()
    assert moved.get(5) is None


def on_ranks(rank: int) -> list[object]:
    """What ranks get of a function that fails on one of them."""

    def fail_on(which: int) -> int:
        if rank == which:
            raise SpoolError(f"rank {rank}")
        return rank

    found: list[object] = [on_first_rank(lambda: fail_on(1)), gathered(lambda: fail_on(5))]
    for attempt in (
        lambda: on_first_rank(lambda: fail_on(0)),
        lambda: gathered(lambda: fail_on(1)),
    ):
        try:
            attempt()
        except SpoolError as error:
            found.append(str(error))
    return found


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    with World(2, timeout_s=120) as world:
        first, second = world.run(on_ranks)
    assert first == [0, [0, 1], "rank 0", "rank 1"]
    assert second == [0, None, "rank 0", "rank 1"]


def test_foreseen_sizes_need_a_number_of_rollouts(tmp_path: Path) -> None:
    assert list(source(tmp_path).rollout_sizes()) == []
    assert list(source(tmp_path, num_rollouts=3).rollout_sizes()) == [16, 16, 16]
