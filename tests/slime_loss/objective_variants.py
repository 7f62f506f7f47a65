"""Every objective, correction and way to call the head, for tests that run all of them.

A value of a Literal of the configs that no variant has fails `missing_values`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch import distributed as dist

from slime_loss import PolicyLossConfig, TokenBatch

Way = Literal["loss", "log_probs", "logits", "value"]
"""What is run: RLHead with its objective; RLHead.log_probs; log_probs_from_logits; ValueHead."""


@dataclass(frozen=True)
class Variant:
    """One way to run the head; `omits` names streams that the batch lacks."""

    config: PolicyLossConfig
    way: Way = "loss"
    omits: tuple[str, ...] = ()


def policy(*, omits: tuple[str, ...] = (), **fields_of_config: Any) -> Variant:
    return Variant(PolicyLossConfig(**fields_of_config), omits=omits)


def row_by_row(
    log_probs: Tensor, entropy: Tensor | None, batch: TokenBatch, config: Any, *, cp_group: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """A custom loss whose gradient can be taken while the logits are there."""
    return -batch.advantages * log_probs.square(), {"nats": log_probs}


row_by_row.row_separable = True


def of_whole_pack(
    log_probs: Tensor, entropy: Tensor | None, batch: TokenBatch, config: Any, *, cp_group: Any
) -> Tensor:
    """A custom loss that communicates."""
    return _over_ranks(batch.advantages, batch, cp_group) * log_probs - 0.1 * entropy


def tis_of_whole_pack(
    train: Tensor, rollout: Tensor, batch: TokenBatch, config: Any, *, cp_group: Any
) -> tuple[Tensor, Tensor]:
    """A custom correction that communicates."""
    difference = train - rollout
    return _over_ranks(difference, batch, cp_group).exp() + difference, difference < 0.3


def _over_ranks(stream: Tensor, batch: TokenBatch, cp_group: Any) -> Tensor:
    """A sum over all ranks' rows that train, divided by what it can be at most."""
    total = torch.where(batch.loss_mask, stream, 0.0).sum() / 100
    if cp_group is not None:
        dist.all_reduce(total, group=cp_group)
    return total


KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1}
TIS: dict[str, Any] = {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8}
CUSTOM: dict[str, Any] = {"loss_type": "custom_loss"}
RS: dict[str, Any] = {"use_rs": True, "rs_upper_bound": 1.2}

VARIANTS: dict[str, Variant] = {
    "ppo": policy(),
    "clip high": policy(eps_clip_high=0.28),
    "dual clip": policy(eps_clip_c=1.3),
    "entropy": policy(entropy_coef=0.01),
    "on policy": policy(omits=("old_log_probs",)),
    "without engine": policy(omits=("rollout_log_probs",)),
    "engine is old": policy(use_rollout_logprobs=True, omits=("old_log_probs",)),
    "gspo": policy(policy_objective="gspo"),
    "gspo, dual clip, entropy": policy(policy_objective="gspo", eps_clip_c=1.3, entropy_coef=0.01),
    "cispo": policy(policy_objective="cispo"),
    "reinforce": policy(policy_objective="reinforce", entropy_coef=0.01),
    "kl k1": policy(**KL, kl_loss_type="k1"),
    "kl k2": policy(**KL, kl_loss_type="k2"),
    "kl k3": policy(**KL, kl_loss_type="k3"),
    "kl low_var_kl": policy(**KL, kl_loss_type="low_var_kl"),
    "kl unbiased": policy(**KL, kl_loss_type="k3", use_unbiased_kl=True),
    "kl unbiased, gspo": policy(**KL, use_unbiased_kl=True, policy_objective="gspo"),
    "tis token": policy(**TIS),
    "tis sequence": policy(**TIS, tis_level="sequence"),
    "tis geometric": policy(**TIS, tis_level="geometric"),
    "icepop": policy(**TIS, tis_mode="icepop"),
    "icepop geometric": policy(**TIS, tis_mode="icepop", tis_level="geometric"),
    "rs token": policy(**RS),
    "rs sequence": policy(**RS, rs_level="sequence"),
    "rs geometric": policy(**RS, rs_level="geometric"),
    "rs veto": policy(**RS, rs_veto_threshold=0.6),
    "opsm": policy(use_opsm=True),
    "gspo, opsm, tis, rs": policy(
        **TIS, **RS, use_opsm=True, tis_level="sequence", rs_level="geometric",
        policy_objective="gspo", entropy_coef=0.01,
    ),
    "sft": policy(loss_type="sft_loss"),
    "value": Variant(PolicyLossConfig(loss_type="value_loss"), way="value"),
    "custom, row by row": policy(**CUSTOM, custom_loss_function_path=f"{__name__}:row_by_row"),
    "custom, of whole pack": policy(
        **CUSTOM, custom_loss_function_path=f"{__name__}:of_whole_pack", entropy_coef=0.01
    ),
    "custom tis": policy(use_tis=True, custom_tis_function_path=f"{__name__}:tis_of_whole_pack"),
    "log-probs alone": Variant(PolicyLossConfig(), way="log_probs"),
    "logits": Variant(PolicyLossConfig(), way="logits"),
}  # fmt: skip

READ_ONLY_WITH = {
    "kl_loss_type": "use_kl_loss",
    "tis_mode": "use_tis",
    "tis_level": "use_tis",
    "rs_level": "use_rs",
}


def missing_values(variants: Iterable[Variant]) -> set[tuple[str, str]]:
    """(field, value) of every alternative of PolicyLossConfig that no variant runs."""
    everything = set(alternatives())
    return everything - {
        (name, value_of(config, name))
        for config in (variant.config for variant in variants)
        for name, _ in everything
        if getattr(config, READ_ONLY_WITH.get(name, "loss_type"))
    }


def value_of(config: PolicyLossConfig, name: str) -> str:
    """The value in force of a field that names an alternative."""
    return config.objective if name == "policy_objective" else getattr(config, name)


def alternatives() -> Iterator[tuple[str, str]]:
    """(field, value) for every value of every Literal of PolicyLossConfig."""
    hints = get_type_hints(PolicyLossConfig)
    for field in fields(PolicyLossConfig):
        for part in (hints[field.name], *get_args(hints[field.name])):
            if get_origin(part) is Literal:
                yield from ((field.name, value) for value in get_args(part))
