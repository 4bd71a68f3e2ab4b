"""The plain formula for a dense model's KV cache: layers x 2 x tokens x kv_heads x head_dim x bytes x requests."""

from __future__ import annotations

from dataclasses import dataclass, fields

from memopt.compressor.capacity.kv_bytes import ELEMENT_BITS, CacheFormat, grouped_key_bytes
from memopt.errors import UsageError

MAX_DIGITS = 12


@dataclass(frozen=True)
class DenseCache:
    """The cache of `requests` requests of `tokens` tokens each, in one dense model (all ranks together)."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    requests: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UsageError(f"{field.name}={getattr(self, field.name)}: must be 1 or more")

    def size_bytes(self, form: CacheFormat) -> int:
        """Bytes in `form`, every element alike (not fp8_ds_mla); scales are not counted."""
        a_token = grouped_key_bytes(self.kv_heads, self.head_dim, ELEMENT_BITS[form])
        return self.layers * a_token * self.tokens * self.requests


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def parse_dense_cache(text: str) -> DenseCache:
    """A DenseCache from "layers=64,kv_heads=8,head_dim=128,tokens=32768,requests=16"; UsageError naming the fault."""
    names = [field.name for field in fields(DenseCache)]
    remedy = "write layers=64,kv_heads=8,head_dim=128,tokens=32768,requests=16"
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in names or name in values or not _is_number(value):
            known = ", ".join(names)
            raise UsageError(f"--kv-formula: {part.strip()[:80]!r} is not one of {known} with a number", remedy=remedy)
        values[name] = int(value)
    missing = [name for name in names if name not in values and name != "requests"]
    if missing:
        raise UsageError(f"--kv-formula lacks {', '.join(missing)}", remedy=remedy)
    return DenseCache(**values)
