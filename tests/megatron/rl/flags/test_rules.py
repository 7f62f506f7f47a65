"""One command line for every rule: it breaks that rule, and says so with the flag and its value."""

import re
from pathlib import Path

import pytest

from megatron.rl.flags.generate import all_flags
from megatron.rl.flags.loss_rules import LOSS_RULES
from megatron.rl.flags.model_rules import MODEL_RULES
from megatron.rl.flags.rule import Rule
from megatron.rl.flags.run_rules import NOTES, REQUIRED, RUN_RULES
from tests.megatron.rl.flags.broken_rules import BROKEN, ROLLOUT
from tests.megatron.rl.flags.command_line import resolved, small_run, violations

ALL_RULES = (*RUN_RULES, *LOSS_RULES, *MODEL_RULES)


def name_of(case: tuple) -> str:
    return f"{case[2]}-{case[3][:24]}".replace(" ", "_")


@pytest.mark.parametrize(("flags", "ranks", "flag", "rule"), BROKEN, ids=map(name_of, BROKEN))
def test_a_broken_rule_names_flag_value_and_fix(
    tmp_path: Path, flags: str, ranks: int, flag: str, rule: str
) -> None:
    argv = small_run(tmp_path, flags.format(tmp=tmp_path))
    found = violations(argv, ranks, has_driver="--device cuda" in flags)
    (violation,) = [v for v in found if v.flag == all_flags()[flag].spelling and rule in v.rule]
    assert violation.given.endswith(("(command line)", "(default)"))
    assert violation.fix
    assert "{" not in violation.rule + violation.fix.replace("{thd,bshd}", "")


def found_by(case: tuple, directory: Path) -> set[Rule]:
    """The rules that a case's command line breaks, known by their texts."""
    flags, ranks, *_ = case
    argv = small_run(directory, flags.format(tmp=directory))
    found = violations(argv, ranks, has_driver="--device cuda" in flags)

    def told(rule: Rule) -> bool:
        text = re.sub(r"\\{\w+\\}", ".+", re.escape(rule.rule))
        spelling = all_flags()[rule.flag].spelling
        return any(v.flag == spelling and re.fullmatch(text, v.rule) for v in found)

    return {rule for rule in ALL_RULES if told(rule)}


def test_every_rule_has_a_case(tmp_path: Path) -> None:
    covered = set().union(*(found_by(case, tmp_path) for case in BROKEN))
    missing = [rule for rule in ALL_RULES if rule not in covered]
    assert [(rule.flag, rule.rule) for rule in missing] == []


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_flag_that_is_missing(tmp_path: Path, name: str) -> None:
    argv = small_run(tmp_path)
    position = argv.index(all_flags()[name].spelling)
    (violation,) = violations([*argv[:position], *argv[position + 2 :]])
    assert (violation.flag, violation.rule) == (all_flags()[name].spelling, "must be given")
    assert f"add {violation.flag}" in violation.fix


# (flags, ranks, part of the note)
WITHOUT_EFFECT = [
    ("--allgather-cp", 1, "--allgather-cp has no effect with --context-parallel-size 1"),
    ("--sequence-parallel", 1, "--sequence-parallel has no effect with --tensor-model"),
    (
        "--use-dynamic-batch-size --max-tokens-per-gpu 99 --micro-batch-size 2",
        1,
        "--micro-batch-size has no effect",
    ),
    (f"{ROLLOUT} --global-batch-size 3", 1, "--global-batch-size does not divide"),
    ("--global-batch-size 1", 2, "--global-batch-size is less than the number of model replicas"),
    ("--truncate-samples", 1, "--truncate-samples has no effect without --max-position-embeddings"),
    ("--finetune", 1, "--finetune has no effect without --load"),
    ("--no-load-optim", 1, "--no-load-optim has no effect without --load"),
    ("--no-load-rng", 1, "--no-load-rng has no effect without --load"),
    ("--no-save-optim", 1, "--no-save-optim has no effect without --save"),
    ("--no-save-rng", 1, "--no-save-rng has no effect without --save"),
]


@pytest.mark.parametrize(("flags", "ranks", "note"), WITHOUT_EFFECT)
def test_a_flag_without_effect_is_noted(tmp_path: Path, flags: str, ranks: int, note: str) -> None:
    (found,) = resolved(tmp_path, flags, ranks).notes
    assert note in found
    assert "\n" not in found


def test_every_note_has_a_case_and_a_plain_run_has_none(tmp_path: Path) -> None:
    assert len(WITHOUT_EFFECT) == len(NOTES)
    assert resolved(tmp_path).notes == ()
