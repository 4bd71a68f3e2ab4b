"""The KV-cache formats: their names and what a token takes in bytes. Plain figures, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from memopt.errors import UnsupportedError, UsageError
from memopt.kernels.layout import (
    BF16_BITS,
    BITS_PER_BYTE,
    DS_MLA_TOKEN_BYTES,
    E4M3_BITS,
    INDEXER_TOKEN_BYTES,
    MLA_KEY_SIZE,
    PAGE_TOKENS,
)

KvFormatName = Literal["bf16", "fp8_e4m3", "fp8_ds_mla"]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a token's keys and values lie in a page.

    `value_bytes`: bytes of an element of a pool, 2 (bfloat16) or 1 (uint8). `mla_row_size`: elements of a token in an
    MLA pool. `has_layer_scale`: stored = value / scale with float32 scales of the layer, one for MLA, one per KV head
    for each of K and V. `has_gqa`: whether K and V of heads can be kept in it.
    """

    name: KvFormatName
    value_bytes: int
    mla_row_size: int
    has_layer_scale: bool
    has_gqa: bool

    @property
    def mla_token_bytes(self) -> int:
        """Bytes of a token in the MLA pool of one layer."""
        return self.mla_row_size * self.value_bytes

    @property
    def mla_page_shape(self) -> tuple[int, int]:
        """Shape of one page of an MLA pool: tokens, elements of a token."""
        return PAGE_TOKENS, self.mla_row_size

    def gqa_page_shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Shape of one page of K, or of V. Raises UnsupportedError when the format has no GQA form."""
        if not self.has_gqa:
            raise UnsupportedError(
                f"KV format {self.name} holds MLA latents, not {num_kv_heads} heads of {head_dim}",
                remedy="use bf16 or fp8_e4m3 for a model with K and V heads",
            )
        return PAGE_TOKENS, num_kv_heads, head_dim

    def gqa_token_bytes(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of a token's K and V in one layer; UnsupportedError when the format has no GQA form."""
        _, heads, size = self.gqa_page_shape(num_kv_heads, head_dim)
        return 2 * heads * size * self.value_bytes


BF16 = KvFormat("bf16", BF16_BITS // BITS_PER_BYTE, MLA_KEY_SIZE, has_layer_scale=False, has_gqa=True)
FP8_E4M3 = KvFormat("fp8_e4m3", E4M3_BITS // BITS_PER_BYTE, MLA_KEY_SIZE, has_layer_scale=True, has_gqa=True)
FP8_DS_MLA = KvFormat(
    "fp8_ds_mla", E4M3_BITS // BITS_PER_BYTE, DS_MLA_TOKEN_BYTES, has_layer_scale=False, has_gqa=False
)

KV_FORMATS: Mapping[str, KvFormat] = MappingProxyType({item.name: item for item in (BF16, FP8_E4M3, FP8_DS_MLA)})


def kv_format(name: str) -> KvFormat:
    """The format of that name. Raises UsageError for a name that is not in KV_FORMATS."""
    if name not in KV_FORMATS:
        raise UsageError(f"KV format {name!r} is unknown", remedy=f"use one of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]


def mla_token_bytes(kv_format: KvFormat, *, has_indexer: bool) -> int:
    """Bytes of a token in one MLA layer, with its indexer key (132 bytes, always FP8) if the layer has an indexer."""
    return kv_format.mla_token_bytes + (INDEXER_TOKEN_BYTES if has_indexer else 0)
