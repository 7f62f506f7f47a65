"""What a run says of the servers that make its rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit


@dataclass(frozen=True)
class HttpEngineConfig:
    """Servers, how patiently they are asked, and how they get new weights.

    Raises:
        ValueError: A value that cannot be.
    """

    urls: tuple[str, ...]
    """Where the servers listen, http://host:port, without a path. All serve the same model."""
    type: Literal["sglang", "openai"] = "sglang"
    """sglang: its own /generate; openai: /v1/completions, as vLLM serves it."""
    model: str | None = None
    """The model's name in a request of type openai; None: the server's only one."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; None: none."""
    concurrency: int = 64
    """Most requests that a server has at a time; the others wait here."""
    connect_timeout_s: float = 10.0
    """A server that does not take a connection within this time, in seconds, is gone."""
    request_timeout_s: float = 1800.0
    """Longest wait for one answer, in seconds; then it is asked for again."""
    update_timeout_s: float = 1800.0
    """Longest wait until a server has loaded new weights, in seconds."""
    retries: int = 5
    """How often a request is made again that failed by itself, or got half an answer."""
    backoff_s: float = 1.0
    """Wait before the first repetition, in seconds; it doubles, and chance takes up to half."""
    max_backoff_s: float = 30.0
    """Longest wait before a repetition, in seconds."""
    gone_limit_s: float = 900.0
    """The run ends when all servers were gone, or one request failed, for this long, in seconds."""
    progress_interval_s: float = 30.0
    """How often long work says how far it is, in seconds."""
    kept_ids: Literal["top_p_token_ids", "sampling_mask", "none"] = "top_p_token_ids"
    """How sglang names the ids that top-p and top-k kept. top_p_token_ids: as slime's build of
    SGLang does; sampling_mask: by `return_sampling_mask`; none: it does not, and log-probs are
    those among all tokens, which the trainer must then use as well."""
    seeded: bool = True
    """Send each request's seed. A server that draws in batches may still not repeat a draw."""
    weights_dir: str | None = None
    """Directory for new weights, which the servers can read; None: they keep theirs."""
    weights_dir_on_servers: str | None = None
    """The same directory as the servers see it; None: under the same name."""
    update_weights_path: str | None = None
    """Path of the POST that makes a server load new weights; None: /update_weights_from_disk of
    sglang, none of openai."""

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything."""
        for name, rule, holds in self._rules():
            if not holds:
                raise ValueError(f"{name} {rule}: {name}={getattr(self, name)!r}")

    @property
    def update_path(self) -> str | None:
        """Path of the POST that makes a server load new weights; None: there is none."""
        if self.update_weights_path is None and self.type == "sglang":
            return "/update_weights_from_disk"
        return self.update_weights_path

    def seen_by_servers(self, directory: Path) -> str:
        """The name by which servers open a directory below `weights_dir`."""
        if self.weights_dir_on_servers is None:
            return str(directory.absolute())
        return f"{self.weights_dir_on_servers.rstrip('/')}/{directory.name}"

    def _rules(self) -> list[tuple[str, str, bool]]:
        positive = [
            "connect_timeout_s",
            "request_timeout_s",
            "update_timeout_s",
            "backoff_s",
            "gone_limit_s",
            "progress_interval_s",
        ]
        rule = "must be positive and finite, in seconds"
        timed = [(name, rule, 0 < getattr(self, name) < math.inf) for name in positive]
        path = self.update_weights_path
        return [
            ("urls", "must be one http://host:port or several", len(self.urls) > 0),
            (
                "urls",
                "must each be http://host:port or https://host:port, without a path",
                all(map(_is_address, self.urls)),
            ),
            ("urls", "must differ from each other", len(set(self.urls)) == len(self.urls)),
            ("type", "must be one of sglang, openai", self.type in ("sglang", "openai")),
            ("concurrency", "must be at least 1", self.concurrency >= 1),
            ("retries", "must be at least 0", self.retries >= 0),
            *timed,
            ("max_backoff_s", "must be at least backoff_s", self.max_backoff_s >= self.backoff_s),
            (
                "kept_ids",
                "must be one of top_p_token_ids, sampling_mask, none",
                self.kept_ids in ("top_p_token_ids", "sampling_mask", "none"),
            ),
            ("update_weights_path", "must begin with /", path is None or path.startswith("/")),
            (
                "weights_dir_on_servers",
                "needs weights_dir",
                self.weights_dir is not None or self.weights_dir_on_servers is None,
            ),
        ]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    is_bare = parts.path == "" and not (parts.query or parts.fragment or parts.username)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_bare
