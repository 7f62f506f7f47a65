"""Fields that are called almost as one of a row's: most likely misspelt, and so not read."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from megatron.rl.sources.row import FIELDS

LIKENESS = 0.82
"""`group_id` is that like `group_index`; `raw_reward` is less like `reward`."""
OTHER_NAMES = {
    "logprob": "rollout_log_probs",
    "logprobs": "rollout_log_probs",
    "groupid": "group_index",
    "mask": "loss_mask",
}
"""What other programs call a field, by its letters: `logprobs` is most like `ref_log_probs`."""
NOT_MEANT = frozenset({"weight_versions"})
"""Fields of other programs' rows that only look alike: slime's has a version for each turn."""
MAX_NAMES = 200
MAX_NAME_CHARS = 40


def near_misses(names: Iterable[object]) -> dict[str, str]:
    """Names that look like a field which the names lack, each with that field.

    Args:
        names: What a file calls its fields; no text, or too long a one, is passed over.
    """
    given = {name for name in names if isinstance(name, str) and len(name) <= MAX_NAME_CHARS}
    lacking = {_letters(field): field for field in FIELDS if field not in given}
    found = {}
    for name in sorted(given.difference(FIELDS, NOT_MEANT))[:MAX_NAMES]:
        meant = OTHER_NAMES.get(_letters(name))
        if meant is None and (like := get_close_matches(_letters(name), lacking, 1, LIKENESS)):
            meant = lacking[like[0]]
        if meant is not None and meant not in given:
            found[name] = meant
    return found


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
