"""Text to ids and back, by megatron-core's tokenizers; used at the edges of a run alone.

Ids are the truth: a prompt is encoded once, a response is what the engine drew, and text that was
decoded is shown or scored, never encoded again. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from megatron.rl.chat import (
    ChatTemplate,
    Messages,
    refused_messages,
    split_at,
    without_template,
)
from megatron.rl.extras import import_extra
from megatron.rl.pieces import byte_level_bytes, lacking_bytes, piece_bytes
from megatron.rl.sources.values import shown
from slime_loss.checked_config import CheckedConfig, ConfigError, Rule, Violation

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
]
TIKTOKEN_VOCAB_SIZE = 1 << 17
_MARK = "\u262f"
"""No model has a piece with it, so that it never becomes part of one."""


@dataclass(frozen=True)
class TokenizerConfig(CheckedConfig):
    """Which tokenizer, in Megatron's terms.

    Raises:
        ConfigError: A field has a value that cannot be, or the file is not there.
    """

    tokenizer_type: TokenizerType
    tokenizer_model: str | None = None
    """HuggingFaceTokenizer: a local directory; the others: a file. NullTokenizer has none."""
    vocab_size: int | None = None
    """Ids of TikTokenizer (None: 131072) and NullTokenizer; the others' own size is theirs."""
    chat_template: str | None = None
    """A Jinja file, in place of the tokenizer's own template."""
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    tiktoken_num_special_tokens: int = 1000

    def rules(self) -> Iterator[Rule]:
        """Files are where they are said to be; numbers are given to whom they mean something."""
        is_null = self.tokenizer_type == "NullTokenizer"
        is_tiktoken = self.tokenizer_type == "TikTokenizer"
        yield from self._model_rules()
        size = self.vocab_size
        fix = "give the size of the vocabulary"
        yield not is_null or size is not None, "vocab_size", "must be given for NullTokenizer", fix
        yield size is None or size > 0, "vocab_size", "must be positive", fix
        needs = "needs TikTokenizer or NullTokenizer"
        yield from self.needs(["vocab_size"], is_null or is_tiktoken, needs)
        names = ("tiktoken_pattern", "tiktoken_num_special_tokens")
        yield from self.needs(names, is_tiktoken, "needs TikTokenizer")
        template = self.chat_template
        holds = template is None or Path(template).is_file()
        yield holds, "chat_template", "must be a file", "write the Jinja template into a file"
        yield from self.needs(["chat_template"], not is_null, "needs a tokenizer that has text")

    def _model_rules(self) -> Iterator[Rule]:
        field, model = "tokenizer_model", self.tokenizer_model
        if self.tokenizer_type == "NullTokenizer":
            yield from self.needs([field], False, "needs a tokenizer that has text")
            return
        rule = f"must be given for {self.tokenizer_type}"
        yield model is not None, field, rule, "give the local path of the tokenizer"
        if self.tokenizer_type == "HuggingFaceTokenizer":
            rule = "must be a local directory (nothing is downloaded)"
            fix = "download the model's tokenizer files first, then give their directory"
            yield Path(model or "").is_dir(), field, rule, fix
        else:
            yield Path(model or "").is_file(), field, "must be a file", "check the path"


