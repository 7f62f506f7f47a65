import ast
import inspect
import re
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import pytest

from megatron.rl import config
from megatron.rl.flags import tables
from megatron.rl.flags.generate import (
    Flag,
    all_flags,
    documentation_of,
    help_text,
    not_offered,
    sections,
)
from megatron.rl.flags.read import read_command_line
from megatron.rl.flags.values import written
from megatron.rl.hf.architectures import FIELDS
from slime_loss import config as loss_config

OURS = [cls for cls in sections().values() if not cls.__module__.startswith("megatron.core")]
CORE_FIELDS = [
    f"{section}.{one.name}"
    for section, cls in sections().items()
    if cls not in OURS
    for one in fields(cls)
]


def words_of(flag: Flag) -> tuple[list[str], Any]:
    """Words for a flag, and the value that they mean, different from its default."""
    if flag.type.choices:
        word = next(word for word in flag.type.choices if word != written(flag.default))
        return [word], flag.type.read(word)
    member = flag.type.members[0]
    if member is int:
        return ["7"], 7
    if member is float:
        return ["0.375"], 0.375
    if member is str:
        return ["some text"], "some text"
    items = ["1", "2"] if member == tuple[int, ...] else ["a", "b"]
    return items, flag.type.read(items)


@pytest.mark.parametrize("flag", all_flags().values(), ids=lambda flag: flag.name)
def test_every_spelling_of_a_flag_gives_its_field_a_value(flag: Flag) -> None:
    for section in flag.sections:
        assert flag.name in {one.name for one in fields(sections()[section])}
    for name in flag.names:
        words, value = ([], True) if flag.type.is_switch else words_of(flag)
        given, violations = read_command_line([name, *words])
        assert (given[flag.name].value, violations) == (value, [])
    for name in flag.off_names:
        assert read_command_line([name])[0][flag.name].value is False


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_every_field_of_ours_has_a_docstring_and_a_flag(cls: type) -> None:
    documented = documentation_of(cls)
    for one in fields(cls):
        assert len(documented[one.name]) > 10
        assert one.name in all_flags()
        assert all_flags()[one.name].help


def test_every_field_of_core_is_a_flag_or_has_a_reason() -> None:
    for name in CORE_FIELDS:
        section, _, one = name.partition(".")
        offered = one in all_flags() and section in all_flags()[one].sections
        assert offered != (tables.why_not_offered(name) is not None or is_no_value(one)), name


def is_no_value(name: str) -> bool:
    kinds = "activation finalize_model_grads grad_scale moe_grad_scale no_sync grad_sync param_sync"
    functions = {f"{kind}_func" for kind in kinds.split()}
    methods = {"init_method", "output_layer_init_method", "embedding_init_method"}
    return name.startswith("_") or name in functions | methods | {"quant_recipe"}


def test_the_tables_name_fields_that_exist() -> None:
    for patterns in tables.NOT_OFFERED:
        for pattern in patterns:
            assert any(fnmatchcase(name, pattern) for name in CORE_FIELDS), pattern
    named = {*tables.DEFAULTS, *tables.CHOICES, *tables.METAVARS, *tables.COMMON}
    assert named | set(tables.MEGATRON_NAMES) <= set(all_flags())
    assert set(FIELDS) <= set(all_flags())


def test_megatrons_names_are_understood() -> None:
    names = {name for flag in all_flags().values() for name in (*flag.names, *flag.off_names)}
    megatron = """--lr --min-lr --clip-grad --weight-decay --adam-beta1 --adam-beta2 --adam-eps
        --bf16 --swiglu --disable-bias-linear --norm-epsilon --normalization --num-query-groups
        --group-query-attention --ffn-hidden-size --kv-channels --max-position-embeddings
        --rotary-base --rotary-percent --untie-embeddings-and-output-weights
        --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
        --recompute-granularity --attention-backend --attention-dropout
        --hidden-dropout --train-iters --lr-decay-style --lr-warmup-iters --lr-warmup-fraction
        --save --load --save-interval --save-retain-interval --finetune --no-load-optim
        --no-load-rng --no-save-optim --no-save-rng --exit-interval --exit-duration-in-mins
        --log-interval --tensorboard-dir --seed --distributed-timeout-minutes --micro-batch-size
        --global-batch-size --vocab-size --make-vocab-size-divisible-by --num-experts
        --accumulate-allreduce-grads-in-fp32 --no-bias-swiglu-fusion --no-bias-gelu-fusion
        --no-bias-dropout-fusion --no-gradient-accumulation-fusion --ddp-bucket-size
        --apply-layernorm-1p --fp8-format --decoder-first-pipeline-num-layers --qk-layernorm
        --attention-softmax-in-fp32 --num-virtual-stages-per-pipeline-rank --no-initialization"""
    assert set(megatron.split()) <= names


