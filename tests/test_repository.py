"""What the repository says of itself is so: its documents, its commands, its structure."""

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.rl.arguments import resolve
from megatron.rl.config import RunConfig
from megatron.rl.flags.generate import Flag, all_flags
from megatron.rl.stopping import EXIT_CODES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = sorted(
    [
        ROOT / "pretrain_rl.py",
        *(ROOT / "slime_loss").rglob("*.py"),
        *(ROOT / "megatron").rglob("*.py"),
        *(ROOT / "tools").glob("*.py"),
    ]
)
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, check=False, timeout=120, capture_output=True, text=True
    )


class TestNamespace:
    def test_megatron_is_shared(self) -> None:
        assert not (ROOT / "megatron" / "__init__.py").exists()
        core = Path(importlib.import_module("megatron.core").__file__ or "")
        ours = Path(importlib.import_module("megatron.rl").__file__ or "")
        assert ours == ROOT / "megatron" / "rl" / "__init__.py"
        assert ROOT / "megatron" not in core.parents

    def test_tests_are_no_packages(self) -> None:
        assert list((ROOT / "tests").rglob("__init__.py")) == []


class TestImportContracts:
    LINT_IMPORTS = str(Path(sys.executable).with_name("lint-imports"))

    def test_hold(self) -> None:
        done = run(self.LINT_IMPORTS, "--no-logo", "--no-cache")
        assert done.returncode == 0, done.stdout

    @pytest.mark.parametrize(
        ("module", "statement", "contract"),
        [
            ("slime_loss", "import megatron.core.utils", "The loss needs torch and nothing of a"),
            ("slime_loss", "from megatron.rl import config", "The trainer is built on the loss"),
            ("slime_loss", "import numpy", "The loss needs torch and nothing of a trainer"),
            ("megatron/rl", "import tools.plot_run", "Nothing imports a program"),
        ],
    )
    def test_a_wrong_import_breaks_them(
        self, tmp_path: Path, module: str, statement: str, contract: str
    ) -> None:
        for name in ("slime_loss", "megatron"):
            shutil.copytree(ROOT / name, tmp_path / name)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        (tmp_path / module / "planted.py").write_text(f"{statement}\n", encoding="utf-8")
        done = run(self.LINT_IMPORTS, "--no-logo", "--no-cache", cwd=tmp_path)
        assert done.returncode == 1
        broken = done.stdout.partition("Broken contracts")[2]
        assert contract in broken
        assert "planted" in broken


