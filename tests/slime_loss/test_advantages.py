"""One entry for every estimator: by name, over ranks, whitened, or a function of one's own."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.testing import assert_close

from slime_loss import AdvantageConfig, AdvantageInputs, TokenAdvantages, compute_advantages
from tests.slime_loss import references
from tests.spawn import run_on_ranks

REWARDS = [1.0, 0.0, 0.5, 0.3, 2.0, 0.25, 0.25]
GROUPS = [0, 1, 0, 1, 0, 7, 7]
MASKS = [[1, 1, 0, 1], [1], [0, 0], [1, 0, 1], [1, 1], [1, 1, 1], [0, 1]]
GROUP_OPTIONS = {
    "grpo": {"scale": "std"},
    "gspo": {"scale": "std"},
    "cispo": {"scale": "std"},
    "dr_grpo": {"scale": "none"},
    "rloo": {"scale": "none", "leave_one_out": True},
}
ALL = [*GROUP_OPTIONS, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
WITH_KL = ALL[len(GROUP_OPTIONS) :]


def numbers(seed: int, masks: list[list[int]]) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(mask), generator=generator).double().tolist() for mask in masks]


KL, VALUES = numbers(1, MASKS), numbers(2, MASKS)


def inputs_of(own: list[int], dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """What a rank that holds these samples gives."""
    return AdvantageInputs(
        rewards=torch.tensor(REWARDS, dtype=dtype),
        group_index=torch.tensor(GROUPS),
        own=torch.tensor(own, dtype=torch.int64),
        loss_mask=[torch.tensor(MASKS[i], dtype=torch.bool) for i in own],
        kl=[torch.tensor(KL[i], dtype=dtype) for i in own],
        values=[torch.tensor(VALUES[i], dtype=dtype) for i in own],
    )


WHOLE = inputs_of(list(range(len(REWARDS))))


def expected_of(config: AdvantageConfig) -> list[list[float]]:
    """The loops, for all samples, before whitening."""
    name, kl_coef, masks = config.advantage_estimator, config.kl_coef, MASKS
    flags = [[bool(m) for m in mask] for mask in masks]
    if name in GROUP_OPTIONS:
        of_samples = references.group_relative_advantages(REWARDS, GROUPS, **GROUP_OPTIONS[name])
        return [[a * m for m in mask] for a, mask in zip(of_samples, masks, strict=True)]
    if name == "reinforce_plus_plus_baseline":
        return references.reinforce_plus_plus_baseline(REWARDS, GROUPS, KL, flags, kl_coef)
    samples = zip(REWARDS, KL, flags, strict=True)
    if name == "reinforce_plus_plus":
        return [
            references.reinforce_plus_plus_returns(*sample, kl_coef, config.gamma)
            for sample in samples
        ]
    # with gamma 0 a return is the reward of its own token
    rewards = [references.reinforce_plus_plus_returns(*s, kl_coef, 0.0) for s in samples]
    return [
        references.gae(r, v, m, config.gamma, config.lambd)[0]
        for r, v, m in zip(rewards, VALUES, flags, strict=True)
    ]


def config_of(estimator: str, **options: Any) -> AdvantageConfig:
    """The estimator with all that it reads away from its default."""
    read: dict[str, float] = {"kl_coef": 0.1} if estimator in WITH_KL else {}
    if estimator in ("reinforce_plus_plus", "ppo"):
        read["gamma"] = 0.9
    if estimator == "ppo":
        read["lambd"] = 0.7
    return AdvantageConfig(advantage_estimator=estimator, **read, **options)


def assert_streams(found: list[Tensor], expected: list[list[float]], tolerance: float) -> None:
    assert [len(stream) for stream in found] == [len(stream) for stream in expected]
    for stream, values in zip(found, expected, strict=True):
        wanted = torch.tensor(values, dtype=torch.float64)
        assert_close(stream.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("estimator", ALL)
def test_every_estimator_equals_its_loop(estimator: str) -> None:
    config = config_of(estimator)
    found = compute_advantages(WHOLE, config)
    assert_streams(found.advantages, expected_of(config), 1e-12)
    assert (found.returns is None) == (estimator != "ppo")
    if found.returns is not None:
        flat = zip(found.returns, found.advantages, WHOLE.values, WHOLE.loss_mask, strict=True)
        for returns, advantages, values, mask in flat:
            assert_close(returns, torch.where(mask, advantages + values, 0.0), rtol=0, atol=1e-12)
    in_fp32 = compute_advantages(inputs_of([3, 0], torch.float32), config).advantages
    assert [stream.dtype for stream in in_fp32] == [torch.float32] * 2


@pytest.mark.parametrize("estimator", ALL)
def test_a_share_of_the_samples_gives_their_share(estimator: str) -> None:
    """Groups are compared over the whole rollout, whoever holds its samples."""
    config = config_of(estimator)
    whole = compute_advantages(WHOLE, config).advantages
    for own in ([4, 0, 3], [], [6]):
        found = compute_advantages(inputs_of(own), config).advantages
        assert len(found) == len(own)
        assert all(torch.equal(got, whole[i]) for got, i in zip(found, own, strict=True))


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "ppo"])
def test_normalize_advantages_whitens_all_trained_tokens(estimator: str) -> None:
    config = config_of(estimator, normalize_advantages=True)
    found = compute_advantages(WHOLE, config)
    before = expected_of(config)
    mask = [bool(m) for of_sample in MASKS for m in of_sample]
    whitened = iter(references.masked_whiten([x for s in before for x in s], mask, True, 1e-8))
    assert_streams(found.advantages, [[next(whitened) for _ in stream] for stream in before], 1e-12)
    plain = compute_advantages(WHOLE, replace(config, normalize_advantages=False)).returns
    assert found.returns is None or all(map(torch.equal, found.returns, plain or []))


SHARES = ([4, 0, 3, 6], [1, 2, 5], [])


def share_of(rank: int, config: AdvantageConfig) -> TokenAdvantages:
    return compute_advantages(inputs_of(SHARES[rank]), config, group=distributed.group.WORLD)


def test_whitening_spans_the_ranks_one_of_which_has_no_sample() -> None:
    config = config_of("reinforce_plus_plus", normalize_advantages=True)
    whole = compute_advantages(WHOLE, config).advantages
    for found, own in zip(run_on_ranks(3, share_of, config), SHARES, strict=True):
        assert_streams(found.advantages, [whole[i].tolist() for i in own], 1e-12)


def test_masked_tokens_are_not_read() -> None:
    for estimator in ALL:
        config = config_of(estimator, normalize_advantages=True)
        poisoned = replace(
            WHOLE,
            **{
                name: [
                    torch.where(mask, stream, math.nan)
                    for stream, mask in zip(getattr(WHOLE, name), WHOLE.loss_mask, strict=True)
                ]
                for name in ("kl", "values")
            },
        )
        clean, found = (compute_advantages(x, config).advantages for x in (WHOLE, poisoned))
        assert all(map(torch.equal, found, clean)), estimator


@pytest.mark.parametrize(
    ("estimator", "missing", "message"),
    [
        ("ppo", "values", "^values is needed by advantage_estimator ppo: values=None$"),
        ("ppo", "kl", "^kl is needed by kl_coef: kl=None, kl_coef=0.1$"),
        ("reinforce_plus_plus", "kl", "^kl is needed by kl_coef: kl=None, kl_coef=0.1$"),
        ("reinforce_plus_plus_baseline", "kl", "^kl is needed by kl_coef"),
    ],
)
def test_a_missing_stream_is_named(estimator: str, missing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_advantages(replace(WHOLE, **{missing: None}), config_of(estimator))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"own": torch.tensor([0, 7])}, r"own must be positions of rewards, \[0, 7\): own=7"),
        ({"own": torch.tensor([-1])}, "own=-1"),
        ({"own": torch.tensor([0])}, r"loss_mask must have one entry per own sample: len\(loss_m"),
        ({"kl": WHOLE.kl[1:]}, r"kl must have one entry per own sample: len\(kl\)=6, len\(own\)=7"),
        ({"values": WHOLE.values[::-1]}, r"values\[0\] must have the shape of loss_mask\[0\]"),
        ({"group_index": torch.tensor([0])}, "group_index must have the shape of rewards"),
        ({"loss_mask": [m.long() for m in WHOLE.loss_mask]}, r"loss_mask\[0\] must be torch.bool"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with references.without_type_checker(), pytest.raises(ValueError, match=message):
        replace(WHOLE, **changes)


def custom_per_token(inputs: AdvantageInputs, config: AdvantageConfig) -> list[Tensor]:
    """The KL estimate times gamma, not finite where a token does not train."""
    streams = zip(inputs.kl, inputs.loss_mask, strict=True)
    return [torch.where(mask, config.gamma * kl, math.inf) for kl, mask in streams]


def custom_per_sample(inputs: AdvantageInputs, _: AdvantageConfig) -> Tensor:
    """The reward itself."""
    return inputs.rewards[inputs.own]


def custom(name: str, **options: Any) -> AdvantageConfig:
    return AdvantageConfig(custom_advantage_function_path=f"{__name__}:{name}", **options)


def test_a_custom_function_gives_a_stream_or_a_number_per_sample() -> None:
    per_token = compute_advantages(WHOLE, custom("custom_per_token", gamma=0.5))
    expected = [
        [0.5 * k * m for k, m in zip(kl, mask, strict=True)]
        for kl, mask in zip(KL, MASKS, strict=True)
    ]
    assert_streams(per_token.advantages, expected, 0)
    assert per_token.returns is None
    own = [5, 3]
    per_sample = compute_advantages(inputs_of(own), custom("custom_per_sample")).advantages
    assert_streams(per_sample, [[REWARDS[i] * m for m in MASKS[i]] for i in own], 0)
    whitened = compute_advantages(WHOLE, custom("custom_per_sample", normalize_advantages=True))
    assert abs(float(torch.cat(whitened.advantages).sum())) < 1e-12


def returns_nothing(*_: object) -> None:
    """No advantages."""


def returns_too_few(inputs: AdvantageInputs, _: object) -> Tensor:
    return inputs.rewards[:1]


def returns_a_matrix(*_: object) -> Tensor:
    return torch.zeros(7, 4)


def returns_integers(inputs: AdvantageInputs, _: object) -> list[Tensor]:
    return [mask.long() for mask in inputs.loss_mask]


def returns_numbers(inputs: AdvantageInputs, _: object) -> list[float]:
    return [0.0 for _ in inputs.loss_mask]


def returns_gradients(inputs: AdvantageInputs, _: object) -> Tensor:
    return inputs.rewards.clone().requires_grad_()


def returns_other_lengths(inputs: AdvantageInputs, _: object) -> list[Tensor]:
    return [torch.zeros(2) for _ in inputs.loss_mask]


def returns_nan(inputs: AdvantageInputs, _: object) -> list[Tensor]:
    return [torch.full(mask.shape, math.nan) for mask in inputs.loss_mask]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("returns_nothing", "7 advantages, one per own sample"),
        ("returns_too_few", "7 advantages, one per own sample: len=1"),
        ("returns_a_matrix", "7 advantages, one per own sample"),
        ("returns_integers", r"at \[0\] a floating point tensor: torch.int64"),
        ("returns_numbers", r"at \[0\] a floating point tensor: float"),
        ("returns_gradients", r"at \[0\] a tensor without gradient"),
        ("returns_other_lengths", r"at \[0\] one number, or one for each of the response tokens"),
        ("returns_nan", r"at \[0\] finite advantages: \[0\]=nan"),
    ],
)
def test_what_a_custom_function_returns_is_checked(name: str, message: str) -> None:
    rule = rf"custom_advantage_function_path {__name__}:{name} must return {message}"
    with pytest.raises(ValueError, match=rule):
        compute_advantages(WHOLE, custom(name))