def test_one_flag_feeds_every_dataclass_with_its_field() -> None:
    assert all_flags()["bf16"].sections == ("transformer", "optimizer")
    assert all_flags()["use_distributed_optimizer"].sections == ("ddp", "optimizer")
    # the transformer's own calculate_per_token_loss is always on, so the flag is the loss's alone
    assert all_flags()["calculate_per_token_loss"].sections == ("aggregation",)


def test_a_switch_is_shown_by_the_name_that_changes_its_default() -> None:
    spellings = {name: all_flags()[name].spelling for name in ("bf16", "shuffle", "no_load_optim")}
    assert spellings == {
        "bf16": "--bf16",
        "shuffle": "--no-shuffle",
        "no_load_optim": "--no-load-optim",
    }
    assert all_flags()["add_bias_linear"].spelling == "--disable-bias-linear"
    assert all_flags()["no_load_optim"].off_names == ("--load-optim",)


def test_defaults_are_cores_unless_a_table_says_otherwise() -> None:
    for section, cls in sections().items():
        for one in fields(cls):
            flag = all_flags().get(one.name)
            if flag is None or section != flag.sections[0] or one.name in tables.DEFAULTS:
                continue
            default = one.default_factory() if one.default is MISSING else one.default
            assert flag.default == default, flag.name


def test_documentation_is_inherited() -> None:
    @dataclass
    class Base:
        first: int = 0
        """Of the base,
        on two lines."""

    @dataclass
    class Derived(Base):
        second: list[int] = field(default_factory=list)
        """Of the derived."""

    assert documentation_of(Derived) == {
        "first": "Of the base, on two lines.",
        "second": "Of the derived.",
    }


def test_help_shows_our_flags_and_the_common_ones_of_core() -> None:
    text = help_text(everything=False, width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 420
    titles = re.findall(r"^([A-Z].*):$", text, re.MULTILINE)
    assert titles[:3] == ["Rollouts and batches", "Rollouts that the run makes", "Advantages"]
    assert set(tables.GROUPS.values()) == set(titles)
    for flag in all_flags().values():
        shown = re.search(rf"^  {flag.spelling}\b(?!-)", text, re.MULTILINE)
        assert (shown is not None) == flag.is_common, flag.name
    assert "--lr X " in text
    assert "--qkv-format {thd,bshd}" in text
    assert "(default: 1234)" in text
    assert "--help-all" in text


def test_help_all_shows_every_flag_in_full() -> None:
    text = help_text(everything=True, width=100)
    for flag in all_flags().values():
        assert re.search(rf"^  {flag.spelling}\b(?!-)", text, re.MULTILINE), flag.name
    assert "https://arxiv.org/abs/2205.05198" in text
    assert "https://arxiv.org/abs/2205.05198" not in help_text(everything=False, width=100)


def test_docstrings_of_ours_stand_under_their_fields() -> None:
    """A string that slipped under the wrong field would document that one."""
    for module in (config, loss_config):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                continue
            body = node.body[1:]
            for this, after in zip(body, [*body[1:], None], strict=True):
                if isinstance(this, ast.AnnAssign):
                    assert isinstance(after, ast.Expr) or node.name == "RunConfig", this.target


def test_what_is_not_offered_says_why() -> None:
    assert "use --bf16" in not_offered()["--fp16"]
    assert not_offered()["--activation-func"] == "the program sets it"
    assert not set(not_offered()) & {f"--{name.replace('_', '-')}" for name in all_flags()}
