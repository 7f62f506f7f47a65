"""megatron-core, unmodified, on a CPU with gloo.

Core names CUDA as the device of a tensor, as a random generator, as a stream and as a type, and
leans in a few places on what transformer-engine brings. `install` points each of those names at
the CPU. Importing this module changes nothing, and a run on a GPU calls nothing in it.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def install(*, force: bool = False) -> None:
    """Replace every target of `REPLACEMENTS`, once and for the life of this process.

    Args:
        force: Replace them although there is a GPU, which an explicit `--device cpu` asks for.

    Raises:
        ValueError: There is a GPU and nobody forces; or CUDA is in use; or core has chosen the
            CUDA kernels of transformer-engine or apex. Nothing has been replaced then.
    """
    if torch.cuda.current_device is _current_device:
        return
    _refuse_beside_cuda(force)
    places = [replacement.place() for replacement in REPLACEMENTS]
    with CPU:  # torch.device contexts learn the factories now, while they have their own names
        torch.empty(0)
    for replacement, (owner, name) in zip(REPLACEMENTS, places, strict=True):
        setattr(owner, name, replacement.build(getattr(owner, name, None)))


@dataclass(frozen=True)
class Replacement:
    """One name that means something else on a CPU.

    Args:
        target: "module.attribute"; "logger:name.attribute" is an attribute of that logger.
        reason: What fails, or goes wrong silently, without it.
        build: From the original (None where `optional` and absent) to what stands in its place.
        optional: Whether core may lack the name.
    """

    target: str
    reason: str
    build: Callable[[Any], Any]
    optional: bool = False

    def place(self) -> tuple[Any, str]:
        """The object that has the attribute, and the attribute's name.

        Raises:
            ValueError: This megatron-core or torch has no such name.
        """
        path, _, name = self.target.rpartition(".")
        if path.startswith("logger:"):
            owner: Any = logging.getLogger(path.removeprefix("logger:"))
        else:
            owner = pkgutil.resolve_name(path)
        if not self.optional and not hasattr(owner, name):
            raise ValueError(
                "the CPU backend must find each name that it replaces: "
                f"{self.target} is absent from torch={torch.__version__} or its megatron-core"
            )
        return owner, name


def _refuse_beside_cuda(force: bool) -> None:
    if torch.cuda.is_initialized():
        raise ValueError(
            "the CPU backend must be installed before CUDA is used: "
            "torch.cuda.is_initialized()=True; fix: start a new process with --device cpu"
        )
    if torch.cuda.is_available() and not force:
        raise ValueError(
            "the CPU backend is for machines without a GPU: "
            f"torch.cuda.device_count()={torch.cuda.device_count()}; fix: --device cpu to "
            "leave the GPU alone, --device cuda to use it"
        )
    if pkgutil.resolve_name("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE"):
        raise ValueError(
            "--device cpu needs an environment without transformer-engine and apex, because core "
            "takes their CUDA kernels wherever it can import them; fix: install without the gpu "
            "extra"
        )


def _current_device() -> torch.device:
    return CPU


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """What a CPU does where a GPU would wait, record or release."""


def _get_rng_state(device: Any = None) -> Tensor:  # noqa: ARG001
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, device: Any = None, graph_safe: bool = False) -> None:  # noqa: ARG001
    torch.set_rng_state(state)


def _expects_generator_to_move(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


class _Stream:
    """The one queue of a CPU: what is submitted is done."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = CPU

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_args: Any) -> _Stream:
        """An event has nothing to say beyond what its stream says."""
        return self


_STREAM = _Stream()


