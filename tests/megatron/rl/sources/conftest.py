import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    """A good row of three prompt and two response ids, with changes; None leaves a field out."""

    def make(index: int = 0, group_index: int = 0, **changes: Any) -> dict[str, Any]:
        row = {
            "index": index,
            "group_index": group_index,
            "tokens": [1, 5, 7, 11, 13],
            "response_length": 2,
            "loss_mask": [1, 0],
            "rollout_log_probs": [-0.5, -1.25],
            "reward": 1.0,
            "status": "completed",
        }
        return {name: value for name, value in (row | changes).items() if value is not None}

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write lines (dicts as JSON, bytes as they are) into a file and return its path."""

    def write_lines(lines: Sequence[dict[str, Any] | bytes], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        encoded = (x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return str(path)

    return write_lines
