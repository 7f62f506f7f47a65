"""A number outside of its range is refused, with the flag and the range."""

from pathlib import Path

import pytest

from megatron.rl.flags.generate import all_flags
from megatron.rl.flags.ranges import RANGES, out_of_range
from tests.megatron.rl.flags.command_line import small_run, violations


@pytest.mark.parametrize("name", RANGES)
def test_every_range_is_checked(tmp_path: Path, name: str) -> None:
    assert name in all_flags()
    flag = all_flags()[name]
    argv = small_run(tmp_path, f"{flag.spelling} -1")
    (violation,) = [v for v in violations(argv) if v.flag == flag.spelling]
    assert violation.rule == RANGES[name].text
    assert violation.given in ("-1 (command line)", "-1.0 (command line)")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("rollout_top_p", [1e-9, 1.0], [0.0, 1.1]),
        ("lr_warmup_fraction", [0.0, 0.999, None], [1.0, -0.1]),
        ("lr", [1e-9], [0.0, float("nan"), float("inf")]),
        ("entropy_coef", [-1.0, 0.0], [float("nan"), float("-inf")]),
        ("train_iters", [0, None], [-1]),
        ("seed", [0, 2**31 - 1], [2**31]),
    ],
)
def test_the_ends_of_ranges(name: str, good: list, bad: list) -> None:
    assert [out_of_range(name, value) for value in good] == [None] * len(good)
    assert None not in [out_of_range(name, value) for value in bad]
