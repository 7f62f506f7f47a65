"""Whatever happens to one rank, every other one ends in time, and one message says why."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.end_to_end.faults import FAULTS
from tests.end_to_end.nursery import Outcome, run_with_fault
from tests.megatron.rl.tiny import MODEL_FLAGS, RUN_FLAGS, write_rollouts

SILENT = (
    r"rank 1 gives no sign of life since [\d:]+ \(killed, stopped, or its machine is gone\); "
    r"it was in "
)
STOPPED_IN = r"since [\d:]+\n  so that rank 0, "
IDS = r"\(samples \[[\d, ]+\]\)"
KEEPER_LOST = (
    r"rank 0, which keeps the job's store, does not answer\n"
    rf"  so that rank 1, step 4, training {IDS}: RuntimeError: .*"
)

MESSAGES = {
    "stopped": (
        SILENT + rf"step 4, training {IDS} {STOPPED_IN}step 4, training {IDS}: RuntimeError: .*"
    ),
    "killed": (
        SILENT + rf"step 4, training {IDS} {STOPPED_IN}step 4, training {IDS}: RuntimeError: .*"
    ),
    "asleep in reading": (
        r"rank 1 is behind, still in step 4, reading rollouts since [\d:]+, at sleep "
        r"\(faults.py:\d+\), called from _train_rollout \(trainer.py:\d+\)\n"
        rf"  so that rank 0, step 4, step guard {IDS}: RuntimeError: .*"
    ),
    "other order": (
        r"ranks are about to take different steps \(step 4\); samples: rank 1 has \d+, rank 0 has "
        r"\d+; samples \[\d+, \d+, \d+\] on rank 0, \[\d+, \d+, \d+\] on rank 1"
    ),
    "other token": (
        r"ranks are about to take different steps \(step 4\); samples: rank 1 has \d+, rank 0 has "
        r"\d+; samples \[\d+, \d+, \d+\] on rank 0, 1"
    ),
    "collective skipped": (
        rf"rank 0, step 4, step guard {IDS}: RuntimeError: .*\n  rank 1 is elsewhere, in step 4, .*"
        rf"|rank 0 is behind, still in step 4, step guard {IDS} .*\n  so that rank 1, step 4, .*"
    ),
    "nan weight": (
        r"max_skipped_steps: 1 steps were skipped because they were not finite, the last one "
        r"step 4 \(rank 1, decoder.layers.2.mlp.linear_fc1.weight has weights that are not finite; "
        r"rank 1, loss of sample \d+ \(.*:\d+\), row \d+\): max_skipped_steps=0"
    ),
    "killed at start-up": (
        r"rank 1 has not started, or cannot reach the job's store\n  so that rank 0, start-up, "
        r"meeting the other ranks: DistStoreError: .*"
    ),
    "never raises": (
        r"rank 1 is behind, still in step 4, reading rollouts since [\d:]+, at sleep "
        r"\(faults.py:\d+\), .*\n  so that rank 0, step 4, step guard .*: stands still beyond the "
        r"timeout \(9 s\), process ended"
    ),
    "rank 0 stopped": KEEPER_LOST,
    "rank 0 killed": KEEPER_LOST,
    "killed in old log-probs": (
        SILENT + rf"step 1, old log-probs \(samples of rollout 0\) {STOPPED_IN}step 1, .*"
    ),
    "stopped in advantages": (
        SILENT + rf"step 1, advantages \(samples of rollout 0\) {STOPPED_IN}step 1, advantages .*"
    ),
    "killed in loading": (
        SILENT
        + rf"start-up, loading the checkpoint {STOPPED_IN}start-up, loading the checkpoint: .*"
    ),
    "disk full": (
        r"rank \d, step 12, saving: the checkpoint of step 12 cannot be written to \S+: rank 1: "
        r"OSError: \[Errno 28\] No space left on device; earlier checkpoints are .*; fix: .*"
    ),
}
"""The one message of each fault."""

CODES = {"nan weight": 3, "never raises": 4}
"""Exit codes other than 1."""

OFTEN = (
    "stopped",
    "asleep in reading",
    "killed",
    "other order",
    "collective skipped",
    "nan weight",
    "killed at start-up",
    "never raises",
)
"""Begun in this order; the others are slow."""

CASES = [
    pytest.param(fault, marks=[] if fault in OFTEN else pytest.mark.slow)
    for fault in [*OFTEN, *(fault for fault in MESSAGES if fault not in OFTEN)]
]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """The jobs of all faults that are asked for, a few at a time: most of them wait."""
    folder = tmp_path_factory.mktemp("jobs")
    rollouts = write_rollouts(folder / "rollouts.jsonl")
    flags = [
        *MODEL_FLAGS,
        *RUN_FLAGS,
        f"--rollout-data={rollouts}",
        "--num-epochs=2",
        "--rollout-batch-size=2",
        "--global-batch-size=3",
        "--micro-batch-size=2",
        "--advantage-estimator=reinforce_plus_plus",
        "--normalize-advantages",
        "--max-skipped-steps=0",
        "--distributed-timeout-minutes=0.15",
    ]
    wanted = {
        item.callspec.params["fault"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    with ThreadPoolExecutor(4) as pool:

        def run(fault: str) -> Outcome:
            job = folder / fault.replace(" ", "_")
            places = [f"--save={job}/save", f"--load={job}/save"]
            return run_with_fault(job, fault, [*flags, *places])

        yield {fault: pool.submit(run, fault) for fault in [*MESSAGES, "none"] if fault in wanted}


@pytest.mark.parametrize("fault", CASES)
def test_one_message_names_rank_step_phase_and_samples(
    outcomes: dict[str, Future[Outcome]], fault: str
) -> None:
    outcome, at_fault = outcomes[fault].result(), FAULTS[fault]
    # a rank that the test must kill may say something after the job has ended
    ended = [rank for rank in (0, 1) if not (at_fault.holds and rank == at_fault.rank)]
    errors = [error for rank in ended for error in outcome.errors(rank)]
    told = [error for error in errors if re.fullmatch(MESSAGES[fault], error)]
    assert len(told) == 1, outcome.said
    for other in errors:
        assert other in told or other.endswith(" says why"), other
    survivors = {outcome.codes[rank] for rank in (0, 1) if rank != at_fault.rank}
    assert survivors == {CODES.get(fault, 1)}
    assert "Traceback" not in "".join(outcome.said)


@pytest.mark.parametrize("fault", ["none"])
def test_a_run_without_fault_says_nothing_of_it(
    outcomes: dict[str, Future[Outcome]], fault: str
) -> None:
    outcome = outcomes[fault].result()
    assert outcome.codes == [0, 0], outcome.said
    assert outcome.errors(0) == outcome.errors(1) == []
