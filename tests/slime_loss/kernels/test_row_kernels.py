"""The kernels, interpreted on the CPU, against plain torch; that one against loops."""

import math

import pytest
import torch
from torch import Tensor

from slime_loss.kernels import logits_gradient_, row_statistics
from tests.slime_loss.references import without_type_checker
from tools.kernel_cases import (
    CASES,
    Case,
    Inputs,
    check_gradient,
    check_statistics,
    make_coefficients,
    make_inputs,
    plain_gradient,
    plain_statistics,
)

pytest.importorskip("triton")

EXACT = {"rtol": 0.0, "atol": 1e-12}
SMALL = [
    Case(7, temperature="rows", infinite=0.3, has_kept=True),
    Case(7, temperature="number"),
    Case(3, infinite=1.0),
    Case(0),
]


def scaled_row(inputs: Inputs, row: int) -> list[float]:
    """u of the columns of one row, -inf where they are dropped."""
    temperature = inputs.temperature
    divisor = temperature[row].item() if isinstance(temperature, Tensor) else temperature
    return [
        logit / divisor
        if inputs.kept is None or inputs.kept[row, column] or column == inputs.label_columns[row]
        else -math.inf
        for column, logit in enumerate(inputs.logits[row].tolist())
    ]


def looped_statistics(inputs: Inputs) -> Tensor:
    rows = []
    for row, label in enumerate(inputs.label_columns.tolist()):
        scaled = scaled_row(inputs, row)
        maximum = max([*scaled, torch.finfo(torch.float32).min])
        finite = [u - maximum for u in scaled if u > -math.inf]
        total = sum(math.exp(t) for t in finite)
        moment = sum(math.exp(t) * t for t in finite)
        rows.append([0.0 if label < 0 else scaled[label], maximum, total, moment])
    return torch.tensor(rows, dtype=torch.float64)


def looped_gradient(
    inputs: Inputs, maximum: Tensor, constant: Tensor, slope: Tensor | None, at_label: Tensor
) -> Tensor:
    gradient = torch.zeros(inputs.logits.shape, dtype=torch.float64)
    for row, label in enumerate(inputs.label_columns.tolist()):
        for column, u in enumerate(scaled_row(inputs, row)):
            if u > -math.inf:
                t = u - maximum[row].item()
                factor = constant[row].item() + (0 if slope is None else slope[row].item() * t)
                gradient[row, column] = math.exp(t) * factor
            if column == label:
                gradient[row, column] += at_label[row].item()
    return gradient


class TestPlainTorch:
    """What the kernels are measured by."""

    @pytest.mark.parametrize("case", SMALL, ids=str)
    def test_is_what_the_loops_say(self, case: Case) -> None:
        inputs = make_inputs(case)
        plain = plain_statistics(inputs, torch.float64)
        torch.testing.assert_close(plain, looped_statistics(inputs), **EXACT)
        for has_slope in (False, True):
            coefficients = make_coefficients(inputs, has_slope=has_slope)
            plain = plain_gradient(inputs, coefficients, torch.float64)
            torch.testing.assert_close(plain, looped_gradient(inputs, *coefficients), **EXACT)


