"""Every flag of the loss does something, or is refused: no flag is believed and not obeyed.

A tiny fixed batch goes the way of a run, from words to loss, gradients and metrics, without a
model: hidden states are drawn, and so are old log-probs.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron.rl import cpu_backend, initialize
from megatron.rl.arguments import resolve
from megatron.rl.batching import build_micro_batch
from megatron.rl.computed import compute, computed_streams
from megatron.rl.data import check_data, make_source
from megatron.rl.flags.generate import all_flags
from megatron.rl.initialize import process_grid
from megatron.rl.model import build_head
from megatron.rl.rollout import Rollout, read_rollout
from slime_loss import (
    AdvantageConfig,
    AggregationConfig,
    HeadConfig,
    PolicyLossConfig,
    RLHead,
    TokenBatch,
    ValueHead,
    ValueLossConfig,
    merge_metrics,
    reduce_metrics,
)
from tests.megatron.rl.objectives import HERE
from tests.megatron.rl.tiny import (
    MODEL_FLAGS,
    RUN_FLAGS,
    near_uniform,
    with_every_field,
    write_rollouts,
)
from tests.spawn import World

CONFIGS = (AdvantageConfig, PolicyLossConfig, ValueLossConfig, AggregationConfig, HeadConfig)
RPP, PPO = "--advantage-estimator=reinforce_plus_plus", "--advantage-estimator=ppo"
TIS, RS, KL = "--use-tis", "--use-rs", "--use-kl-loss"
CRITIC = f"--loss-type=value_loss {PPO}"
OWN_LOSS = f"--loss-type=custom_loss --custom-loss-function-path={HERE}"


@dataclass(frozen=True)
class Case:
    """Two command lines that differ in one flag."""

    before: str
    after: str


CHANGES = {
    "advantage_estimator": Case("", "--advantage-estimator=rloo"),
    "normalize_advantages": Case("", "--normalize-advantages"),
    "gamma": Case(RPP, f"{RPP} --gamma=0.9"),
    "lambd": Case(PPO, f"{PPO} --lambd=0.9"),
    "kl_coef": Case(RPP, f"{RPP} --kl-coef=0.1"),
    "custom_advantage_function_path": Case("", f"--custom-advantage-function-path={HERE}:growing"),
    "loss_type": Case("", "--loss-type=sft_loss"),
    "custom_loss_function_path": Case(f"{OWN_LOSS}:plain_gradient", f"{OWN_LOSS}:likelihood"),
    "policy_objective": Case("", "--policy-objective=cispo"),
    "eps_clip": Case("", "--eps-clip=0.1"),
    "eps_clip_high": Case("", "--eps-clip-high=0.3"),
    "eps_clip_c": Case("", "--eps-clip-c=1.5"),
    "entropy_coef": Case("", "--entropy-coef=0.1"),
    "use_kl_loss": Case("", KL),
    "kl_loss_coef": Case(KL, f"{KL} --kl-loss-coef=0.1"),
    "kl_loss_type": Case(KL, f"{KL} --kl-loss-type=k3"),
    "use_unbiased_kl": Case(KL, f"{KL} --use-unbiased-kl"),
    "use_rollout_logprobs": Case("", "--use-rollout-logprobs"),
    "use_tis": Case("", TIS),
    "tis_mode": Case(TIS, f"{TIS} --tis-mode=icepop"),
    "tis_level": Case(TIS, f"{TIS} --tis-level=geometric"),
    "tis_clip": Case(TIS, f"{TIS} --tis-clip=1.5"),
    "tis_clip_low": Case(TIS, f"{TIS} --tis-clip-low=0.5"),
    "custom_tis_function_path": Case(TIS, f"{TIS} --custom-tis-function-path={HERE}:halved"),
    "use_rs": Case("", RS),
    "rs_level": Case(RS, f"{RS} --rs-level=geometric"),
    "rs_upper_bound": Case(
        f"{RS} --rs-lower-bound=0.5", f"{RS} --rs-lower-bound=0.5 --rs-upper-bound=4"
    ),
    "rs_lower_bound": Case(RS, f"{RS} --rs-lower-bound=0.1"),
    "rs_veto_threshold": Case(RS, f"{RS} --rs-veto-threshold=0.1"),
    "use_opsm": Case("", "--use-opsm"),
    "opsm_delta": Case("--use-opsm", "--use-opsm --opsm-delta=1"),
    "value_clip": Case(CRITIC, f"{CRITIC} --value-clip=5"),
    "loss_aggregation": Case("", "--loss-aggregation=prompt_mean"),
    "loss_aggregation_constant": Case(
        "--loss-aggregation=constant --loss-aggregation-constant=24",
        "--loss-aggregation=constant --loss-aggregation-constant=25",
    ),
    "calculate_per_token_loss": Case("", "--calculate-per-token-loss"),
    "count_masked_samples": Case("", "--count-masked-samples"),
    "rollout_temperature": Case("", "--rollout-temperature=0.7"),
}
"""Flags that change a loss, a gradient or a metric."""

SAME = {
    "log_probs_chunk_size": "--log-probs-chunk-size=3",
    "log_probs_memory_mb": "--log-probs-memory-mb=1",
    "recompute_loss_function": "--recompute-loss-function",
}
"""Flags that choose memory and speed alone: every number stays, up to rounding of sums."""


CHOICES = {
    "advantage_estimator": "",
    "loss_type": "",
    "policy_objective": "",
    "kl_loss_type": f"{KL} --kl-loss-coef=0.1",
    "tis_mode": TIS,
    "tis_level": TIS,
    "rs_level": RS,
    "loss_aggregation": "",
}
"""Flags with a list of choices, each of which must differ from every other, and what they need."""

MORE = {
    "reinforce_plus_plus_baseline": "--kl-coef=0.1",  # without it the advantages of dr_grpo
    "constant": "--loss-aggregation-constant=24",
    "value_loss": PPO,
    "custom_loss": f"--custom-loss-function-path={HERE}:plain_gradient",
}
"""What a choice needs besides."""

WIDTH = 32


@dataclass(frozen=True)
class Outcome:
    """What a training step would see."""

    loss: float
    metrics: dict[str, float]
    gradients: list[Tensor]

    def differs(self, other: "Outcome") -> bool:
        """Whether any number is another one."""
        return (
            self.metrics != other.metrics
            or self.loss != other.loss
            or not all(map(torch.equal, self.gradients, other.gradients))
        )


Run = Callable[[str], Outcome]


def drawn_old_outputs(rollout: Rollout) -> dict[int, Tensor]:
    """Near the log-probs that `outcome`'s hidden states give a policy, -ln(vocabulary)."""
    generator = torch.Generator().manual_seed(3)
    return {
        position: -5.7 + 0.3 * torch.randn(length, generator=generator)
        for position, length in enumerate(rollout.rows["response_length"].tolist())
    }


