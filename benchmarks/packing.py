"""Balance and waste of micro-batches over simulated data-parallel ranks, against first-fit.

    python -m benchmarks.packing

Long-tailed responses of a model of 8 billion weights; nothing is trained.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

from megatron.rl.cost import costs_of
from megatron.rl.packing import Balance, Pack, balance_of, plan_micro_batches

MAX_LENGTH = 16_384
EVEN_LENGTH = 57_257
"""Of 32 layers, 4096 hidden, 14336 in a gated MLP, 8 key-value heads, 128256 ids: see cost.py."""


def long_tailed(num_samples: int, seed: int) -> list[int]:
    """Lengths in tokens, log-normal: median 1,100, one in twenty above 5,700, cut at 16,384."""
    draws = np.random.default_rng(seed).lognormal(7.0, 1.0, num_samples)
    return np.clip(draws.astype(int) + 20, None, MAX_LENGTH).tolist()


def first_fit(lengths: Sequence[int], dp_size: int, max_tokens: int) -> list[list[Pack]]:
    """The simple rule: first-fit decreasing, the packs to the ranks in turn."""
    packs: list[Pack] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = np.flatnonzero(room[: len(packs)] >= lengths[position])
        pack = int(fits[0]) if len(fits) else len(packs)
        if pack == len(packs):
            packs.append([])
            room[pack] = max_tokens
        packs[pack].append(position)
        room[pack] -= lengths[position]
    packs += [[] for _ in range(-len(packs) % dp_size)]
    return [packs[rank::dp_size] for rank in range(dp_size)]


def compare(num_samples: int, dp_size: int, max_tokens: int, seed: int) -> tuple[Balance, Balance]:
    """The simple rule and ours on the same samples."""
    lengths = long_tailed(num_samples, seed)
    costs = costs_of(lengths, EVEN_LENGTH)
    simple = first_fit(lengths, dp_size, max_tokens)
    ours = plan_micro_batches(lengths, dp_size=dp_size, costs=costs, max_tokens=max_tokens)
    return (
        balance_of(simple, lengths, costs, max_tokens),
        balance_of(ours, lengths, costs, max_tokens),
    )


def row_of(num_samples: int, dp_size: int, max_tokens: int, seeds: Sequence[int]) -> str:
    """One line of the table: means over the seeds."""
    pairs = [compare(num_samples, dp_size, max_tokens, seed) for seed in seeds]
    cells = [f"{num_samples:9,}", f"{max_tokens:8,}"]
    for side in zip(*pairs, strict=True):
        cells += [
            f"{np.mean([balance.micro_batches for balance in side]):8.1f}",
            f"{np.mean([balance.fill for balance in side]):7.1%}",
            f"{np.mean([balance.rank_imbalance for balance in side]):9.4f}",
        ]
    return "  ".join(cells)


def seconds_to_pack(num_samples: int, dp_size: int, max_tokens: int) -> float:
    """CPU time of one plan with its costs."""
    lengths = long_tailed(num_samples, seed=0)
    start = time.process_time()
    costs = costs_of(lengths, EVEN_LENGTH)
    plan_micro_batches(lengths, dp_size=dp_size, costs=costs, max_tokens=max_tokens)
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and the time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--dp-size", type=int, default=64, help="simulated ranks")
    parser.add_argument("--seeds", type=int, default=5, help="draws a line is the mean of")
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 1024, 2048, 4096, 16384])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--timed-samples", type=int, default=100_000)
    args = parser.parse_args(argv)
    print(f"{args.dp_size} ranks; imbalance = cost of the dearest rank / mean; fill of the budget")
    columns = "micro-b.     fill  imbalance"
    print(f"{'':19}  {'first-fit':^28}  {'balanced by cost':^28}")
    print(f"{'samples':>9}  {'budget':>8}  {columns}  {columns}")
    for num_samples in args.samples:
        for budget in args.budgets:
            print(row_of(num_samples, args.dp_size, budget, range(args.seeds)))
    for budget in args.budgets:
        seconds = seconds_to_pack(args.timed_samples, args.dp_size, budget)
        print(f"{args.timed_samples:,} samples, budget {budget:,}: {seconds:.2f} s of CPU")


if __name__ == "__main__":
    main()
