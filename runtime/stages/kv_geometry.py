"""Which pages the layers of a model have: what sender and receiver must agree on before a byte is read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from memopt.errors import HandOverError, UnsupportedError
from memopt.kernels.kv_formats import BF16, KV_FORMATS
from memopt.kernels.layout import INDEXER_PAGE_BYTES, PAGE_TOKENS
from memopt.runtime.kv.layer_kv import KvPools, LayerKv, MlaLayerKv

MAX_LAYERS = 4096
_LAYER = re.compile(r"(mla)|(mla\+indexer)|gqa:([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's pages: `num_kv_heads` 0 for MLA; `has_indexer` only with MLA."""

    has_indexer: bool = False
    num_kv_heads: int = 0
    head_dim: int = 0

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a page in the BF16 pools: the latent's, or K's and V's; the indexer's bytes are not among them."""
        if self.num_kv_heads:
            return (BF16.gqa_page_shape(self.num_kv_heads, self.head_dim),) * 2
        return (BF16.mla_page_shape,)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all of the layer's BF16 pools, and its indexer pool."""
        values = sum(math.prod(shape) for shape in self.page_shapes)
        return values * BF16.value_bytes + (INDEXER_PAGE_BYTES if self.has_indexer else 0)

    def __str__(self) -> str:
        if self.num_kv_heads:
            return f"gqa:{self.num_kv_heads}x{self.head_dim}"
        return "mla+indexer" if self.has_indexer else "mla"


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The layers of a set of pools, MTP layers last. The KV format is not part of it: that is converted."""

    layers: tuple[LayerGeometry, ...]
    page_tokens: int = PAGE_TOKENS

    def require_same(self, other: KvGeometry) -> None:
        """HandOverError unless `other`, the sender's, has the same layers and page size."""
        if self.page_tokens != other.page_tokens:
            raise HandOverError(f"the prefill stage's pages hold {other.page_tokens} tokens, here {self.page_tokens}")
        if len(self.layers) != len(other.layers):
            raise HandOverError(
                f"the prefill stage has keys of {len(other.layers)} layers, here are {len(self.layers)}",
                remedy="use the MTP layers in both stages, or in neither, and as many ranks",
            )
        for layer, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if mine != theirs:
                raise HandOverError(
                    f"layer {layer} of the prefill stage has {theirs} pages, here {mine}",
                    remedy="open two releases of the same checkpoint, with as many ranks",
                )


def geometry_of(pools: KvPools) -> KvGeometry:
    """The geometry of pools of any format that a stage can have. UnsupportedError for the float32 reference format."""
    if pools.kv_format.name not in KV_FORMATS:
        raise UnsupportedError(
            f"KV format {pools.kv_format.name} cannot be handed over", remedy=f"use one of {', '.join(KV_FORMATS)}"
        )
    return KvGeometry(tuple(_layer_geometry(layer) for layer in pools.layers))


def parse_layer(text: str) -> LayerGeometry:
    """A layer as `str` writes it. HandOverError for any other text."""
    found = _LAYER.fullmatch(text)
    if found is None:
        raise HandOverError(f"{text[:40]!r} is no kind of layer", remedy="both stages must run the same memopt")
    if found[3]:
        return LayerGeometry(num_kv_heads=int(found[3]), head_dim=int(found[4]))
    return LayerGeometry(has_indexer=found[2] is not None)


def _layer_geometry(layer: LayerKv) -> LayerGeometry:
    if isinstance(layer, MlaLayerKv):
        return LayerGeometry(has_indexer=layer.indexer_pool is not None)
    return LayerGeometry(num_kv_heads=layer.key_pool.shape[2], head_dim=layer.key_pool.shape[3])
