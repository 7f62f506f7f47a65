"""Unmodified megatron-core on the CPU: every topology trains as one process does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.utils import unwrap_model

from megatron.rl import cpu_backend
from tests.megatron.rl.tiny_gpt import Topology, Trainee, build, train
from tests.spawn import World

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
MOE = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
SHARED = {**MOE, "moe_shared_expert_intermediate_size": 32}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RECOMPUTED_NORMS = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "layernorm"],
}
ANY_LENGTH = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

TOPOLOGIES = {
    "tensor and sequence": Topology(tp=2),
    "pipeline": Topology(pp=2),
    "pipeline, any length": Topology(pp=2, model=ANY_LENGTH),
    "interleaved pipeline": Topology(pp=2, vp=2),
    "data": Topology(),
    "data, distributed optimizer": Topology(distributed_optimizer=True),
    "data, overlapped": Topology(distributed_optimizer=True, overlap=True),
    "recomputed": Topology(model=RECOMPUTED),
    "recomputed norms": Topology(tp=2, model=RECOMPUTED_NORMS),
    "experts": Topology(ep=2, model=MOE),
    "experts and tensor": Topology(tp=2, ep=2, model=MOE),
    "shared experts overlapped": Topology(
        ep=2, model={**SHARED, "moe_shared_expert_overlap": True}
    ),
}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    with World(1, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2, timeout_s=120) as world:
        yield world


@contextmanager
def no_way_into_cuda() -> Iterator[None]:
    """CUDA refuses as without a driver, nothing asks for it, and nothing is kept for it."""
    cpu_backend.install()
    refused = mock.Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system."))
    waiting = len(torch.cuda._queued_calls)
    with (
        mock.patch("torch.cuda._lazy_init", refused),
        mock.patch("torch.cuda.random._lazy_init", refused),
    ):
        yield
    assert not refused.called
    assert len(torch.cuda._queued_calls) == waiting


def train_on_cpu(rank: int, topology: Topology) -> list[tuple[float, float]]:
    with no_way_into_cuda():
        return train(topology)


@pytest.fixture(scope="module")
def expected(one_rank: World) -> dict[str, list[tuple[float, float]]]:
    """Losses and gradient norms of one process, for each kind of model."""
    kinds = {"dense": {}, "experts": MOE, "shared": SHARED}
    return {
        kind: one_rank.run(train_on_cpu, Topology(model=model))[0] for kind, model in kinds.items()
    }


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_trains_as_one_process(
    two_ranks: World, expected: dict[str, list[tuple[float, float]]], name: str
) -> None:
    kind = "shared" if "shared" in name else "experts" if "experts" in name else "dense"
    assert expected[kind][-1][0] < expected[kind][0][0] - 0.1  # it learns
    for steps in two_ranks.run(train_on_cpu, TOPOLOGIES[name]):
        for step, reference in zip(steps, expected[kind], strict=True):
            assert step == pytest.approx(reference, rel=1e-5)


def test_recomputation_draws_the_same_dropout(two_ranks: World) -> None:
    kept, *_ = two_ranks.run(train_on_cpu, Topology(tp=2, model=DROPOUT))
    again, *_ = two_ranks.run(train_on_cpu, Topology(tp=2, model={**DROPOUT, **RECOMPUTED}))
    without, *_ = two_ranks.run(train_on_cpu, Topology(tp=2))
    assert kept == again
    assert abs(kept[0][0] - without[0][0]) > 1e-3


# bf16


def train_bf16(rank: int, topology: Topology) -> dict[str, object]:
    with no_way_into_cuda():
        trainee = build(topology)
        steps = [trainee.step() for _ in range(3)]
        params = list(trainee.chunks[0].parameters())
        return {
            "steps": steps,
            "model": {p.dtype for p in params},
            "main": {p.main_param.dtype for p in params if p.main_param is not None},
            "rounded": all(
                torch.equal(p.flatten(), p.main_param.bfloat16().flatten())
                for p in params
                if not getattr(p, "main_param_sharded", False)
            ),
            "kept": any(
                not torch.equal(p.main_param, p.main_param.bfloat16().float())
                for p in params
                if p.main_param is not None
            ),
        }


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bf16_trains_fp32_main_params(
    one_rank: World, two_ranks: World, distributed_optimizer: bool
) -> None:
    topology = Topology(bf16=True, distributed_optimizer=distributed_optimizer)
    [alone] = one_rank.run(train_bf16, Topology(bf16=True))
    assert alone["steps"][-1][0] < alone["steps"][0][0] - 0.1
    for rank in two_ranks.run(train_bf16, topology):
        assert rank["model"] == {torch.bfloat16}
        assert rank["main"] == {torch.float32}
        assert rank["rounded"]
        assert rank["kept"]
        # The weights of the first step are the same bits; gradients are summed in another order.
        assert rank["steps"][0] == pytest.approx(alone["steps"][0], rel=1e-5)


# Checkpoints


def save_after(
    rank: int, topology: Topology, num_steps: int, directory: str
) -> list[tuple[float, float]]:
    """Train, save, and train on; the steps after the save."""
    with no_way_into_cuda():
        trainee = build(topology)
        for _ in range(num_steps):
            trainee.step()
        dist_checkpointing.save(sharded_state(trainee, is_loading=False), directory)
        return [trainee.step() for _ in range(2)]


def load_and_go_on(
    rank: int, topology: Topology, directory: str, exchange: str | None
) -> list[tuple[float, float]]:
    """Build anew with other weights, load, and train on; `exchange` for a fully parallel load."""
    with no_way_into_cuda():
        trainee = build(topology)
        with torch.no_grad():
            for parameter in trainee.chunks[0].parameters():
                parameter.zero_()
        strategy = None
        if exchange is not None:
            strategy = FullyParallelLoadStrategyWrapper(
                get_default_load_sharded_strategy(directory),
                parallel_state.get_data_parallel_group(with_context_parallel=True),
                exchange_algo=exchange,
            )
        state = dist_checkpointing.load(
            sharded_state(trainee, is_loading=True), directory, strategy
        )
        unwrap_model(trainee.chunks)[0].load_state_dict(state["model"])
        trainee.optimizer.load_state_dict(state["optimizer"])
        return [trainee.step() for _ in range(2)]


def sharded_state(trainee: Trainee, *, is_loading: bool) -> dict[str, object]:
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    metadata = {**RESHARDABLE, **groups, "chained_optim_avoid_prefix": True}
    model = unwrap_model(trainee.chunks)[0].sharded_state_dict(metadata=metadata)
    optimizer = trainee.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=metadata
    )
    return {"model": model, "optimizer": optimizer}


PLAIN = Topology()
DISTRIBUTED = Topology(distributed_optimizer=True)
DISTRIBUTED_TP2 = Topology(tp=2, distributed_optimizer=True)
BF16 = Topology(bf16=True, distributed_optimizer=True)


@pytest.mark.parametrize(
    ("saved", "loaded", "num_steps", "exchange"),
    [
        pytest.param(PLAIN, PLAIN, 2, "broadcast", id="plain"),
        pytest.param(DISTRIBUTED, DISTRIBUTED, 2, None, id="distributed"),
        pytest.param(DISTRIBUTED, DISTRIBUTED, 0, None, id="before the first step"),
        pytest.param(BF16, BF16, 2, None, id="bf16"),
        pytest.param(Topology(tp=2), PLAIN, 2, "broadcast", id="tp2 to dp2"),
        pytest.param(DISTRIBUTED, DISTRIBUTED_TP2, 2, None, id="dp2 to tp2"),
    ],
)
def test_a_loaded_run_goes_on_as_the_saved_one_did(
    two_ranks: World,
    tmp_path: Path,
    saved: Topology,
    loaded: Topology,
    num_steps: int,
    exchange: str | None,
) -> None:
    steps = two_ranks.run(save_after, saved, num_steps, str(tmp_path))
    resumed = two_ranks.run(load_and_go_on, loaded, str(tmp_path), exchange)
    if saved == loaded:
        assert resumed == steps
    else:
        for step, reference in zip(resumed[0], steps[0], strict=True):
            assert step == pytest.approx(reference, rel=1e-5)
