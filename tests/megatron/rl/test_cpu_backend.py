import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.rl.core_versions import SINCE_0_19
from megatron.rl.cpu_backend import REPLACEMENTS, Replacement, install
from tests.megatron.rl.names import changed_by_import, values
from tests.spawn import World

NO_DRIVER = "Found no NVIDIA driver on your system."
TARGETS = [replacement.target for replacement in REPLACEMENTS]
NOTHING_TO_DO = ["megatron.core.transformer.moe.moe_utils.te_general_gemm"] if SINCE_0_19 else []
"""Targets that this core itself sets to what a CPU needs."""


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    with World(1, timeout_s=120) as world:
        world.run(install_without_driver)
        yield world


def install_without_driver(rank: int) -> None:
    """Install where every way into CUDA ends as on a CUDA build of torch without a driver.

    C++ comes through the same function, so a tensor made on a GPU ends there too.
    """
    refused = mock.Mock(side_effect=RuntimeError(NO_DRIVER))
    mock.patch("torch.cuda._lazy_init", refused).start()
    mock.patch("torch.cuda.random._lazy_init", refused).start()
    install()


# What it does not do


def test_importing_it_changes_nothing() -> None:
    assert len(set(TARGETS)) == len(TARGETS) > 20
    with World(1, timeout_s=120) as world:
        assert world.run(changed_by_import, "megatron.rl.cpu_backend", TARGETS) == [[]]
        [messages] = world.run(refusals)
        assert messages["a GPU"].startswith("the CPU backend is for machines without a GPU")
        assert messages["CUDA in use"].startswith("the CPU backend must be installed before CUDA")
        assert "without transformer-engine and apex" in messages["kernels"]
        assert all("; fix: " in message for message in messages.values())
        assert world.run(install_forced) == [NOTHING_TO_DO]


def refusals(rank: int) -> dict[str, str]:
    """How install refuses, and that it has then changed nothing."""
    kernels = "megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE"
    before = values(TARGETS)
    messages = {}
    for case, name, value, force in (
        ("a GPU", "torch.cuda.is_available", lambda: True, False),
        ("CUDA in use", "torch.cuda.is_initialized", lambda: True, True),
        ("kernels", kernels, True, True),
    ):
        with mock.patch(name, value), pytest.raises(ValueError) as caught:  # noqa: PT011
            install(force=force)
        messages[case] = str(caught.value)
    assert all(a is b for a, b in zip(before, values(TARGETS), strict=True))
    return messages


def install_forced(rank: int) -> list[str]:
    """The targets that a forced install leaves, on what looks like a machine with a GPU."""
    before = values(TARGETS)
    with mock.patch("torch.cuda.is_available", return_value=True):
        install(force=True)
        once = values(TARGETS)
        install()
        assert all(a is b for a, b in zip(once, values(TARGETS), strict=True))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() is not stream
    return [t for t, a, b in zip(TARGETS, before, once, strict=True) if a is b]


def test_a_name_that_is_gone_is_an_error_that_says_so() -> None:
    gone = Replacement("torch.cuda.no_such_thing", "none", lambda _: None)
    with pytest.raises(ValueError, match=r"torch\.cuda\.no_such_thing is absent"):
        gone.place()


def test_every_replacement_says_why() -> None:
    assert all(len(replacement.reason.split()) > 3 for replacement in REPLACEMENTS)


# Devices, types, streams, generator


