"""Tensor- times context-parallel ranks equal one rank, for every objective, in both layouts."""

from itertools import product

import pytest

from tests.slime_loss.objective_variants import VARIANTS
from tests.slime_loss.packs import LAYOUTS, Case, Sample, all_train, none_trains
from tests.slime_loss.places import Topology
from tests.slime_loss.references import without_type_checker
from tests.slime_loss.sharded_runs import check_sharded

SIZES = (1, 2, 4)
PACK = (
    Sample(3, (True, True, False, True)),
    none_trains(2, 3),
    all_train(1, 1),
    all_train(5, 14),
    Sample(1, (False, True) * 4),
)


# Half of the grids have one layout at first; the slow half swaps the layouts.
@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_equal_one(variant: str, swapped: bool) -> None:
    for number, (cp_size, tp_size) in enumerate(product(SIZES, SIZES)):
        layout = list(LAYOUTS)[(number + list(VARIANTS).index(variant) + swapped) % 2]
        case = Case(
            variant,
            PACK,
            Topology(cp_size, tp_size, sequence_parallel=tp_size > 1 and layout == "zigzag"),
            layout,
            multiple=2,
            chunk_rows=4,
            has_kept_ids=cp_size == 2,
            aggregation="sample_mean",
        )
        with without_type_checker():
            check_sharded(case)
