"""How byte-level BPE writes bytes: each as one printable character, in vocabularies and in merges.

Source: GPT-2's encoder.py, bytes_to_unicode; tokenizers' ByteLevel keeps it. Printable Latin-1 characters stand for
themselves, the other bytes, in order, for the characters from U+0100 on.
"""

from __future__ import annotations

NUM_BYTE_VALUES = 256
_FIRST_STAND_IN = 0x100
_PRINTABLE = frozenset((*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)))


def _alphabet() -> tuple[str, ...]:
    hidden = [value for value in range(NUM_BYTE_VALUES) if value not in _PRINTABLE]
    stand_ins = {value: chr(_FIRST_STAND_IN + place) for place, value in enumerate(hidden)}
    return tuple(stand_ins.get(value, chr(value)) for value in range(NUM_BYTE_VALUES))


# Character of every byte value.
BYTE_CHARACTERS = _alphabet()
_BYTE_VALUES = {character: value for value, character in enumerate(BYTE_CHARACTERS)}


def token_text(raw: bytes) -> str:
    """The vocabulary's spelling of `raw`."""
    return "".join(BYTE_CHARACTERS[value] for value in raw)


def token_bytes(text: str) -> bytes:
    """The bytes that the vocabulary's `text` stands for.

    An added token may hold characters outside of the alphabet; then it stands for its own UTF-8, as in tokenizers'
    ByteLevel decoder (src/pre_tokenizers/byte_level.rs, decode_chain).
    """
    values = [_BYTE_VALUES.get(character) for character in text]
    if None in values:
        return text.encode("utf-8")
    return bytes(value for value in values if value is not None)