def make_everywhere(rank: int) -> list[str]:
    from megatron.core.dist_checkpointing import ShardedTensor

    wrong = []
    for device in ("cuda", "cuda:1", torch.device("cuda"), torch.cuda.current_device(), "cpu"):
        made = [
            torch.tensor([1.0], device=device),
            torch.zeros(1, device=device),
            torch.ones(1, device=device),
            torch.empty_like(torch.zeros(1), device=device),
            torch.zeros(1).to(torch.cuda.current_device()),
            torch.zeros(1).cuda(),
            torch.zeros(1).cuda(non_blocking=True),
            torch.nn.Linear(1, 1).cuda().weight,
        ]
        wrong += [f"{device}: {t.device}" for t in made if t.device.type != "cpu"]
    shard = ShardedTensor.from_rank_offsets("key", torch.zeros(1))
    shard.data = None
    shard.init_data("cuda")
    wrong += [f"shard: {shard.data.device}"] * (shard.data.device.type != "cpu")
    kept = torch.zeros(2)
    assert kept.cuda() is kept
    # Everything else that decides on a device is left as it was.
    with torch.device("meta"):
        inside = [torch.empty(1), torch.zeros(1), torch.nn.Linear(1, 1).weight]
    outside = [torch.ones(1, device="meta"), torch.empty_like(torch.ones(1), device="meta")]
    wrong += [f"meta: {t.device}" for t in inside + outside if not t.is_meta]
    return wrong


def test_what_is_asked_of_a_gpu_is_made_on_the_cpu(one_rank: World) -> None:
    assert one_rank.run(make_everywhere) == [[]]


def type_names(rank: int) -> list[Any]:
    x = torch.zeros(1)
    names = [x.type(), x.half().type(), x.bfloat16().type(), torch.nn.Parameter(x).type()]
    converted = [x.type(torch.int32).dtype, x.type("torch.DoubleTensor").dtype]
    known = isinstance(x, torch.FloatTensor), isinstance(x, torch.cuda.FloatTensor)
    with torch.device("cpu"):  # a function mode, through which torch finds its methods by name
        names.append(x.type())
    return [*names, *converted, *known]


def test_types_are_named_as_on_a_gpu_and_converted_as_before(one_rank: World) -> None:
    assert one_rank.run(type_names) == [
        [
            "torch.cuda.FloatTensor",
            "torch.cuda.HalfTensor",
            "torch.cuda.BFloat16Tensor",
            "torch.cuda.FloatTensor",
            "torch.cuda.FloatTensor",
            torch.int32,
            torch.float64,
            True,
            False,
        ]
    ]


def generator_story(rank: int) -> list[str]:
    """What does not hold of the generator and core's tracker of named states."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    said = mock.Mock()
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    handler = logging.Handler()
    handler.emit = said
    logger.addHandler(handler)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()

    def draws() -> list[list[float]]:
        plain = [torch.rand(2)]
        with get_cuda_rng_tracker().fork():
            plain.append(torch.rand(2))
        plain.append(torch.rand(2))
        return [draw.tolist() for draw in plain]

    def seed(value: int) -> list[list[float]]:
        tensor_parallel.model_parallel_cuda_manual_seed(value, force_reset_rng=True)
        return draws()

    first = seed(5)
    state, named = torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()
    second = draws()
    torch.cuda.set_rng_state(state)
    get_cuda_rng_tracker().set_states(named)
    restored = draws()
    again, other = seed(5), seed(6)
    torch.manual_seed(5)
    seeded = torch.rand(2).tolist()
    facts = {
        "every draw differs": len({tuple(draw) for draw in first + second + other}) == 9,
        "a restored state repeats": restored == second,
        "a seed repeats": again == first,
        "torch.manual_seed seeds the same generator": seeded == first[0],
        "core warns of nothing": not said.called,
    }
    return [fact for fact, true in facts.items() if not true]


def test_the_generators_state_is_seeded_saved_forked_and_restored(one_rank: World) -> None:
    assert one_rank.run(generator_story) == [[]]


def call_compiled(rank: int) -> tuple[list[float], int]:
    from megatron.core.activations import squared_relu
    from torch._dynamo.utils import counters

    counters.clear()
    return squared_relu(torch.tensor([-1.0, 2.0])).tolist(), sum(counters["frames"].values())


def test_what_core_compiles_runs_as_it_is_written(one_rank: World) -> None:
    assert one_rank.run(call_compiled) == [([0.0, 4.0], 0)]
