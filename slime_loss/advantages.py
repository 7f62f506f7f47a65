"""The advantage of every token of a rollout, by the estimator that the config names.

Once per rollout, without gradient. Each rank asks for the samples it holds; rewards and groups are
those of the whole rollout, so only the whitening communicates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_loss.batch import check_alike, check_vector
from slime_loss.config import AdvantageConfig
from slime_loss.custom import call_function
from slime_loss.group_relative import group_relative_advantages
from slime_loss.returns import (
    SampleMasks,
    SampleStreams,
    gae,
    reinforce_plus_plus_returns,
    token_advantages,
    token_rewards,
)
from slime_loss.whiten import masked_whiten


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are made of: N samples of the whole rollout, n of them held by this rank.

    Attributes:
        rewards: [N], finite.
        group_index: [N], equal for the samples of one prompt.
        own: [n], the positions, among the N, of the samples that this rank holds.
        loss_mask: n of [R], true where a response token trains.
        kl: n of [R], nats, the KL estimate of each response token; needed where kl_coef is not 0.
        values: n of [R], the critic's value before each response token; needed by ppo.
    """

    rewards: Float[Tensor, " samples"]
    group_index: Int64[Tensor, " samples"]
    own: Int64[Tensor, " own"]
    loss_mask: SampleMasks
    kl: SampleStreams | None = None
    values: SampleStreams | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices."""
        check_vector("rewards", self.rewards, None)
        check_vector("group_index", self.group_index, torch.int64)
        check_alike("group_index", self.group_index, "rewards", self.rewards)
        check_vector("own", self.own, torch.int64)
        outside = (self.own < 0) | (self.own >= self.rewards.shape[0])
        if bool(outside.any()):
            raise ValueError(
                f"own must be positions of rewards, [0, {self.rewards.shape[0]}): "
                f"own={self.own[outside][0]}"
            )
        for sample, mask in enumerate(self.loss_mask):
            check_vector(f"loss_mask[{sample}]", mask, torch.bool)
        for name in ("loss_mask", "kl", "values"):
            streams: SampleStreams | SampleMasks | None = getattr(self, name)
            if streams is not None:
                self._check_own(name, streams)

    def copy(self) -> "AdvantageInputs":
        """The same in memory of its own, for functions that are not ours."""
        return replace(
            self,
            rewards=self.rewards.clone(),
            group_index=self.group_index.clone(),
            own=self.own.clone(),
            loss_mask=[mask.clone() for mask in self.loss_mask],
            kl=None if self.kl is None else [stream.clone() for stream in self.kl],
            values=None if self.values is None else [stream.clone() for stream in self.values],
        )

    def _check_own(self, name: str, streams: SampleStreams | SampleMasks) -> None:
        """Raise ValueError unless there is one [R] for each own sample."""
        if len(streams) != self.own.shape[0]:
            raise ValueError(
                f"{name} must have one entry per own sample: "
                f"len({name})={len(streams)}, len(own)={self.own.shape[0]}"
            )
        for sample, (stream, mask) in enumerate(zip(streams, self.loss_mask, strict=True)):
            check_alike(f"{name}[{sample}]", stream, f"loss_mask[{sample}]", mask)


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of the samples that this rank holds, in the order of `own`.

    Attributes:
        advantages: n of [R], fp32, or fp64 when an input is; 0 where a token does not train.
        returns: n of [R], what a critic learns; None where the estimator makes none.
    """

    advantages: list[Float[Tensor, " _"]]
    returns: list[Float[Tensor, " _"]] | None = None


def compute_advantages(
    inputs: AdvantageInputs, config: AdvantageConfig, *, group: ProcessGroup | None = None
) -> TokenAdvantages:
    """Compute the advantages by the estimator, or custom function, that the config names.

    * grpo, gspo, cispo: the reward against its group, over the group's standard deviation;
    * dr_grpo: against the group's mean; rloo: against the mean of the group's others;
    * reinforce_plus_plus: the discounted return of each token, from the reward at the last token
      and -kl_coef kl at each; REINFORCE++ itself is this with normalize_advantages;
    * reinforce_plus_plus_baseline: against the group's mean, -kl_coef kl at each token; likewise;
    * ppo: generalised advantage estimates of these token rewards, and their returns.

    With normalize_advantages they are whitened over all trained tokens of the rollout; the returns
    are not.

    Args:
        inputs: Rewards, groups, and the streams of this rank's samples.
        config: The estimator.
        group: The ranks that hold different samples (data parallel; those that share a sample, as
            in context parallelism, must not be in it twice). Only normalize_advantages
            communicates over it, two all-reduces, in which a rank without a sample takes part.
            None is one process.

    Returns:
        Advantages, and with ppo returns, of this rank's samples.

    Raises:
        ValueError: A stream that the estimator needs is missing, kl_coef, gamma or lambd is out of
            range, a reward is not finite, or the custom function is not to be found or returns
            something else than advantages.
    """
    path = config.custom_advantage_function_path
    if path is not None:
        found = TokenAdvantages(_custom_advantages(path, inputs, config))
    else:
        found = _ESTIMATORS[config.advantage_estimator](inputs, config)
    if not config.normalize_advantages:
        return found
    return TokenAdvantages(_whiten(found.advantages, inputs, group), found.returns)