def _current_stream(*_args: Any, **_kwargs: Any) -> _Stream:
    return _STREAM


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, making on the CPU what was asked for on a GPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _itself(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return tensor


def _named_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type, whose string form names the type as it would be named on a GPU."""

    @functools.wraps(type_of)
    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_of(tensor, *args, **kwargs)
        # Under a function mode torch comes back to this function, so the name may be done.
        return "torch.cuda." + type_of(tensor).removeprefix("torch.").removeprefix("cuda.")

    return named


def _with_adam_state(initialize: Callable[..., None]) -> Callable[..., None]:
    """DistributedOptimizer.__init__, then the state that torch's Adam makes at its first step."""

    @functools.wraps(initialize)
    def with_state(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if not isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                self.optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    return with_state


@torch.no_grad()
def _load_param_and_adam_state(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    """DistributedOptimizer's setter, with a `step` for each parameter."""
    group, position = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][position]
    state = self.optimizer.state[main_param]
    main_param.copy_(tensors["param"])
    state["exp_avg"].copy_(tensors["exp_avg"])
    state["exp_avg_sq"].copy_(tensors["exp_avg_sq"])
    state["step"] = state["step"].clone()


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_LITERAL_DEVICE = "core asks this factory for device='cuda'"

REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        "torch.cuda.current_device",
        "the device of nearly every tensor that core makes",
        lambda _: _current_device,
    ),
    Replacement(
        "torch.cuda.synchronize",
        "pipeline communication, timers and checkpoints wait for the device",
        lambda _: _nothing,
    ),
    Replacement(
        "torch.cuda.manual_seed",
        "core seeds its generator through it; torch would keep the seed for a device that never "
        "comes, and dropout and initial weights would follow no seed, silently",
        lambda _: torch.default_generator.manual_seed,
    ),
    Replacement(
        "torch.cuda.get_rng_state",
        "the tracker of random states reads the generator as it seeds each of them",
        lambda _: _get_rng_state,
    ),
    Replacement(
        "torch.cuda.random.get_rng_state",
        "the tracker's forks and recomputation read it under this name",
        lambda _: _get_rng_state,
    ),
    Replacement(
        "torch.cuda.set_rng_state",
        "what get_rng_state returned must go back to where it came from; torch would keep it for "
        "a device that never comes, silently",
        lambda _: _set_rng_state,
    ),
    Replacement(
        f"{_RANDOM}._set_cuda_rng_state",
        "core's own setter puts the state into torch's queue for later: forks and recomputation "
        "would draw other numbers, silently, and the queue would grow with each",
        lambda _: _set_rng_state,
    ),
    Replacement(
        f"logger:{_RANDOM}.filters",
        "a fork warns when the CPU's generator moved within it, which here is what it is for",
        lambda filters: [*filters, _expects_generator_to_move],
    ),
    Replacement(
        "torch.cuda.Stream",
        "the all-to-all dispatcher and overlapped shared experts of MoE make streams",
        lambda _: _Stream,
    ),
    Replacement(
        "torch.cuda.current_stream",
        "MoE waits for and compares it",
        lambda _: _current_stream,
    ),
    Replacement(
        "torch.cuda.stream",
        "where there is a GPU that --device cpu leaves alone, torch would select our stream on it",
        lambda _: nullcontext,
    ),
    *(
        Replacement(f"torch.{name}", f"{_LITERAL_DEVICE}: {where}", _on_cpu)
        for name, where in (
            ("tensor", "gradient norms, loss scales, checkpoint plans"),
            ("zeros", "token counts of the schedules, gradient norms"),
            ("ones", "causal masks"),
            ("empty_like", "what other ranks read in a fully parallel checkpoint load"),
        )
    ),
    Replacement(
        "megatron.core.dist_checkpointing.mapping.ShardedTensor.init_data.__defaults__",
        "it keeps torch.empty as it was when core was imported, and is asked for device='cuda' by "
        "a fully parallel checkpoint load",
        lambda defaults: tuple(_on_cpu(factory) for factory in defaults),
    ),
    Replacement(
        "torch.Tensor.cuda",
        "saving a distributed optimizer, tied embeddings over pipeline stages and fully parallel "
        "checkpoint loads move tensors to the device",
        lambda _: _itself,
    ),
    Replacement(
        "torch.Tensor.type",
        "gradient clipping and the mixed precision and distributed optimizers sort parameters by "
        "the name torch.cuda.*Tensor",
        _named_as_on_cuda,
    ),
    Replacement(
        f"{_DISTRIBUTED_OPTIMIZER}.__init__",
        "it reads one `step` from Adam's state to save and to load, also before the first step, "
        "when torch's Adam has no state yet",
        _with_adam_state,
    ),
    Replacement(
        f"{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states",
        "it wants a `step` among the loaded tensors, where there is none; and core has given all "
        "parameters one and the same `step` tensor, which each of them would then advance",
        lambda _: _load_param_and_adam_state,
    ),
    Replacement(
        f"{_RANDOM}.CheckpointWithoutOutput.__init__.__defaults__",
        "core takes its default fp8=False for fp8, since it is not None, and calls "
        "transformer-engine when it recomputes a norm",
        lambda _: (None,),
    ),
    Replacement(
        f"{_MOE}.moe_utils.te_general_gemm",
        "the router compares this name with None; without transformer-engine it does not exist",
        lambda _: None,
        optional=True,
    ),
    Replacement(
        f"{_MOE}.token_dispatcher.maybe_move_tensor_to_cpu",
        "only tensors on a GPU become the lists of sizes that all-to-all needs",
        lambda _: _as_numpy,
    ),
    Replacement(
        "torch._dynamo.config.disable",
        "core compiles squared ReLU and other small functions, which on a CPU takes half a minute "
        "and a C++ compiler",
        lambda _: True,
    ),
)
