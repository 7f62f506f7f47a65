"""What is drawn is what metrics.jsonl holds; what cannot be drawn is said in one line."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools import plot_run
from tools.plot_run import RunFileError

Value = float | None


def write_run(folder: Path, **series: Sequence[Value]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step} | dict(zip(series, values, strict=True))
        for step, values in enumerate(zip(*series.values(), strict=True), start=1)
    ]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def drawn(figure: plot_run.Figure) -> dict[str, list[list[float]]]:
    """The y values of every full-strength curve, by panel title."""
    return {
        axes.get_title(loc="left"): [
            list(map(float, line.get_ydata()))
            for line in axes.lines
            if line.get_alpha() is None and len(line.get_ydata()) > 0
        ]
        for axes in figure.axes
        if axes.get_title(loc="left")
    }


def loss_run(name: str = "run", values: Sequence[float] = (1.0, 0.5)) -> plot_run.Run:
    return plot_run.Run(
        name, np.arange(1, len(values) + 1), {"train/loss": np.array(values, dtype=float)}
    )


class TestReadRun:
    def test_gives_every_metric_of_every_step(self, tmp_path: Path) -> None:
        path = write_run(tmp_path, **{"train/loss": [-0.5, None, 2.0], "grad-norm": [1, 2, 3]})
        run = plot_run.read_run(path, "name")
        assert run.name == "name"
        np.testing.assert_array_equal(run.steps, [1, 2, 3])
        assert set(run.series) == {"train/loss", "grad-norm"}
        np.testing.assert_array_equal(run.series["train/loss"], [-0.5, math.nan, 2.0])
        np.testing.assert_array_equal(run.series["grad-norm"], [1.0, 2.0, 3.0])

    def test_a_metric_that_comes_later_is_nan_before(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 5, "a": 1}\n{"step": 6, "a": 2, "b": 3}\n', encoding="utf-8")
        run = plot_run.read_run(path, "name")
        np.testing.assert_array_equal(run.steps, [5, 6])
        np.testing.assert_array_equal(run.series["b"], [math.nan, 3.0])

    def test_leaves_out_the_line_that_a_job_is_writing(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"', encoding="utf-8")
        np.testing.assert_array_equal(plot_run.read_run(path, "name").steps, [1])

    @pytest.mark.parametrize("line", ["{", "[]", "3", '{"a": 1}', '{"step": null}'])
    def test_names_a_broken_line(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"step": 1, "a": 1}}\n{line}\n', encoding="utf-8")
        with pytest.raises(RunFileError, match=r"metrics\.jsonl:2 must be an object with a step"):
            plot_run.read_run(path, "name")

    def test_refuses_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text("", encoding="utf-8")
        with pytest.raises(RunFileError, match="must record at least one step"):
            plot_run.read_run(path, "name")


class TestFindMetrics:
    def test_finds_the_file_itself_or_in_the_folder_or_one_below(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "run" / "tensorboard", a=[1.0])
        for start in (path, path.parent, path.parent.parent):
            assert plot_run.find_metrics(start) == path

    def test_says_where_there_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(RunFileError, match=r"must be or hold a metrics\.jsonl"):
            plot_run.find_metrics(tmp_path)

    def test_does_not_choose_between_two(self, tmp_path: Path) -> None:
        write_run(tmp_path / "a", x=[1.0])
        write_run(tmp_path / "b", x=[1.0])
        with pytest.raises(RunFileError, match=r"must hold one run: found .*a/.*b/"):
            plot_run.find_metrics(tmp_path)


class TestRunNames:
    @pytest.mark.parametrize(
        ("files", "names"),
        [
            (["/r/quickstart/tensorboard/metrics.jsonl"], ["quickstart"]),
            (["/r/seed1/metrics.jsonl", "/r/seed2/metrics.jsonl"], ["seed1", "seed2"]),
            (
                ["/r/a/x/tensorboard/metrics.jsonl", "/r/b/x/tensorboard/metrics.jsonl"],
                ["a/x", "b/x"],
            ),
            (["/r/a/metrics.jsonl", "/r/a/metrics.jsonl"], ["a", "a"]),
        ],
    )
    def test_are_short_and_distinct(self, files: list[str], names: list[str]) -> None:
        assert plot_run.run_names([Path(file) for file in files]) == names


class TestSmooth:
    @pytest.mark.parametrize("width", [1, 2, 3, 50])
    def test_is_the_mean_of_the_last_finite_values(self, width: int) -> None:
        values = [math.nan, 1.0, -2.0, math.nan, math.nan, math.inf, 7.0, 0.5]
        expected = []
        for end in range(len(values)):
            window = [v for v in values[max(0, end + 1 - width) : end + 1] if math.isfinite(v)]
            expected.append(sum(window) / len(window) if window else math.nan)
        np.testing.assert_allclose(plot_run.smooth(np.array(values), width), expected, rtol=1e-15)


class TestChoosePanels:
    def test_keeps_what_exists(self) -> None:
        run = plot_run.Run(
            "run",
            np.array([1]),
            {
                name: np.ones(1)
                for name in ("train/loss", "train/pg_clipfrac", "train/pg_clipfrac_low", "other")
            }
            | {"train/pg_clipfrac": np.zeros(1)},
        )
        panels = plot_run.choose_panels([run], None)
        assert [(panel.title, panel.names) for panel in panels] == [
            ("Loss", ("train/loss",)),
            ("Clipped share of tokens", ("train/pg_clipfrac", "train/pg_clipfrac_low")),
        ]

    def test_leaves_out_a_curve_that_another_one_covers(self) -> None:
        loss, other = np.array([1.0, math.nan]), np.array([1.0, 0.5])
        same = plot_run.Run(
            "same", np.array([1, 2]), {"train/loss": loss, "train/pg_loss": loss.copy()}
        )
        differs = plot_run.Run(
            "differs", np.array([1, 2]), {"train/loss": loss, "train/pg_loss": other}
        )
        both = ("train/loss", "train/pg_loss")
        assert [panel.names for panel in plot_run.choose_panels([same], None)] == [both[:1]]
        assert [panel.names for panel in plot_run.choose_panels([same, differs], None)] == [both]

    def test_takes_what_is_asked_for(self) -> None:
        run = plot_run.Run("run", np.array([1]), {"a": np.ones(1), "b": np.ones(1)})
        panels = plot_run.choose_panels([run], ["b", "a"])
        assert [(panel.title, panel.names) for panel in panels] == [("b", ("b",)), ("a", ("a",))]

    def test_names_what_does_not_exist(self) -> None:
        with pytest.raises(RunFileError, match=r"\['nope'\]; there are \['train/loss'\]"):
            plot_run.choose_panels([loss_run()], ["train/loss", "nope"])

    def test_refuses_a_run_with_nothing_to_draw(self) -> None:
        run = plot_run.Run("run", np.array([1]), {"other": np.ones(1)})
        with pytest.raises(RunFileError, match=r"there are \['other'\]"):
            plot_run.choose_panels([run], None)


class TestDraw:
    def test_draws_the_values(self) -> None:
        run = plot_run.Run(
            "run",
            np.array([1, 2, 3]),
            {
                "train/loss": np.array([0.5, math.nan, -0.5]),
                "train/pg_loss": np.array([0.25, 0.125, 0.0]),
                "grad-norm": np.array([3.0, 2.0, 1.0]),
            },
        )
        curves = drawn(plot_run.draw([run], plot_run.choose_panels([run], None), width=None))
        assert set(curves) == {"Loss", "Gradient norm"}
        np.testing.assert_array_equal(curves["Loss"], [[0.5, math.nan, -0.5], [0.25, 0.125, 0.0]])
        assert curves["Gradient norm"] == [[3.0, 2.0, 1.0]]

    def test_smooths_what_is_noisy_and_no_schedule(self) -> None:
        values = np.arange(60.0)
        run = plot_run.Run("run", values + 1, {"train/loss": values, "learning-rate": values})
        curves = drawn(plot_run.draw([run], plot_run.choose_panels([run], None), width=None))
        np.testing.assert_array_equal(curves["Loss"][0], plot_run.smooth(values, 3))
        np.testing.assert_array_equal(curves["Learning rate"][0], values)

    def test_runs_lie_over_each_other_and_are_named(self) -> None:
        runs = [loss_run("first", [1.0, 0.5]), loss_run("second", [2.0, 1.5, 1.0])]
        figure = plot_run.draw(runs, plot_run.choose_panels(runs, None), width=1)
        assert drawn(figure) == {"Loss": [[1.0, 0.5], [2.0, 1.5, 1.0]]}
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]
        colors = [line.get_color() for line in legend.get_lines()]
        assert colors == [line.get_color() for line in figure.axes[0].lines]
        assert len(set(colors)) == 2

    def test_shades_skipped_steps(self) -> None:
        run = plot_run.Run(
            "run",
            np.array([4, 5, 6]),
            {
                "train/loss": np.array([1.0, math.nan, 0.5]),
                "skipped-iterations": np.array([0.0, 1.0, 0.0]),
            },
        )
        figure = plot_run.draw([run], plot_run.choose_panels([run], None), width=1)
        bands = [line.get_xdata() for line in figure.axes[0].lines if line.get_alpha() is not None]
        assert [list(map(int, band)) for band in bands] == [[5, 5]]
        assert figure.get_suptitle() == "run, skipped steps shaded"


class TestMain:
    def test_writes_a_picture(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_run(tmp_path / "run" / "tensorboard", **{"train/loss": [1.0, 0.5]})
        output = tmp_path / "new" / "curves.png"
        assert plot_run.main([str(tmp_path / "run"), "--output", str(output)]) == 0
        assert capsys.readouterr().out == f"{output}: run (2 steps)\n"
        with Image.open(output) as picture:
            assert picture.format == "PNG"
            darkest = np.asarray(picture.convert("RGB")).min(axis=(0, 1))
        assert (darkest < 10).all()

    def test_writes_beside_the_run_by_default(self, tmp_path: Path) -> None:
        write_run(tmp_path, **{"train/loss": [1.0, 0.5]})
        assert plot_run.main([str(tmp_path)]) == 0
        assert (tmp_path / "curves.png").is_file()

    def test_says_what_is_wrong_in_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plot_run.main([str(tmp_path), "--output", str(tmp_path / "curves.png")]) == 2
        assert capsys.readouterr() == (
            "",
            f"plot_run.py: {tmp_path} must be or hold a metrics.jsonl\n",
        )
        assert list(tmp_path.iterdir()) == []

    def test_runs_as_a_program(self, tmp_path: Path) -> None:
        write_run(tmp_path, **{"train/loss": [1.0, 0.5]})
        done = subprocess.run(
            [sys.executable, plot_run.__file__, str(tmp_path)],
            check=False,
            timeout=60,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "curves.png").is_file()