def _group_relative(
    *, scale: str, leave_one_out: bool = False
) -> Callable[[AdvantageInputs, AdvantageConfig], TokenAdvantages]:
    """The estimator that compares rewards within groups, and takes no KL from them."""

    def estimate(inputs: AdvantageInputs, _: AdvantageConfig) -> TokenAdvantages:
        of_samples = group_relative_advantages(
            inputs.rewards, inputs.group_index, scale=scale, leave_one_out=leave_one_out
        )
        kl = _zeros(inputs)
        return TokenAdvantages(
            token_advantages(of_samples[inputs.own], kl, inputs.loss_mask, kl_coef=0.0)
        )

    return estimate


def _reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    returns = reinforce_plus_plus_returns(
        inputs.rewards[inputs.own],
        _kl(inputs, config),
        inputs.loss_mask,
        kl_coef=config.kl_coef,
        gamma=config.gamma,
    )
    return TokenAdvantages(returns)


def _reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> TokenAdvantages:
    above = group_relative_advantages(inputs.rewards, inputs.group_index, scale="none")
    kl = _kl(inputs, config)
    return TokenAdvantages(
        token_advantages(above[inputs.own], kl, inputs.loss_mask, kl_coef=config.kl_coef)
    )


def _ppo(inputs: AdvantageInputs, config: AdvantageConfig) -> TokenAdvantages:
    if inputs.values is None:
        raise ValueError("values is needed by advantage_estimator ppo: values=None")
    rewards = token_rewards(
        inputs.rewards[inputs.own], _kl(inputs, config), inputs.loss_mask, kl_coef=config.kl_coef
    )
    advantages, returns = gae(
        rewards, inputs.values, inputs.loss_mask, gamma=config.gamma, lambd=config.lambd
    )
    return TokenAdvantages(advantages, returns)


_ESTIMATORS: dict[str, Callable[[AdvantageInputs, AdvantageConfig], TokenAdvantages]] = {
    "grpo": _group_relative(scale="std"),
    "gspo": _group_relative(scale="std"),
    "cispo": _group_relative(scale="std"),
    "dr_grpo": _group_relative(scale="none"),
    "rloo": _group_relative(scale="none", leave_one_out=True),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "ppo": _ppo,
}


def _kl(inputs: AdvantageInputs, config: AdvantageConfig) -> SampleStreams:
    """The KL estimates, or zeros that a coefficient of 0 does not read."""
    if config.kl_coef == 0:
        return _zeros(inputs)
    if inputs.kl is None:
        raise ValueError(f"kl is needed by kl_coef: kl=None, kl_coef={config.kl_coef}")
    return inputs.kl


def _zeros(inputs: AdvantageInputs) -> SampleStreams:
    return [torch.zeros(mask.shape, device=mask.device) for mask in inputs.loss_mask]


def _whiten(
    advantages: Sequence[Tensor], inputs: AdvantageInputs, group: ProcessGroup | None
) -> list[Tensor]:
    """Whiten as one stream, which a rank without a sample has too, with no entry."""
    none = inputs.rewards.new_zeros(0, dtype=torch.float32)
    stream, mask = torch.cat([none, *advantages]), torch.cat([none.bool(), *inputs.loss_mask])
    whitened = masked_whiten(stream, mask, group=group)
    return list(whitened.split([len(stream) for stream in advantages]))


def _custom_advantages(path: str, inputs: AdvantageInputs, config: AdvantageConfig) -> list[Tensor]:
    """What the function returns, as one stream per sample, 0 where a token does not train."""
    field = "custom_advantage_function_path"
    found: object = call_function(path, field, inputs.copy(), config)
    rule = f"{field} {path} must return"
    if isinstance(found, Tensor) and found.dim() == 1:
        found = list(found)
    if not isinstance(found, list | tuple) or len(found) != len(inputs.loss_mask):
        shape = f"len={len(found)}" if isinstance(found, list | tuple) else f"type={type(found)}"
        raise ValueError(f"{rule} {len(inputs.loss_mask)} advantages, one per own sample: {shape}")
    return [
        _checked(f"{rule} at [{sample}]", stream, mask)
        for sample, (stream, mask) in enumerate(zip(found, inputs.loss_mask, strict=True))
    ]


def _checked(rule: str, advantage: object, mask: Tensor) -> Tensor:
    """One sample's advantages from a custom function, as a stream [R] without masked tokens."""
    if not isinstance(advantage, Tensor) or not advantage.is_floating_point():
        kind = advantage.dtype if isinstance(advantage, Tensor) else type(advantage).__name__
        raise ValueError(f"{rule} a floating point tensor: {kind}")
    if advantage.requires_grad:
        raise ValueError(f"{rule} a tensor without gradient: requires_grad=True")
    if advantage.shape not in (mask.shape, torch.Size()):
        raise ValueError(
            f"{rule} one number, or one for each of the response tokens: "
            f"shape={tuple(advantage.shape)}, loss_mask.shape={tuple(mask.shape)}"
        )
    if advantage.device != mask.device:
        raise ValueError(f"{rule} a tensor on {mask.device}: device={advantage.device}")
    stream = torch.where(mask, advantage, 0.0)
    if not bool(stream.isfinite().all()):
        token = int((~stream.isfinite()).nonzero()[0])
        raise ValueError(f"{rule} finite advantages: [{token}]={float(stream[token])}")
    return stream.to(torch.promote_types(advantage.dtype, torch.float32))
