"""Reasons to stop, and what each error ends a process with."""

import os
import signal
from collections.abc import Iterator

import pytest

from megatron.rl.checkpoint_files import CheckpointError
from megatron.rl.config import CheckpointConfig
from megatron.rl.guard import SkippedStepsError, StepError
from megatron.rl.initialize import World
from megatron.rl.samples import BadRowsError
from megatron.rl.stopping import Stop, StopRequest, exit_with_message


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    saved = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, saved, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_a_reason_at_the_next_step(number: signal.Signals) -> None:
    request = StopRequest(CheckpointConfig())
    assert request.reason(5, 5) is Stop.NONE
    os.kill(os.getpid(), number)
    assert request.reason(5, 5) is Stop[number.name]


def test_the_second_interrupt_does_not_wait() -> None:
    StopRequest(CheckpointConfig())
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interval_ends_at_its_multiples_but_never_before_a_step() -> None:
    request = StopRequest(CheckpointConfig(exit_interval=4))
    reasons = [request.reason(step, step - 3) for step in (3, 4, 5, 8)]
    assert reasons == [Stop.NONE, Stop.INTERVAL, Stop.NONE, Stop.INTERVAL]
    assert request.reason(8, 0) is Stop.NONE


def test_a_duration_ends_when_it_is_over() -> None:
    assert StopRequest(CheckpointConfig(exit_duration_in_mins=60.0)).reason(1, 1) is Stop.NONE
    assert StopRequest(CheckpointConfig(exit_duration_in_mins=0.0)).reason(1, 1) is Stop.DURATION


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("flag"), 2),
        (CheckpointError("shape"), 2),
        (StepError("lost"), 1),
        (SkippedStepsError("many"), 3),
        (KeyboardInterrupt(), 75),
    ],
)
def test_every_error_has_its_code(error: BaseException, code: int) -> None:
    with pytest.raises(SystemExit) as ended, exit_with_message(World()):
        raise error
    assert ended.value.code == code


@pytest.mark.parametrize("cause", [OSError("full"), BadRowsError([])])
def test_what_was_foreseen_is_one_message(
    cause: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), exit_with_message(World()):
        raise StepError("rank 0, step 1") from cause
    assert "Traceback" not in capsys.readouterr().err


def fail_by_our_own_mistake() -> None:
    try:
        {}["name"]
    except KeyError as error:
        raise StepError("rank 0, step 1") from error


def test_our_own_mistakes_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_with_message(World()):
        fail_by_our_own_mistake()
    assert '{}["name"]' in capsys.readouterr().err
    with pytest.raises(KeyError), exit_with_message(World()):
        raise KeyError("name")
