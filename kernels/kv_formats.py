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
    F32_BITS,
    INDEXER_KEY_SIZE,
    INDEXER_TOKEN_BYTES,
    MLA_KEY_SIZE,
    PAGE_TOKENS,
)

KvFormatName = Literal["bf16", "fp8_e4m3", "fp8_ds_mla", "fp32"]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a token's keys and values lie in a page.

    `value_bytes`: bytes of an element of a pool, 2 (bfloat16), 1 (uint8) or 4 (float32). `mla_row_size`: elements of a
    token in an MLA pool. `has_layer_scale`: stored = value / scale with float32 scales of the layer, one for MLA, one
    per KV head for each of K and V. `has_gqa`: whether K and V of heads can be kept in it. `is_reference`: nothing is
    rounded, the indexer's keys included; for comparisons on the CPU.
    """

    name: KvFormatName
    value_bytes: int
    mla_row_size: int
    has_layer_scale: bool
    has_gqa: bool
    is_reference: bool = False

    @property
    def mla_token_bytes(self) -> int:
        """Bytes of a token in the MLA pool of one layer."""
        return self.mla_row_size * self.value_bytes

    @property
    def indexer_token_bytes(self) -> int:
        """Bytes of a token's indexer key in one layer that has an indexer: FP8 with a scale, whatever the format."""
        return INDEXER_KEY_SIZE * F32_BITS // BITS_PER_BYTE if self.is_reference else INDEXER_TOKEN_BYTES

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

FP32 = KvFormat("fp32", F32_BITS // BITS_PER_BYTE, MLA_KEY_SIZE, has_layer_scale=False, has_gqa=True, is_reference=True)

# What releases are served with; FP32 is not among them.
KV_FORMATS: Mapping[str, KvFormat] = MappingProxyType({item.name: item for item in (BF16, FP8_E4M3, FP8_DS_MLA)})


def kv_format(name: str) -> KvFormat:
    """The format of that name, one of KV_FORMATS or "fp32". Raises UsageError for another name."""
    if name == FP32.name:
        return FP32
    if name not in KV_FORMATS:
        raise UsageError(f"KV format {name!r} is unknown", remedy=f"use one of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]


def mla_token_bytes(kv_format: KvFormat, *, has_indexer: bool) -> int:
    """Bytes of a token in one MLA layer, with its indexer key if the layer has an indexer."""
    return kv_format.mla_token_bytes + (kv_format.indexer_token_bytes if has_indexer else 0)
