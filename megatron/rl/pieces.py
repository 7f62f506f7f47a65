"""What a token stands for, as bytes: a token may begin or end inside of a character."""

import codecs
import re
from collections.abc import Sequence


def piece_texts(pieces: Sequence[bytes]) -> list[str]:
    """One text for each token: a character is shown at the token that completes it.

    Args:
        pieces: What `token_bytes` gave.

    Returns:
        As many texts; end to end they are the text of all bytes. Bytes that are no UTF-8 become
        U+FFFD, at the latest at the last token.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(piece) for piece in pieces]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def piece_bytes(piece: str) -> bytes:
    """A piece of SentencePiece's kind: a byte as `<0xE2>`, or text with U+2581 for a space."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()


def byte_level_bytes(piece: str) -> bytes:
    """A piece of byte-level BPE, which writes each byte as one printable character."""
    codes = [_BYTE_OF.get(character) for character in piece]
    return piece.encode() if None in codes else bytes(code for code in codes if code is not None)


def lacking_bytes(token: int) -> bytes:
    """How an id that a tokenizer lacks is shown."""
    return f"<id {token}>".encode()


def _byte_of_character() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for characters from U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + position): byte for position, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_of_character()
