"""The interpreter runs Python that Triton's compiler may refuse: so all variants are compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A variant's PTX each, for a GPU of compute capability 9.0."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py"), "90"],
        check=False,
        timeout=240,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("// _")[1:]


def test_every_variant_compiles(ptx: list[str]) -> None:
    names = [re.match(r"\w+", one)[0] for one in ptx]
    assert names == ["statistics_kernel", "gradient_kernel"] * 12
    assert all(re.search(r"^\.visible \.entry", one, flags=re.MULTILINE) for one in ptx)


def test_division_by_the_temperature_is_rounded_right(ptx: list[str]) -> None:
    divides = [count for one in ptx if (count := one.count("div.rn.f32")) > 0]
    assert len(divides) == 3 * 3 * 2
    assert not any("div.full" in one or "div.approx" in one for one in ptx)


def test_a_narrow_gradient_is_rounded_to_nearest(ptx: list[str]) -> None:
    for dtype, rounding in (("bf16", "cvt.rn.bf16"), ("fp16", "cvt.rn.f16")):
        found = [one for one in ptx if one.startswith(f"gradient_kernel *{dtype}")]
        assert len(found) == 4
        assert all(rounding in one for one in found)