class TestSize:
    @pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
    def test_files_and_functions_can_be_read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < (60 if path.name == "pretrain_rl.py" else 400)
        lengths = {
            node.name: num_lines(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
        }
        assert {name: length for name, length in lengths.items() if length >= 60} == {}


def num_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


class TestMakefile:
    def test_has_every_target_that_the_documents_name(self) -> None:
        documents = (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
        named = {
            target
            for document in documents
            for target in re.findall(r"(?:^ *|`)make ([a-z-]+)", document, flags=re.MULTILINE)
        }
        assert {"quickstart", "test", "test-all", "format", "install"} <= named
        for target in named:
            done = run("make", "--dry-run", target)
            assert done.returncode == 0, done.stderr

    def test_ci_runs_the_tests(self) -> None:
        lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        assert lines[-1] == "make test"


def flag_rows() -> Iterator[tuple[list[str], list[str]]]:
    """Flags and defaults of each row of the README's flag table."""
    table = README.partition("\n## Flags\n")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"--[a-z0-9-]+", cells[0])
        if names and line.startswith("| `"):
            yield names, [default.strip() for default in cells[1].split(",") if default.strip()]


def by_spelling() -> dict[str, Flag]:
    return {name: flag for flag in all_flags().values() for name in flag.names}


def shown_default(flag: Flag) -> object:
    if flag.default is False:
        return "off"
    return getattr(flag.default, "name", flag.default)


class TestReadme:
    def test_names_flags_that_exist_and_their_defaults(self) -> None:
        flags, special = by_spelling(), {"--dry-run", "--config"}
        num_checked = 0
        for names, defaults in flag_rows():
            assert set(names) - special <= set(flags), names
            known = {str(shown_default(flags[name])) for name in names if name in flags}
            for default in defaults:
                if default.startswith("required"):
                    continue
                num_checked += 1
                if names[0] != "--loss-aggregation":  # None there, so that its alias may set it
                    assert default in known, (names, default)
        assert num_checked > 25

    def test_names_the_exit_codes(self) -> None:
        rows = re.findall(r"^\| (\d+) \| (.+) \|$", README, flags=re.MULTILINE)
        assert {int(code): meaning.replace("`", "") for code, meaning in rows} == EXIT_CODES

    def test_has_files_behind_its_links(self) -> None:
        documents = [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").glob("*.md"),
            *ROOT.glob("examples/**/*.md"),
        ]
        for document in documents:
            for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
                assert (document.parent / link).exists(), (document.name, link)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the README's paths exist."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "rollouts").mkdir()
    shutil.copy(ROOT / "examples/rollouts/smollm2_chain_sum.jsonl", tmp_path / "rollouts")
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    (tmp_path / "models/Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
    (tmp_path / "runs/quickstart/sft/checkpoints/iter_0000024").mkdir(parents=True)
    (tmp_path / "runs/first/tensorboard").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolve_command(command: str, *, has_driver: bool) -> RunConfig:
    launcher, _, flags = command.partition("pretrain_rl.py")
    sizes = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", launcher)
    world_size = 1
    for size in sizes:
        world_size *= int(size)
    return resolve(shlex.split(flags), world_size, has_driver=has_driver)


class TestCommandLines:
    def test_of_the_readme_are_accepted(self, workplace: Path) -> None:
        blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        commands = [line for line in lines if "pretrain_rl.py" in line]
        layouts = []
        for command in commands:
            config = resolve_command(command, has_driver="Qwen3" in command or "nnodes" in command)
            layouts.append(
                (
                    config.world_size,
                    config.layout.data_parallel,
                    config.layout.context_parallel,
                    config.layout.tensor_parallel,
                    config.layout.pipeline_parallel,
                )
            )
            if "runs/first" in command and "--config" not in command:
                (workplace / "runs/first/tensorboard/config.yaml").write_text(
                    config.to_yaml(), encoding="utf-8"
                )
        assert layouts == [
            (2, 1, 2, 1, 1),
            (2, 1, 2, 1, 1),
            (8, 2, 2, 2, 1),
            (32, 2, 2, 4, 2),
            (1, 1, 1, 1, 1),
        ]

    @pytest.mark.usefixtures("workplace")
    @pytest.mark.parametrize(
        "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name
    )
    def test_of_the_examples_are_accepted(self, path: Path) -> None:
        config = resolve(["--config", str(path)], 2, has_driver=False)
        assert config.notes == ()
        assert config.device_type == "cpu"


class TestBundledRollouts:
    def test_are_what_their_page_says(self) -> None:
        folder = ROOT / "examples" / "rollouts"
        lines = (folder / "smollm2_chain_sum.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        groups = defaultdict(list)
        for row in rows:
            groups[row["group_index"]].append(row["reward"])
        lengths = [len(row["tokens"]) for row in rows]
        status = Counter(row["status"] for row in rows)
        page = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
        for sentence in (
            f"holds {len(rows)} real rollouts",
            f"to {len(groups)} little sums",
            f"else 0: {sum(row['reward'] == 1 for row in rows)} of {len(rows)}",
            f"{sum(len(set(rewards)) == 2 for rewards in groups.values())} of the 15 prompts have",
            f"{sum(lengths):,}, of them {sum(row['response_length'] for row in rows):,} of",
            f"{min(lengths)} to {max(lengths)} a sample",
            f"{status['completed']} completed, {status['truncated']} truncated",
        ):
            assert sentence in page
        assert sorted(map(len, groups.values())) == [7] + 14 * [8]
        assert max(max(row["tokens"]) for row in rows) < 49152
