"""What tests of prompts share."""

from collections.abc import Sequence

import numpy as np

from megatron.rl.chat import Messages
from megatron.rl.text import IdsOnly, TokenizerConfig


class Letters(IdsOnly):
    """One id a character, 128 in all; dialogues are `<role>content`."""

    def __init__(self) -> None:
        super().__init__(TokenizerConfig("NullTokenizer", vocab_size=128))

    def encode(self, text: str) -> np.ndarray:
        if not text.isascii():
            raise ValueError(f"text must be ASCII: text={text!r}")
        return super().encode(" ".join(str(ord(c)) for c in text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(int(i)) for i in ids)

    def apply_chat_template(self, messages: Messages) -> np.ndarray:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))
