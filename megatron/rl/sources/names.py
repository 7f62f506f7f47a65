"""Fields that are called almost as one of a row's: most likely misspelt, and so not read."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from megatron.rl.sources.row import FIELDS

LIKENESS = 0.82
"""`group_id` is that like `group_index`; `raw_reward` is less like `reward`."""
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
    for name in sorted(given.difference(FIELDS))[:MAX_NAMES]:
        if like := get_close_matches(_letters(name), lacking, 1, LIKENESS):
            found[name] = lacking[like[0]]
    return found


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
