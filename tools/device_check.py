"""Check and time the loss on one GPU: kernels, head, NCCL; prints a table, in under three minutes.

The kernels are held against float64 and plain torch on the same device, the head on the GPU
against the head in float64 on the CPU. With --interpret the kernels run as Python on the CPU and
nothing is timed. What needs a GPU here is written without one: it has never been run on one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import HeadConfig, PolicyLossConfig, RLHead, TokenBatch, kernels
from tools.kernel_cases import (
    CASES,
    TINY,
    Case,
    Check,
    check_gradient,
    check_statistics,
    make_coefficients,
    make_inputs,
)

EPILOG = """\
example:
  python tools/device_check.py --json device.json

exit codes: 0 every check passed; 1 one failed; 3 nothing was checked, for there is no CUDA device
or no triton
"""
PASSED, FAILED, NOTHING_CHECKED = 0, 1, 3

KERNEL_ROWS, KERNEL_COLUMNS = 512, 151936
HEAD_SIZES = ((2048, 1024, 50304), (4096, 2048, 151936), (8192, 4096, 128256))
"""Tokens, hidden size and vocabulary of the heads that are timed."""
HEAD_MEMORY_MB = 2048


@dataclass(frozen=True)
class Timing:
    """A measured time, and what it is compared with.

    Attributes:
        name: What ran.
        milliseconds: Median.
        rate: GB/s of memory read and written, or the ratio to three matmuls.
        share: The rate as a share of the copy bandwidth; None for a ratio.
    """

    name: str
    milliseconds: float
    rate: float
    share: float | None = None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file to write everything to")
    parser.add_argument(
        "--interpret", action="store_true", help="check the kernels on the CPU, as Python"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time and print; returns the exit code."""
    arguments = parse_arguments(argv)
    if not (arguments.interpret or torch.cuda.is_available()):
        print(
            "device_check.py: nothing was checked: there is no CUDA device; --interpret checks the "
            "kernels on the CPU, which needs triton (Linux: pip install -e '.[test]')",
            file=sys.stderr,
        )
        return NOTHING_CHECKED
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251 (triton has no other switch)
    try:
        import triton
    except ImportError:
        print(
            "device_check.py: nothing was checked: triton is not installed: "
            "pip install -e '.[test]' (Linux)",
            file=sys.stderr,
        )
        return NOTHING_CHECKED
    device = torch.device("cpu" if arguments.interpret else "cuda")
    environment = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
    print("   ".join(f"{name} {value}" for name, value in environment.items()))
    checks, timings = check_kernels(device), []
    if device.type == "cuda":
        checks += check_head(device) + check_collectives(device, "nccl")
        timings = time_kernels(device) + time_heads(device)
    print_checks(checks)
    print_timings(timings)
    if arguments.json is not None:
        write_json(arguments.json, environment, checks, timings)
    return PASSED if all(check.passed for check in checks) else FAILED


def check_kernels(device: torch.device) -> list[Check]:
    """Both kernels on all cases, and that a second run gives the same bits."""
    checks = []
    for case in CASES:
        inputs = make_inputs(case, device)
        found = check_statistics(inputs)
        found += [check_gradient(inputs, has_slope=has_slope) for has_slope in (False, True)]
        checks += [Check(f"{case} {one.name}", one.error, one.bound) for one in found]
    inputs = make_inputs(Case(10007, num_rows=64), device)
    runs = [
        kernels.row_statistics(inputs.logits, inputs.label_columns, 0.7, with_moment=True)
        for _ in range(2)
    ]
    return [*checks, Check("the same bits twice", float((runs[0] != runs[1]).sum()), 0.0)]


