"""Text to token ids by a checkpoint's tokenizer.json, without losing a byte.

SmolLM2's vocabulary has no token for eight control bytes, so `memopt` does not encode text with it: the tokenizers
library would leave such a byte out in silence. Here every text is decoded again and compared.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from memopt.compressor.evaluate.calibration_data import Encode
from memopt.errors import ContentError


def lossless_encoder(checkpoint: Path) -> Encode:
    """Encodes without special tokens; ContentError for a text that its ids do not spell."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ContentError("the vocabulary cannot spell this text", file="tokenizer.json", remedy="leave it out")
        return ids

    return encode
