"""Run random packs over simulated ranks: `python -m tests.slime_loss.many_packs --packs 10000`.

Each pack has its objective, layout, context- and tensor-parallel sizes. Every combination of these
comes up equally often; what else there is to choose is drawn.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from tqdm import tqdm

from tests.slime_loss.objective_variants import VARIANTS
from tests.slime_loss.packs import LAYOUTS, Case, Sample
from tests.slime_loss.places import Topology
from tests.slime_loss.sharded_runs import check_sharded

TOPOLOGIES = [
    Topology(cp_size, tp_size, sequence_parallel)
    for cp_size in range(1, 9)
    for tp_size, sequence_parallel in ((1, False), (2, False), (2, True))
]
COMBINATIONS = list(product(VARIANTS, LAYOUTS, TOPOLOGIES))
AGGREGATIONS = ("sample_mean", "rollout_mean", "token_mean", "prompt_mean", "constant")
SHOWN_DIFFERENCES = 5


def random_cases(num_packs: int, seed: int) -> Iterator[Case]:
    """That many cases, in which each combination comes up equally often, but for one."""
    chance = random.Random(seed)
    remaining: list[tuple[str, str, Topology]] = []
    for number in range(num_packs):
        if not remaining:
            remaining = chance.sample(COMBINATIONS, len(COMBINATIONS))
        variant, layout, topology = remaining.pop()
        yield Case(
            variant,
            random_samples(chance),
            topology,
            layout,
            multiple=chance.choice([1, 1, 2, 3, 8]),
            chunk_rows=chance.choice([None, 1, 3]),
            recompute=chance.random() < 0.5,
            frozen=chance.choice(["", "", "hidden", "weight"]),
            has_kept_ids=chance.random() < 0.3,
            aggregation=chance.choice(AGGREGATIONS),
            seed=seed + number,
        )


def random_samples(chance: random.Random) -> tuple[Sample, ...]:
    """One to six samples; one pack in ten does not train at all."""
    everything_is_masked = chance.random() < 0.1
    samples = []
    for _ in range(chance.randint(1, 6)):
        response = chance.choice([1, 1, 2, 3, chance.randint(4, 20)])
        share = 0.0 if everything_is_masked else chance.choice([0.0, 0.5, 1.0, 1.0])
        mask = tuple(chance.random() < share for _ in range(response))
        samples.append(Sample(chance.choice([1, 1, 2, chance.randint(3, 20)]), mask))
    return tuple(samples)


def features(case: Case) -> Iterator[str]:
    """What makes a case hard, and the choices that it is made of."""
    layouts = [case.head_layout(rank) for rank in range(case.topology.cp_size)]
    mask = [
        flag for one in case.samples for flag in (*[False] * (one.prompt - 1), *one.mask, False)
    ]
    held = [[row for row in layout.token_index.tolist() if row >= 0] for layout in layouts]
    trained = [any(mask[row] for row in rows) for rows in held]
    conditions = {
        "a rank with only padding": not all(held),
        "a rank without a trained row beside one with": any(trained) and not all(trained),
        "everything masked": not any(trained),
        "a response of one token": any(len(one.mask) == 1 for one in case.samples),
        "a sample shorter than 2 * cp_size": min(case.lengths) < 2 * case.topology.cp_size,
    }
    yield from (name for name, holds in conditions.items() if holds)
    yield from (f"objective {case.variant}", f"layout {case.layout}", f"{case.topology}")


def check_packs(cases: Iterable[Case]) -> tuple[Counter[str], list[str]]:
    """Check every case.

    Returns:
        How many packs, rank runs, collectives and features there were, and the differences.
    """
    counts: Counter[str] = Counter()
    differences: list[str] = []
    for case in cases:
        counts.update(["packs", *features(case)])
        try:
            ranks = check_sharded(case)
        except AssertionError as difference:
            differences.append(f"{case}\n  {difference}")
            continue
        counts["rank runs"] += len(ranks)
        counts["collectives"] += sum(map(len, ranks))
    return counts, differences


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many of what were checked; 1 when ranks differ, or differ from one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    cases = random_cases(arguments.packs, arguments.seed)
    counts, differences = check_packs(tqdm(cases, total=arguments.packs, unit="pack"))
    for difference in differences[:SHOWN_DIFFERENCES]:
        sys.stdout.write(f"{difference}\n")
    hard = [name for name, _ in sorted(counts.items()) if name.startswith(("a ", "everything"))]
    for name in hard:
        sys.stdout.write(f"{counts[name]:8} packs with {name}\n")
    sys.stdout.write(
        f"{counts['packs']} packs ({arguments.packs / len(COMBINATIONS):.1f} of each of "
        f"{len(COMBINATIONS)} combinations), {counts['rank runs']} rank runs, "
        f"{counts['collectives']} collectives recorded, {len(differences)} differences\n"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
