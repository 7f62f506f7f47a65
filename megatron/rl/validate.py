"""Check rollout files before a run: `python -m megatron.rl.validate FILE...`.

Imports neither torch nor megatron.core, unless a slime dump is to be read: it answers at once.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megatron.rl.samples import BadRowsError, RowRules
from megatron.rl.sources import ReadOptions, check_rollouts

EXIT_GOOD = 0
EXIT_BAD = 2

DESCRIPTION = """\
Check every row of rollout files (JSONL, Parquet, slime's .pt dumps; files, globs or folders) and
print what they hold, or the first error of every bad row with file and line. A row has these
fields:

  tokens             ids of prompt and response        (or prompt_ids and response_ids)
  response_length    how many of the last tokens are the response
  loss_mask          one 0 or 1 per response token; absent = all 1
  rollout_log_probs  the engine's log-prob of each response token
  ref_log_probs      the reference model's
  values             a critic's value before each response token
  rollout_top_p_token_ids, rollout_top_p_token_offsets
                     the ids top-p kept, end to end, and response_length + 1 offsets into them
  reward             a number, or a dict and --reward-key
  group_index        samples of one prompt share it
  rollout_index      samples of one rollout share it; absent = each its own
  index              unique in its file; absent in all rows = the row's position
  status             completed, truncated, aborted (slime also: failed, pending)
  weight_version     optimizer steps that the engine's weights had taken
  remove_sample      true trains no token of it
  prompt, response, label, and any other field: free
"""

EXAMPLE = """\
example:
  python -m megatron.rl.validate examples/rollouts/ --vocab-size 49152

exit code: 0 when every row is good, 2 when one is not (or an argument is wrong)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files of the command line and print the answer.

    Args:
        argv: Arguments; by default the process's own.

    Returns:
        The exit code: 0 good, 2 bad.
    """
    args = _parser().parse_args(argv)
    policy = args.loss_type == "policy_loss"
    rules = RowRules(
        vocab_size=args.vocab_size,
        reward_key=args.reward_key,
        need_reward=policy,
        need_group=policy,
        need_rollout_log_probs=args.use_rollout_logprobs,
        max_length=args.max_length,
        truncate=args.truncate_samples,
    )
    options = ReadOptions(trust_pickle=args.trust_pickle, keep_errors=args.max_errors)
    try:
        files = check_rollouts(args.files, rules, options)
    except BadRowsError as bad:
        _write(_bad_as_json(bad) if args.json else _bad_as_text(bad))
        return EXIT_BAD
    summary = files.summary
    text = json.dumps({"ok": True, "summary": dataclasses.asdict(summary)}, indent=2)
    _write(f"{text if args.json else summary}\n")
    return EXIT_GOOD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.rl.validate",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="file, glob or folder")
    parser.add_argument("--vocab-size", type=_positive, metavar="N", help="ids must be below N")
    parser.add_argument("--max-length", type=_positive, metavar="N", help="most tokens of a sample")
    parser.add_argument(
        "--truncate-samples",
        action="store_true",
        help="cut longer samples at the end of their response, as the run will",
    )
    parser.add_argument("--reward-key", metavar="K", help="the key to read of a reward dict")
    parser.add_argument(
        "--loss-type",
        choices=("policy_loss", "sft_loss"),
        default="policy_loss",
        help="what the rows are for: policy_loss needs reward and group_index (default)",
    )
    parser.add_argument(
        "--use-rollout-logprobs", action="store_true", help="every row needs rollout_log_probs"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="let .pt files run code while they are read; only for files you trust",
    )
    parser.add_argument(
        "--max-errors", type=_positive, default=100_000, metavar="N", help="show at most N errors"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive: {value}")
    return value


def _write(text: str) -> None:
    """Print, even the name of a file that is no text."""
    sys.stdout.write(text.encode(errors="backslashreplace").decode())


def _bad_as_text(bad: BadRowsError) -> str:
    hidden = bad.num_errors - len(bad.errors)
    lines = [str(error) for error in bad.errors]
    if hidden:
        lines.append(f"... and {hidden:,} more")
    return "\n".join([*lines, f"{bad.num_errors:,} error(s)", ""])


def _bad_as_json(bad: BadRowsError) -> str:
    errors = [dataclasses.asdict(error) for error in bad.errors]
    answer = {"ok": False, "num_errors": bad.num_errors, "errors": errors}
    return json.dumps(answer, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())
