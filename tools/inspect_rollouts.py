"""Look at rollout rows token by token in a terminal: what the engine, the trainer and the loss say.

Reads the files that training reads, checks every row as training does, and prints a summary, then
the rows that were asked for: token, log-probs, |train - rollout|, ratio, mask, clip, advantage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    sys.exit("inspect_rollouts.py needs rich: pip install -e '.[inspect]'")

from megatron.rl.pieces import piece_texts
from megatron.rl.samples import BadRowsError, RowRules, printable
from megatron.rl.sources import ReadOptions, RolloutFiles, check_rollouts
from megatron.rl.sources.row import STATUSES
from megatron.rl.text import TextTokenizer, TokenizerConfig, TokenizerType, build_tokenizer
from slime_loss import AdvantageConfig, PolicyLossConfig
from slime_loss.config import Estimator
from tools.hf_log_probs import HuggingFaceLogProbs
from tools.rollout_rows import (
    OF_INDEX,
    OF_TOKENS,
    SORTS,
    Condition,
    InspectError,
    ResponseTokens,
    RowReader,
    TrainLogProbs,
    choose_rows,
)

EXAMPLE = f"""\
example:
  python tools/inspect_rollouts.py examples/rollouts --where 'reward<1' --limit 2 --max-tokens 20
  python tools/inspect_rollouts.py 'rollouts/*.jsonl' --hf-checkpoint models/Qwen3-8B \\
      --model-log-probs --eps-clip 0.2 --sort difference --color always | less -R

--where compares one of
  {", ".join(OF_INDEX)},
  {", ".join(OF_TOKENS)}, status
where difference is the largest |train - rollout| of a row's trained tokens, and clipped the share
of them whose gradient a clip takes away. Groups are numbered over all files as they appear. The
trainer's log-probs are those of --model-log-probs, or a field log_probs or old_log_probs of JSONL
and Parquet rows; ratio and clip take the engine's as the old ones, as --use-rollout-logprobs does.
"""
PIPE_WIDTH = 160
"""Columns of a line where no terminal says how many there are."""
TOKEN_WIDTH = 24
LOG_PROB_BOUNDS = (0.1, 1.0, 3.0, 7.0)
"""-log-prob in nats: from a token that was certain to one that was hardly possible."""
DIFFERENCE_BOUNDS = (0.01, 0.05, 0.2, 1.0)
"""|train - rollout| in nats: the second is what bf16 gives, the last is another model."""
STYLES = ("green", "default", "yellow", "red", "bold white on red")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="JSONL, Parquet or .pt; file, glob or folder")
    rows = parser.add_argument_group("which rows")
    rows.add_argument("--index", type=int, metavar="N", help="rows of this index")
    rows.add_argument("--group", type=int, metavar="N", help="rows of this group")
    rows.add_argument("--status", choices=STATUSES, help="rows of this status")
    rows.add_argument(
        "--where", action="append", default=[], metavar="TEST", help="see below; may be repeated"
    )
    rows.add_argument("--sort", choices=SORTS, default="file", help="default: as in the files")
    rows.add_argument("--limit", type=int, default=5, metavar="N", help="rows; default %(default)s")
    rows.add_argument("--reward-key", metavar="K", help="the key to read of a reward dict")
    rows.add_argument(
        "--bad-rows", choices=("error", "skip"), default="error", help="default: %(default)s"
    )
    rows.add_argument("--trust-pickle", action="store_true", help="for .pt files that you trust")
    text = parser.add_argument_group("text and log-probs")
    text.add_argument("--hf-checkpoint", metavar="DIR", help="tokenizer and model")
    text.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer directory or file")
    text.add_argument(
        "--tokenizer-type", choices=get_args(TokenizerType), default="HuggingFaceTokenizer"
    )
    text.add_argument(
        "--model-log-probs",
        action="store_true",
        help="compute the trainer's log-probs with the model of --hf-checkpoint, by transformers "
        "in float32 on the CPU",
    )
    text.add_argument("--rollout-temperature", type=float, default=1.0, metavar="X")
    text.add_argument("--log-probs-field", metavar="NAME", help="of the trainer, in the rows")
    loss = parser.add_argument_group("loss")
    loss.add_argument("--advantage-estimator", choices=get_args(Estimator), default="grpo")
    loss.add_argument("--eps-clip", type=float, metavar="X", help="show which tokens are clipped")
    loss.add_argument("--eps-clip-high", type=float, metavar="X", help="default: --eps-clip")
    loss.add_argument("--eps-clip-c", type=float, metavar="X", help="dual clip")
    shown = parser.add_argument_group("how it is shown")
    shown.add_argument(
        "--view", choices=("table", "text"), default="table", help="one line a token, or the text"
    )
    shown.add_argument("--max-tokens", type=int, metavar="N", help="first tokens of a response")
    shown.add_argument("--prompt", action="store_true", help="show prompts too")
    shown.add_argument(
        "--color-by", choices=("log-prob", "difference", "mask"), help="default: what is known"
    )
    shown.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set",
    )
    return _checked(parser, parser.parse_args(argv))


def _checked(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.Namespace:
    for name in ("limit", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} must be positive: {flag}={value}; fix: leave it out")
    if arguments.model_log_probs and not arguments.hf_checkpoint:
        parser.error("--model-log-probs needs a model; fix: give --hf-checkpoint DIR")
    if arguments.eps_clip is None and (arguments.eps_clip_high or arguments.eps_clip_c):
        parser.error("--eps-clip-high and --eps-clip-c need --eps-clip; fix: give --eps-clip 0.2")
    return arguments


def make_console(color: str) -> Console:
    """Standard output: rich leaves colours out where it is no terminal or NO_COLOR is set."""
    is_terminal = sys.stdout.isatty()
    forced = {"always": True, "never": False, "auto": None}[color]
    return Console(
        highlight=False,
        force_terminal=forced,
        no_color=True if color == "never" else None,
        width=None if is_terminal else PIPE_WIDTH,
    )


def find_tokenizer(arguments: argparse.Namespace) -> TextTokenizer | None:
    """The tokenizer that the command line names, or that its model has."""
    model, folder = arguments.tokenizer_model, arguments.hf_checkpoint
    if model is None and folder is not None and any(Path(folder).glob("tokenizer*")):
        model = folder
    if model is None:
        return None
    return build_tokenizer(TokenizerConfig(arguments.tokenizer_type, model))


def read_files(arguments: argparse.Namespace) -> RolloutFiles:
    """Check every row, as a run does before it trains."""
    options = ReadOptions(bad_rows=arguments.bad_rows, trust_pickle=arguments.trust_pickle)
    return check_rollouts(arguments.files, RowRules(reward_key=arguments.reward_key), options)


def make_reader(arguments: argparse.Namespace, files: RolloutFiles) -> RowReader:
    """What the command line asks to know of the rows' tokens."""
    clip, train = None, None
    if arguments.eps_clip is not None:
        clip = PolicyLossConfig(
            eps_clip=arguments.eps_clip,
            eps_clip_high=arguments.eps_clip_high,
            eps_clip_c=arguments.eps_clip_c,
        )
    if arguments.model_log_probs:
        train = _model_log_probs(arguments)
    estimator = AdvantageConfig(advantage_estimator=arguments.advantage_estimator)
    return RowReader(files, estimator, clip, train, arguments.log_probs_field)