class TestKernels:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_err_little_more_than_plain_torch(self, case: Case) -> None:
        inputs = make_inputs(case)
        before = inputs.logits.clone()
        checks = check_statistics(inputs)
        checks += [check_gradient(inputs, has_slope=has_slope) for has_slope in (False, True)]
        assert [check for check in checks if not check.passed] == []
        assert len({check.name for check in checks}) == 7
        torch.testing.assert_close(inputs.logits, before, rtol=0, atol=0)

    @pytest.mark.parametrize("with_moment", [False, True])
    def test_statistics_of_nothing(self, with_moment: bool) -> None:
        inputs = make_inputs(Case(0))
        found = row_statistics(
            inputs.logits, inputs.label_columns, 1.0, with_moment=with_moment
        ).tolist()
        assert found == [[0.0, torch.finfo(torch.float32).min, 0.0, 0.0][: 3 + with_moment]] * 5

    def test_nothing_but_the_slice_is_written(self) -> None:
        wide = torch.randn(3, 200)
        logits, behind = wide[:, :130], wide[:, 130:].clone()
        ones = torch.ones(3)
        logits_gradient_(logits, torch.tensor([0, 129, -1]), 1.0, ones, ones, None, ones)
        assert torch.equal(wide[:, 130:], behind)

    def test_a_label_that_is_no_column_is_one_of_another_slice(self) -> None:
        logits, ones = torch.randn(2, 130), torch.ones(2)
        results = []
        for labels in (torch.tensor([-1, -1]), torch.tensor([130, 2**40])):
            gradient = logits.clone()
            logits_gradient_(gradient, labels, 0.5, ones, ones, ones, ones)
            results.append((row_statistics(logits, labels, 0.5, with_moment=True), gradient))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    def test_a_number_that_is_not_finite_is_not_lost(self) -> None:
        logits = torch.zeros(2, 5000)
        logits[0, 3], logits[1, 4999] = math.nan, math.inf
        numbers = row_statistics(logits, torch.tensor([0, 0]), 1.0, with_moment=True)
        assert numbers[:, 2:].isnan().all()

    @pytest.mark.filterwarnings("ignore:overflow encountered")
    def test_logits_may_be_as_large_as_a_float_can_be(self) -> None:
        logits = torch.full((2, 3), 1e35)
        logits[1] = torch.finfo(torch.float32).max
        numbers = row_statistics(logits, torch.tensor([0, -1]), 1.0, with_moment=True)
        expected = [[logits[0, 0], logits[0, 0], 3.0, 0.0], [0.0, logits[1, 0], 3.0, 0.0]]
        torch.testing.assert_close(numbers, torch.tensor(expected), rtol=0, atol=0)

    def test_strides_of_the_mask_are_its_own(self) -> None:
        logits, labels, ones = torch.randn(3, 130), torch.tensor([0, 7, -1]), torch.ones(3)
        kept = torch.rand(3, 130) < 0.5
        results = []
        for mask in (kept, kept.T.contiguous().T, kept.repeat_interleave(3, dim=1)[:, ::3]):
            gradient = logits.clone()
            logits_gradient_(gradient, labels, 1.0, ones, ones, None, ones, kept=mask)
            statistics = row_statistics(logits, labels, 1.0, with_moment=True, kept=mask)
            results.append((statistics, gradient))
        for result in results[1:]:
            torch.testing.assert_close(results[0], result, rtol=0, atol=0)

    def test_rows_lie_beyond_what_32_bits_count(self) -> None:
        # Virtual memory, of which only the pages of the three rows are ever touched.
        stride, num_columns = 2**30 + 64, 5
        storage = torch.empty(2 * stride + num_columns, dtype=torch.bfloat16)
        far = storage.as_strided((3, num_columns), (stride, 1))
        far.copy_(torch.randn(3, num_columns))
        near, labels, ones = far.clone(), torch.tensor([0, 2, 4]), torch.ones(3)
        results = []
        for logits in (near, far):
            statistics = row_statistics(logits, labels, 1.0, with_moment=True)
            logits_gradient_(logits, labels, 1.0, ones, ones, None, ones)
            results.append((statistics, logits.clone()))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


class TestArguments:
    def statistics(self, **wrong: object) -> Tensor:
        right = {
            "logits": torch.zeros(2, 9),
            "label_columns": torch.tensor([0, -1]),
            "temperature": 1.0,
            "with_moment": True,
        }
        return row_statistics(**(right | wrong))

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                {"logits": torch.zeros(2, 9, dtype=torch.float64)},
                "logits must be float32, bfloat16 or float16: logits.dtype=torch.float64",
            ),
            ({"logits": torch.zeros(2)}, r"logits must be a matrix: logits.shape=\(2,\)"),
            (
                {"logits": torch.zeros(9, 2).T},
                r"logits must have its columns side by side: logits.stride\(\)=\(1, 2\)",
            ),
            (
                {"label_columns": torch.zeros(3, dtype=torch.int64)},
                r"label_columns must have one number per row of the logits: .*=\(3,\), .*=\(2, 9\)",
            ),
            (
                {"label_columns": torch.zeros(2, dtype=torch.int32)},
                "label_columns must be torch.int64: label_columns.dtype=torch.int32",
            ),
            (
                {"label_columns": torch.zeros(2, dtype=torch.int64, device="meta")},
                "label_columns must be on the device of the logits: .*=meta, .*=cpu",
            ),
            ({"temperature": 0.0}, "temperature must be finite and > 0: temperature=0"),
            ({"temperature": math.inf}, "temperature must be finite and > 0: temperature=inf"),
            (
                {"temperature": torch.ones(2, dtype=torch.float64)},
                "temperature must be torch.float32: temperature.dtype=torch.float64",
            ),
            (
                {"kept": torch.ones(2, 8, dtype=torch.bool)},
                r"kept must be bool with the shape of the logits: .*=\(2, 8\), .*=\(2, 9\)",
            ),
            ({"kept": torch.ones(2, 9)}, "kept must be bool .*: kept.dtype=torch.float32"),
        ],
    )
    def test_that_are_wrong_are_named(self, wrong: dict[str, object], message: str) -> None:
        with without_type_checker(), pytest.raises(ValueError, match=f"^{message}"):
            self.statistics(**wrong)

    @pytest.mark.parametrize("name", ["maximum", "constant", "slope", "at_label"])
    def test_of_the_gradient_are_named(self, name: str) -> None:
        right = dict.fromkeys(("maximum", "constant", "slope", "at_label"), torch.ones(2))
        wrong = right | {name: torch.ones(3)}
        with without_type_checker(), pytest.raises(ValueError, match=f"^{name} must have one"):
            logits_gradient_(torch.zeros(2, 9), torch.tensor([0, 1]), 1.0, **wrong)

    def test_need_a_cuda_device_unless_interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from slime_loss.kernels import row_kernels

        monkeypatch.setattr(row_kernels, "IS_INTERPRETED", False)
        with pytest.raises(ValueError, match=r"must be on a CUDA device: logits\.device=cpu"):
            self.statistics()