def outcome(rank: int, argv: list[str]) -> Outcome:
    """Loss, metrics and gradients of the first step."""
    cpu_backend.install()
    config = resolve(argv, 1, has_driver=False)
    world = initialize.World(rank, rank, 1, launched=True)
    with process_grid(config, world, torch.device("cpu")) as grid:
        source = make_source(config, check_data(config))
        rollout = read_rollout(0, source.rollout(0, 0), config, dp_rank=0)
        computed = compute(rollout, drawn_old_outputs(rollout), config, grid)
        streams = rollout.streams | computed_streams(rollout, config)
        step = rollout.steps[0]
        batches = [
            build_micro_batch(
                [rollout.trained(step, position, computed) for position in pack],
                streams,
                config,
                grid,
            ).batch
            for pack in step.micro_batches[0]
        ]
        head = build_head(config, grid.groups)
        is_critic = isinstance(head, ValueHead)
        return lossed(head, batches, 1 if is_critic else config.layout.padded_vocab_size)


def lossed(head: RLHead | ValueHead, batches: list[TokenBatch], num_columns: int) -> Outcome:
    """Forward and backward over drawn hidden states."""
    generator = torch.Generator().manual_seed(1)
    weight = (0.2 * torch.randn(num_columns, WIDTH, generator=generator)).requires_grad_()
    hiddens = [
        torch.randn(batch.num_rows, WIDTH, generator=generator).requires_grad_()
        for batch in batches
    ]
    outputs = [head(hidden, weight, batch) for hidden, batch in zip(hiddens, batches, strict=True)]
    loss = torch.stack([output.loss for output in outputs]).sum()
    loss.backward()
    metrics = reduce_metrics(merge_metrics([output.metrics for output in outputs])).scalars
    return Outcome(float(loss.detach()), metrics, [leaf.grad for leaf in (weight, *hiddens)])


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    with World(1, timeout_s=120) as world:
        yield world


@pytest.fixture(scope="module")
def run(one_rank: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    rows = near_uniform(with_every_field())
    rows[3]["loss_mask"] = [0] * rows[3]["response_length"]
    data = write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", rows)
    common = [*MODEL_FLAGS, *RUN_FLAGS, "--rollout-batch-size=4", "--micro-batch-size=4"]
    common += ["--no-shuffle", "--global-batch-size=8", f"--rollout-data={data}"]

    @cache
    def outcome_of(flags: str) -> Outcome:
        [found] = one_rank.run(outcome, [*common, *flags.split()])
        return found

    return outcome_of


def test_every_flag_has_its_entry() -> None:
    names = [field.name for config in CONFIGS for field in fields(config)]
    assert sorted(names) == sorted([*CHANGES, *SAME])


@pytest.mark.parametrize("name", CHANGES)
def test_a_flag_changes_numbers(run: Run, name: str) -> None:
    case, flag = CHANGES[name], all_flags()[name]
    given = [
        {word.partition("=")[0] for word in flags.split()} for flags in (case.before, case.after)
    ]
    assert flag.spelling in given[1]
    assert given[1] - given[0] <= {flag.spelling}
    assert run(case.before).differs(run(case.after))


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_one_of_its_own(run: Run, name: str) -> None:
    found = {}
    for choice in all_flags()[name].type.choices:
        more = MORE.get(choice, "")
        found[choice] = run(f"{CHOICES[name]} {all_flags()[name].spelling}={choice} {more}")
    for one, other in itertools.combinations(found, 2):
        assert found[one].differs(found[other]), (one, other)


def test_every_flag_with_choices_is_looked_at() -> None:
    names = [field.name for config in CONFIGS for field in fields(config)]
    assert sorted(CHOICES) == sorted(name for name in names if all_flags()[name].type.choices)


@pytest.mark.parametrize("objective", ["", "--advantage-estimator=gspo"])
@pytest.mark.parametrize("name", SAME)
def test_a_flag_of_memory_changes_no_number(run: Run, name: str, objective: str) -> None:
    expected, found = run(objective), run(f"{objective} {SAME[name]}")
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
    for got, wanted in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
