"""Valid files, damaged at random: refused by name, or read as what they then hold."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.megatron.rl.sources import fuzz

WRITERS = {".jsonl": fuzz.jsonl_bytes, ".parquet": fuzz.parquet_bytes, ".pt": fuzz.dump_bytes}


def outcomes(suffix: str, write: Callable[[], bytes], folder: Path, seeds: range) -> Counter[str]:
    path = folder / f"rows{suffix}"
    whole = write()
    path.write_bytes(whole)
    assert fuzz.outcome(path) == "accepted"
    found: Counter[str] = Counter()
    for seed in seeds:
        path.write_bytes(fuzz.damaged(whole, random.Random(seed)))
        try:
            found[fuzz.outcome(path)] += 1
        except Exception as error:
            raise AssertionError(f"{suffix}, seed {seed}") from error
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of how its files are made
@pytest.mark.parametrize("suffix", WRITERS)
def test_damage_is_named_or_harmless(suffix: str, tmp_path: Path) -> None:
    found = outcomes(suffix, WRITERS[suffix], tmp_path, range(300))
    assert found["refused"] > 100
    assert found["accepted"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", WRITERS)
def test_much_damage_is_named_or_harmless(suffix: str, tmp_path: Path) -> None:
    found = outcomes(suffix, WRITERS[suffix], tmp_path, range(300, 20_000))
    assert found["refused"] > 1000