def _model_log_probs(arguments: argparse.Namespace) -> TrainLogProbs:
    try:
        return HuggingFaceLogProbs(Path(arguments.hf_checkpoint), arguments.rollout_temperature)
    except (OSError, ValueError) as error:
        raise InspectError(
            f"--hf-checkpoint must hold a model that transformers reads: {error}; "
            "fix: give a directory with config.json and safetensors"
        ) from error


def conditions_of(arguments: argparse.Namespace) -> list[Condition]:
    """Every condition of the command line."""
    found = [Condition.parse(text) for text in arguments.where]
    for name in ("index", "group", "status"):
        value = getattr(arguments, name)
        if value is not None:
            found.append(Condition(name, "=", value))
    return found


class Painter:
    """Writes rows to a console.

    Args:
        console: where to.
        tokenizer: None shows ids.
        arguments: view, color_by, max_tokens and prompt.
    """

    def __init__(
        self, console: Console, tokenizer: TextTokenizer | None, arguments: argparse.Namespace
    ) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._arguments = arguments

    def show(self, tokens: ResponseTokens) -> None:
        """One row: where it is, what it is, and its tokens."""
        sample, arguments = tokens.sample, self._arguments
        self._console.print(Text(f"\n{printable(sample.origin)}", "bold"))
        self._console.print(Text(row_facts(tokens)))
        if arguments.prompt:
            prompt = self._texts(sample.tokens[: sample.prompt_length].tolist())
            self._console.print(Text("prompt    ", "bold") + Text("".join(prompt), "dim"))
        num = min(arguments.max_tokens or len(tokens.ids), len(tokens.ids))
        if arguments.view == "table":
            self._console.print(self._table(tokens, num))
        else:
            self._console.print(self._text(tokens, num))
        if num < len(tokens.ids):
            self._console.print(f"... {len(tokens.ids) - num:,} more tokens (--max-tokens {num})")

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; end to end they are the text, line ends kept."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        texts = piece_texts(self._tokenizer.token_bytes(ids))
        return ["\n".join(map(printable, text.split("\n"))) for text in texts]

    def _names(self, ids: Sequence[int]) -> list[str]:
        """Each token on one line, bytes of a part of a character as escapes."""
        if self._tokenizer is None:
            return [str(token) for token in ids]
        pieces = self._tokenizer.token_bytes(ids)
        return [printable(piece.decode("utf-8", "backslashreplace")) for piece in pieces]

    def _text(self, tokens: ResponseTokens, num: int) -> Text:
        texts = self._texts(tokens.ids[:num].tolist())
        styles = token_styles(tokens, self._arguments.color_by)
        return Text.assemble(*zip(texts, styles[:num], strict=True))

    def _table(self, tokens: ResponseTokens, num: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        columns = dict(token_columns(tokens))
        if self._tokenizer is not None:
            columns = {"id": lambda at: str(tokens.ids[at]), **columns}
        table.add_column("token", no_wrap=True, max_width=TOKEN_WIDTH)
        for name in ("at", *columns):
            table.add_column(name, justify="right", no_wrap=True)
        styles = token_styles(tokens, self._arguments.color_by)
        for at, name in enumerate(self._names(tokens.ids[:num].tolist())):
            numbers = [form(at) for form in columns.values()]
            table.add_row(Text(name, styles[at]), str(at), *numbers)
        return table


def row_facts(tokens: ResponseTokens) -> str:
    """One line about a row."""
    sample = tokens.sample
    facts = [
        f"index {sample.index}",
        f"group {sample.group_index}",
        f"reward {sample.reward:g}",
        sample.status,
        f"{sample.prompt_length:,} + {sample.response_length:,} tokens"
        f" ({sample.num_trained_tokens:,} trained)",
    ]
    largest, mean = tokens.number("difference"), tokens.number("mean_difference")
    if not math.isnan(largest):
        facts.append(f"|train - rollout| mean {mean:.3g} max {largest:.3g}")
    if tokens.clips is not None:
        facts.append(f"clipped {tokens.number('clipped'):.1%}")
    return ", ".join(facts)


def token_columns(tokens: ResponseTokens) -> Iterator[tuple[str, Callable[[int], str]]]:
    """Name and content of each column that something is known for."""
    sample = tokens.sample
    ratio = None if tokens.log_ratio is None else tokens.log_ratio.exp()
    for name, stream in (
        ("rollout", tokens.rollout),
        ("train", tokens.train),
        ("|diff|", tokens.difference),
        ("ratio", ratio),
        ("ref", sample.ref_log_probs),
        ("value", sample.values),
    ):
        if stream is not None:
            yield name, lambda at, stream=stream: f"{float(stream[at]):.4f}"
    yield "mask", lambda at: "1" if sample.loss_mask[at] else "0"
    if (clips := tokens.clips) is not None:
        yield "clip", lambda at: clips[at] or "-"
    yield "advantage", lambda at: f"{float(tokens.advantages[at]):+.4f}"


def token_styles(tokens: ResponseTokens, color_by: str | None) -> list[str]:
    """[R] rich's name of each token's colour; a masked token is dim."""
    known = tokens.train if tokens.rollout is None else tokens.rollout
    if color_by is None:
        color_by = "log-prob" if tokens.difference is None else "difference"
    styles = ["default"] * len(tokens.ids)
    if color_by == "difference" and tokens.difference is not None:
        styles = _by_bounds(tokens.difference, DIFFERENCE_BOUNDS)
    elif color_by == "log-prob" and known is not None:
        styles = _by_bounds(-known, LOG_PROB_BOUNDS)
    elif color_by == "mask":
        styles = ["green"] * len(tokens.ids)
    return [
        style if trained else "dim"
        for style, trained in zip(styles, tokens.sample.loss_mask, strict=True)
    ]


def _by_bounds(values: torch.Tensor, bounds: Sequence[float]) -> list[str]:
    return [STYLES[i] for i in torch.bucketize(values, torch.tensor(bounds)).tolist()]


def main(argv: Sequence[str] | None = None) -> int:
    """Show; returns the exit code, 2 where a row is bad or what was asked for is not there."""
    arguments = parse_arguments(argv)
    try:
        conditions, tokenizer = conditions_of(arguments), find_tokenizer(arguments)
        reader = make_reader(arguments, read_files(arguments))
        positions, num_found = choose_rows(reader, conditions, arguments.sort, arguments.limit)
        console = make_console(arguments.color)
        console.print(Text(str(reader.files.summary)))
        painter = Painter(console, tokenizer, arguments)
        for position in positions:
            painter.show(reader.tokens(position))
        shown = f"\n{len(positions):,} of {num_found:,} rows shown"
        console.print(shown + (" (--limit)" if num_found > len(positions) else ""))
    except (ValueError, BadRowsError, ModuleNotFoundError) as error:
        print(f"inspect_rollouts.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
