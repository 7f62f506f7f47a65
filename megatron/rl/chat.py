"""Chat templates of tokenizers that bring no engine for them: a dialogue as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, str]]
"""A dialogue: each message has `role` and `content`."""


class ChatTemplate:
    """A Jinja template that runs in a sandbox, with the whitespace rules that models assume.

    Args:
        source: The template; it is given `messages`, `add_generation_prompt` and the constants,
            and may call `raise_exception`. None: there is none, and dialogues are refused.
        constants: For example `bos_token`.

    Raises:
        ValueError: It is no Jinja.
    """

    def __init__(self, source: str | None, constants: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals |= {**constants, "raise_exception": _refuse}
        try:
            self._template = None if source is None else environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"chat_template must be a Jinja template: {error}") from error

    def render(self, messages: Messages) -> str:
        """The dialogue as text, up to where the assistant's answer begins.

        Raises:
            ValueError: There is no template, or it refuses the messages.
        """
        if self._template is None:
            raise without_template()
        given: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        try:
            return self._template.render(**given, add_generation_prompt=True)
        except Exception as error:  # a template runs code of its author
            raise refused_messages(error) from error


def split_at(text: str, tokens: Iterable[str]) -> list[str]:
    """Cut a text before and behind every occurrence of a token; the longest token wins."""
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = "|".join(re.escape(token) for token in longest_first)
    return [part for part in re.split(f"({pattern})", text) if part] if pattern else [text]


def without_template() -> ValueError:
    """The error of a tokenizer that has no template."""
    return ValueError("messages need a tokenizer with a chat template: chat_template=None")


def refused_messages(error: Exception) -> ValueError:
    """The error of a template that failed."""
    return ValueError(f"messages must suit the chat template ({type(error).__name__}: {error})")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
