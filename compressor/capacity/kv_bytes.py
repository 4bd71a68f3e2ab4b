"""Bytes of KV cache a token, on one rank, by format.

Layouts: kernels/layout.py. Engines: vLLM v1/attention/backends/mla/flashmla_sparse.py (656 bytes),
models/deepseek_v32/attention.py (indexer cache on the layers that own one); SGLang
model_executor/pool_configurator.py (indexer cache on every layer). See docs/capacity.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from memopt.compressor.capacity.model_shape import GroupedAttention, LatentAttention, ModelShape
from memopt.errors import UsageError
from memopt.kernels.layout import (
    BF16_BITS,
    BITS_PER_BYTE,
    DS_MLA_SCALE_GROUP,
    E4M3_BITS,
    F32_BITS,
    INDEXER_KEY_SIZE,
    INDEXER_SCALE_BYTES,
    INT4_BITS,
    INT8_BITS,
)

IndexerCache = Literal["all", "own"]


class CacheFormat(StrEnum):
    """How keys and values are cached. `fp8_ds_mla`: e4m3 latent, a float32 scale every 128 of it, BF16 rotary key."""

    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_DS_MLA = "fp8_ds_mla"
    INT8 = "int8"
    INT4 = "int4"


# Bits an element of the formats that store every element alike.
ELEMENT_BITS = {
    CacheFormat.BF16: BF16_BITS,
    CacheFormat.FP8_E4M3: E4M3_BITS,
    CacheFormat.INT8: INT8_BITS,
    CacheFormat.INT4: INT4_BITS,
}
LATENT_FORMATS = (CacheFormat.BF16, CacheFormat.FP8_E4M3, CacheFormat.FP8_DS_MLA)
GROUPED_FORMATS = (CacheFormat.BF16, CacheFormat.FP8_E4M3, CacheFormat.INT8, CacheFormat.INT4)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token's cache on one rank. `key_bytes`: one layer's keys and values; `indexer_bytes`: one indexer's.

    `num_layers`: layers with keys and values; `num_indexer_layers`: those whose indexer cache is charged;
    `num_read_indexer_layers`: those that own an indexer, whose cache a step reads. `heads_per_rank`: key/value heads
    that a rank holds, 0 for MLA; `head_copies`: ranks that hold the same head.
    """

    format: CacheFormat
    num_layers: int
    key_bytes: int
    num_indexer_layers: int
    num_read_indexer_layers: int
    indexer_bytes: int
    heads_per_rank: int
    head_copies: int

    @property
    def size_bytes(self) -> int:
        """Bytes that one token takes in the pool of a rank."""
        return self.num_layers * self.key_bytes + self.num_indexer_layers * self.indexer_bytes


def default_kv_format(shape: ModelShape) -> CacheFormat:
    """The FP8 form that decode runs: fp8_ds_mla with a DSA indexer, else fp8_e4m3."""
    return CacheFormat.FP8_DS_MLA if shape.is_sparse else CacheFormat.FP8_E4M3


def _latent_key_bytes(attention: LatentAttention, form: CacheFormat) -> int:
    if form is CacheFormat.FP8_DS_MLA:
        num_scales = -(-attention.latent // DS_MLA_SCALE_GROUP)
        bits = attention.latent * E4M3_BITS + num_scales * F32_BITS + attention.rope * BF16_BITS
        return bits // BITS_PER_BYTE
    return attention.key * ELEMENT_BITS[form] // BITS_PER_BYTE


def _indexer_bytes(attention: LatentAttention) -> int:
    return attention.indexer_key + -(-attention.indexer_key // INDEXER_KEY_SIZE) * INDEXER_SCALE_BYTES


def heads_per_rank(num_kv_heads: int, num_ranks: int) -> tuple[int, int]:
    """(key/value heads a rank, ranks that hold the same head).

    With more ranks than heads, engines repeat heads: one a rank. UsageError if they neither divide nor repeat evenly.
    """
    if num_kv_heads % num_ranks == 0:
        return num_kv_heads // num_ranks, 1
    if num_ranks % num_kv_heads == 0:
        return 1, num_ranks // num_kv_heads
    raise UsageError(
        f"{num_kv_heads} key/value heads over {num_ranks} ranks: neither divides the other",
        remedy=f"use a degree that divides {num_kv_heads}, or a multiple of it",
    )


def grouped_key_bytes(num_heads: int, head_dim: int, bits: int) -> int:
    """Bytes of one token's keys and values in one layer, for `num_heads` heads of `head_dim` elements of `bits`."""
    return 2 * num_heads * head_dim * bits // BITS_PER_BYTE


def token_bytes(
    shape: ModelShape,
    form: CacheFormat,
    *,
    num_ranks: int = 1,
    is_mtp_on: bool = False,
    indexer_cache: IndexerCache = "all",
) -> TokenBytes:
    """What one token takes on one of `num_ranks` tensor-parallel ranks. MLA's latent is replicated on all of them.

    `indexer_cache`: "all" charges one on every layer, as SGLang does; "own" on the layers that own an indexer, as vLLM
    does. Scales that are stored once a layer or head are not counted. UsageError for a format of the other attention.
    """
    attention = shape.attention
    legal = LATENT_FORMATS if isinstance(attention, LatentAttention) else GROUPED_FORMATS
    if form not in legal:
        kind = "MLA" if isinstance(attention, LatentAttention) else "grouped-query attention"
        raise UsageError(f"{form} is no KV format of {kind}", remedy=f"use {', '.join(legal)}")
    num_layers = shape.cached_layers(is_mtp_on=is_mtp_on)
    if isinstance(attention, GroupedAttention):
        heads, copies = heads_per_rank(attention.num_kv_heads, num_ranks)
        key_bytes = grouped_key_bytes(heads, attention.head_dim, ELEMENT_BITS[form])
        return TokenBytes(form, num_layers, key_bytes, 0, 0, 0, heads, copies)
    key_bytes = _latent_key_bytes(attention, form)
    if not attention.top_k:
        return TokenBytes(form, num_layers, key_bytes, 0, 0, 0, 0, num_ranks)
    # An MTP layer always owns an indexer (families/glm_moe_dsa.py).
    owning = attention.num_indexer_layers + num_layers - shape.num_layers
    charged = num_layers if indexer_cache == "all" else owning
    return TokenBytes(form, num_layers, key_bytes, charged, owning, _indexer_bytes(attention), 0, num_ranks)
