"""Text out of tokens as they come: a piece holds whole characters only, and the pieces joined are the whole text."""

from __future__ import annotations

import codecs
from collections.abc import Callable

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """One answer's text. Byte-level BPE cuts between bytes, so a token may end within a character: its bytes wait.

    Bytes that no UTF-8 text can hold become U+FFFD, where and as often as a decoder of the whole answer would put it.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of`: the bytes of a token's text, none for a control token (TextTokenizer.bytes_of)."""
        self._bytes_of = bytes_of
        self._decoder = _utf8_decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that the token completes; often one token's text, sometimes nothing."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for the start of a character that never ended, else nothing."""
        return self._decoder.decode(b"", final=True)