class TextTokenizer(Protocol):
    """What the rest of the package knows of a tokenizer."""

    vocab_size: int
    """Ids are below it; a model's vocabulary may be padded beyond it."""
    eos_ids: tuple[int, ...]
    """Ids that end a response; none where the tokenizer names none."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int64 [n]; no token is put before or behind it."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without special tokens and without ids that the tokenizer lacks."""
        ...

    def token_bytes(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """What each token stands for, as UTF-8 that may begin or end inside of a character.

        Special tokens are spelt out, and ids that the tokenizer lacks are shown as `<id 7>`.
        """
        ...

    def apply_chat_template(self, messages: Messages) -> np.ndarray:
        """The ids of a dialogue, up to where the assistant's answer begins, int64 [n].

        Raises:
            ValueError: There is no template, or it refuses the messages.
        """
        ...


def build_tokenizer(config: TokenizerConfig) -> TextTokenizer:
    """Read a tokenizer from its local files.

    Args:
        config: Which one.

    Raises:
        ConfigError: Its files cannot be read.
        ModuleNotFoundError: Its library is not installed; the message names the extra.
    """
    kinds = {
        "HuggingFaceTokenizer": HuggingFaceText,
        "TikTokenizer": TikTokenText,
        "NullTokenizer": IdsOnly,
    }
    try:
        return kinds.get(config.tokenizer_type, SentencePieceText)(config)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # libraries raise what they like at a file that is not theirs
        why = f"{type(error).__name__}: {error}"
        rule = f"must be files of a {config.tokenizer_type} ({why})"
        fix = "check --tokenizer-type, and that the files are whole"
        broken = Violation("tokenizer_model", rule, config.tokenizer_model, fix)
        raise ConfigError([broken]) from error


class HuggingFaceText:
    """A directory with `tokenizer.json`, by core's HuggingFaceTokenizer.

    Decoding is transformers' own: core's fails at an id that the tokenizer lacks, and collects the
    special tokens anew for every token.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        import_extra("transformers", "text", "HuggingFaceTokenizer")
        from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer

        folder = Path(str(config.tokenizer_model))
        self._core = HuggingFaceTokenizer(
            str(folder), use_fast=True, trust_remote_code=False, include_special_tokens=False
        )
        self._library = self._core.tokenizer
        self._library.chat_template = _own_template(config) or self._library.chat_template
        self.vocab_size = self._core.vocab_size
        self.eos_ids = _eos_ids(folder, self._library.eos_token_id)
        self._added = {i: str(token) for i, token in self._library.added_tokens_decoder.items()}
        decoder = json.loads(self._library.backend_tokenizer.to_str())["decoder"]
        self._byte_level = '"ByteLevel"' in json.dumps(decoder)

    def encode(self, text: str) -> np.ndarray:
        """As `TextTokenizer.encode`; special tokens that are spelt out in the text are read."""
        return np.array(self._core.text_to_ids(text), np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """As `TextTokenizer.decode`."""
        return self._library.decode(
            _known(ids, self.vocab_size),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def token_bytes(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """As `TextTokenizer.token_bytes`."""
        return [self._bytes_of(int(token)) for token in ids]

    def apply_chat_template(self, messages: Messages) -> np.ndarray:
        """As `TextTokenizer.apply_chat_template`."""
        if self._library.chat_template is None:
            raise without_template()
        try:
            ids = self._core.apply_chat_template(
                [dict(message) for message in messages],
                None,  # its own
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:  # a template runs code of its author
            raise refused_messages(error) from error
        return np.array(ids, np.int64)

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if not 0 <= token < self.vocab_size:
            return lacking_bytes(token)
        piece = self._library.convert_ids_to_tokens(token)
        if piece is None:  # a gap in the vocabulary
            return lacking_bytes(token)
        if self._byte_level:
            return byte_level_bytes(piece)
        return piece_bytes(piece)


class SentencePieceText:
    """A SentencePiece model, by core's SentencePieceTokenizer.

    Dialogues are encoded here: core's templates get neither `bos_token` nor `eos_token`, and it
    reads the control tokens that a template writes as plain text.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        import_extra("sentencepiece", "text", config.tokenizer_type)
        from megatron.core.tokenizers.text.libraries import SentencePieceTokenizer

        self._core = SentencePieceTokenizer(str(config.tokenizer_model), legacy=False)
        self._library = self._core.tokenizer
        self.vocab_size = self._core.vocab_size
        self.eos_ids = (self._core.eos_id,) if self._core.eos_id >= 0 else ()
        pieces = ((i, self._library.id_to_piece(i)) for i in range(self.vocab_size))
        self._control = {piece: i for i, piece in pieces if self._library.is_control(i)}
        names = {"bos_token": self._core.bos_id, "eos_token": self._core.eos_id}
        known = {k: self._library.id_to_piece(i) for k, i in names.items() if i >= 0}
        self._template = ChatTemplate(_own_template(config), known)
        self._mark_length = len(self._library.encode(_MARK))

    def encode(self, text: str) -> np.ndarray:
        """As `TextTokenizer.encode`; control tokens that the text spells out stay text."""
        return np.array(self._core.text_to_ids(text), np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """As `TextTokenizer.decode`."""
        return self._core.ids_to_text(_known(ids, self.vocab_size))

    def token_bytes(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """As `TextTokenizer.token_bytes`; the space that the model puts before a text stays."""
        return [self._bytes_of(int(token)) for token in ids]

    def apply_chat_template(self, messages: Messages) -> np.ndarray:
        """As `TextTokenizer.apply_chat_template`; control tokens become their ids."""
        text = self._template.render(messages)
        ids: list[int] = []
        for part in split_at(text, self._control):
            if part in self._control:
                ids.append(self._control[part])
            elif ids:  # no start of a text, which the model would put a space before
                ids += self._library.encode(_MARK + part)[self._mark_length :]
            else:
                ids += self._library.encode(part)
        return np.array(ids, np.int64)

    def _bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            return lacking_bytes(token)
        piece = self._library.id_to_piece(token)
        return piece.encode() if self._library.is_control(token) else piece_bytes(piece)


class TikTokenText:
    """A vocabulary in NVIDIA's JSON form, by core's TikTokenTokenizer.

    Decoding is tiktoken's own: core 0.16 decodes token by token, which breaks every character of
    several tokens. OpenAI's `.tiktoken` files are not read by core.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        import_extra("tiktoken", "text", "TikTokenizer")
        from megatron.core.tokenizers.text.libraries import TikTokenTokenizer

        self._num_special = config.tiktoken_num_special_tokens
        self._core = TikTokenTokenizer(
            str(config.tokenizer_model),
            num_special_tokens=self._num_special,
            pattern=config.tiktoken_pattern,
            vocab_size=config.vocab_size or TIKTOKEN_VOCAB_SIZE,
        )
        self._library = self._core.tokenizer
        self.vocab_size = self._core.vocab_size
        self.eos_ids = (self._core.eos_id,)
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        self._template = ChatTemplate(_own_template(config), names)

    def encode(self, text: str) -> np.ndarray:
        """As `TextTokenizer.encode`; special tokens that are spelt out in the text are read."""
        return np.array(self._core.text_to_ids(text), np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """As `TextTokenizer.decode`."""
        known = [i for i in _known(ids, self.vocab_size) if i >= self._num_special]
        return self._library.decode(known)

    def token_bytes(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """As `TextTokenizer.token_bytes`."""
        known = range(self.vocab_size)
        decoded = self._library.decode_single_token_bytes
        return [decoded(int(i)) if int(i) in known else lacking_bytes(int(i)) for i in ids]

    def apply_chat_template(self, messages: Messages) -> np.ndarray:
        """As `TextTokenizer.apply_chat_template`."""
        return self.encode(self._template.render(messages))


class IdsOnly:
    """No text: ids are written as numbers. The last id ends a response.

    Core's NullTokenizer has one id more than it is given in 0.16, and as many in 0.19.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self.vocab_size = int(config.vocab_size or 0)
        self.eos_ids = (self.vocab_size - 1,)

    def encode(self, text: str) -> np.ndarray:
        """The ids that the text lists, int64 [n].

        Raises:
            ValueError: Something in it is no id.
        """
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                rule = f"must list ids below {self.vocab_size} (NullTokenizer has no text)"
                raise ValueError(f"text {rule}: text={word!r}")
        return np.array([int(word) for word in text.split()], np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The ids, with spaces between them."""
        return " ".join(str(int(token)) for token in ids)

    def token_bytes(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """Each id; all but the first begin with a space."""
        return [f"{' ' if i else ''}{int(token)}".encode() for i, token in enumerate(ids)]

    def apply_chat_template(self, messages: Messages) -> np.ndarray:
        """Refused: there is no text.

        Raises:
            ValueError: Always.
        """
        rule = "must not be given to NullTokenizer, which has no text"
        raise ValueError(f"messages {rule}: messages={shown(messages)}")


def _known(ids: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    return [int(token) for token in ids if 0 <= token < vocab_size]


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's end token, and those that the model's generation_config.json adds."""
    ids = [] if own is None else [own]
    path = folder / "generation_config.json"
    if path.is_file():
        given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") or []
        ids += given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(ids))


def _own_template(config: TokenizerConfig) -> str | None:
    path = config.chat_template
    return None if path is None else Path(path).read_text(encoding="utf-8")