def check_head(device: torch.device) -> list[Check]:
    """Loss and gradients of RLHead against those of RLHead in float64 on the CPU."""
    num_columns = 1003
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, batch = head_inputs((300, 64, 1024), torch.device("cpu"), num_columns)
        inputs = hidden.to(dtype), weight.to(dtype)
        head = make_head(num_columns)
        exact = loss_and_gradients(head, *(x.double() for x in inputs), moved(batch, torch.float64))
        on_device = [x.to(device) for x in inputs]
        batch = moved(batch, torch.float32, device)
        ours = loss_and_gradients(head, *on_device, batch)
        plain = loss_and_gradients(PlainHead(head), *on_device, batch)
        names = ("loss", "hidden gradient", "weight gradient")
        for name, right, got, measure in zip(names, exact, ours, plain, strict=True):
            scale = right.abs().max()
            error, bound = (
                float((x.double().cpu() - right).abs().max() / scale) for x in (got, measure)
            )
            checks.append(Check(f"RLHead {dtype} {name}", error, 2 * bound + TINY))
    return checks


class PlainHead(torch.nn.Module):
    """What one writes in torch, in float32 and with [T, V] logits, for the same objective."""

    def __init__(self, head: RLHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Any:
        """The loss of the batch."""
        logits = hidden.float() @ weight[: self.head.vocab_size].float().T
        log_p = logits.log_softmax(-1)
        labels = batch.trained_labels
        log_probs = log_p.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        is_trained = labels >= 0
        return self.head.objective.function(
            torch.where(is_trained, log_probs, 0), torch.where(is_trained, entropy, 0), batch
        )


def make_head(vocab_size: int, memory_mb: int = 64) -> RLHead:
    """A head whose loss has every term that needs the whole vocabulary."""
    config = HeadConfig(log_probs_memory_mb=memory_mb)
    return RLHead(config, PolicyLossConfig(entropy_coef=0.01), vocab_size=vocab_size)


def head_inputs(
    sizes: tuple[int, int, int], device: torch.device, vocab_size: int
) -> tuple[Tensor, Tensor, TokenBatch]:
    """Hidden states, weight and a batch in which one row in eight does not train."""
    num_tokens, hidden_size, num_columns = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    labels = torch.randint(vocab_size, (num_tokens,), generator=generator, device=device)
    rows = torch.arange(num_tokens, device=device)
    batch = TokenBatch(
        labels=labels,
        loss_mask=rows % 8 != 0,
        loss_weight=torch.full((num_tokens,), 1 / num_tokens, device=device),
        sample_index=rows // 50,
        advantages=normal(num_tokens),
    )
    return normal(num_tokens, hidden_size), normal(num_columns, hidden_size) / hidden_size, batch


def moved(batch: TokenBatch, dtype: torch.dtype, device: torch.device | str = "cpu") -> TokenBatch:
    """The batch on a device, its numbers in a dtype."""
    streams = {
        name: stream.to(device, dtype if stream.is_floating_point() else stream.dtype)
        for name, stream in vars(batch).items()
        if isinstance(stream, Tensor)
    }
    return TokenBatch(**streams)


def loss_and_gradients(
    head: torch.nn.Module, hidden: Tensor, weight: Tensor, batch: TokenBatch
) -> tuple[Tensor, ...]:
    """The loss, and its gradients for hidden states and weight."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = head(*leaves, batch).loss
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def check_collectives(device: torch.device, backend: str) -> list[Check]:
    """That the backend starts and that a group of one gets its own numbers back."""
    sent = torch.arange(12.0, device=device).view(3, 4)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            received = [torch.empty_like(sent), torch.empty_like(sent), sent.clone()]
            dist.all_gather([received[0].view(torch.uint8)], sent.view(torch.uint8))
            dist.reduce_scatter(received[1], [sent])
            dist.all_reduce(received[2])
        finally:
            dist.destroy_process_group()
    names = ("all-gather of bytes", "reduce-scatter", "all-reduce")
    return [
        Check(f"{backend} {name}", float((tensor - sent).abs().max()), 0.0)
        for name, tensor in zip(names, received, strict=True)
    ]


def median_ms(function: Callable[[], object], repeats: int = 11) -> float:
    """The median time of a call on the device, after three that do not count."""
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_kernels(device: torch.device) -> list[Timing]:
    """The bandwidth of both kernels beside that of a copy."""
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    milliseconds = median_ms(partial(target.copy_, source))
    copy_rate = 2 * source.nbytes / milliseconds / 1e6
    timings = [Timing("copy of 1 GiB", milliseconds, copy_rate, 1.0)]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(Case(KERNEL_COLUMNS, dtype, num_rows=KERNEL_ROWS), device)
        logits, labels = inputs.logits.contiguous(), inputs.label_columns
        coefficients = make_coefficients(inputs, has_slope=True)
        arguments = logits, labels, 1.0
        passes: list[tuple[str, int, Callable[[], object]]] = [
            ("statistics", 1, partial(kernels.row_statistics, *arguments, with_moment=True)),
            ("gradient", 2, partial(kernels.logits_gradient_, *arguments, *coefficients)),
        ]
        for name, num_passes, function in passes:
            milliseconds = median_ms(function)
            rate = num_passes * logits.nbytes / milliseconds / 1e6
            named = f"{name} {KERNEL_ROWS}x{KERNEL_COLUMNS} {dtype}"
            timings.append(Timing(named, milliseconds, rate, rate / copy_rate))
    return timings


def time_heads(device: torch.device) -> list[Timing]:
    """Forward and backward of the head in bfloat16 beside its three matmuls over trained rows."""
    timings = []
    for sizes in HEAD_SIZES:
        hidden, weight, batch = head_inputs(sizes, device, sizes[2])
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
        trained = hidden[batch.loss_mask]
        floor = median_ms(partial(three_matmuls, trained, weight, trained @ weight.T))
        head = make_head(sizes[2], HEAD_MEMORY_MB)
        milliseconds = median_ms(partial(loss_and_gradients, head, hidden, weight, batch))
        name = f"RLHead {'x'.join(map(str, sizes))}, matmuls {floor:.2f} ms"
        timings.append(Timing(name, milliseconds, milliseconds / floor))
    return timings


def three_matmuls(rows: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Logits, and the gradients of rows and weight: what no head can do without."""
    _ = rows @ weight.T, gradient @ weight, gradient.T @ rows


def print_checks(checks: Sequence[Check]) -> None:
    """The checks that failed, and the one of each other kind that came closest."""
    failed = [check for check in checks if not check.passed]
    closest: dict[str, Check] = {}
    for check in checks:
        kind = check.name.split()[-1]
        if check.passed and use_of(check) >= use_of(closest.get(kind, Check("", 0.0, 1.0))):
            closest[kind] = check
    print(
        f"\n{len(checks) - len(failed)} of {len(checks)} checks passed; the closest of each kind:"
    )
    for check in [*closest.values(), *failed]:
        verdict = "passed" if check.passed else "FAILED"
        print(f"  {verdict}  error {check.error:.2e}  bound {check.bound:.2e}  {check.name}")


def use_of(check: Check) -> float:
    """How much of its bound a check's error takes up."""
    return check.error / check.bound if check.bound > 0 else 0.0


def print_timings(timings: Sequence[Timing]) -> None:
    """Median milliseconds, and GB/s or the ratio to the matmuls."""
    for timing in timings:
        rate = f"{timing.rate:8.2f} x"
        if timing.share is not None:
            rate = f"{timing.rate:8.0f} GB/s  {timing.share:4.0%} of copy"
        print(f"  {timing.milliseconds:9.3f} ms  {rate}  {timing.name}")


def write_json(
    path: Path,
    environment: dict[str, Any],
    checks: Sequence[Check],
    timings: Sequence[Timing],
) -> None:
    """Everything that was found, as one JSON object."""
    found = {
        "environment": environment,
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "timings": [asdict(timing) for timing in timings],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
