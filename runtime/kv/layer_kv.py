"""The pools that hold a model's keys and values: one set a layer, page ids shared by all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from memopt.kernels.kv_formats import KvFormat

# Never given to a request: rows that must read something, and nobody's data, are pointed at it.
DUMMY_PAGE = 0


class KvObserver(Protocol):
    """Told what a layer is about to store, before it is rounded: for the calibration of scales."""

    def observe(self, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """`key`, `value`: [R, heads, size], one head and no value for MLA; rows with a negative slot do not count."""
        ...


@dataclass(frozen=True, slots=True)
class MlaLayerKv:
    """One MLA layer: `pool` and `indexer_pool` as kernels/kv_cache/kv_format.py makes them.

    `scale`: float32 scalar of the layer for fp8_e4m3, else None. `indexer_pool` is None in layers without an indexer.
    `bad_slot` int32 [1]: set by a store when a slot is past the pool; one tensor for all layers, and needed on a GPU.
    """

    pool: Tensor
    scale: Tensor | None
    indexer_pool: Tensor | None
    kv_format: KvFormat
    bad_slot: Tensor | None = None
    observer: KvObserver | None = None


@dataclass(frozen=True, slots=True)
class GqaLayerKv:
    """One GQA layer of this rank's KV heads; `k_scale`, `v_scale`: float32 [kv_heads] for fp8_e4m3, else None.

    `bad_slot` as for `MlaLayerKv`.
    """

    key_pool: Tensor
    value_pool: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    kv_format: KvFormat
    bad_slot: Tensor | None = None
    observer: KvObserver | None = None


LayerKv = MlaLayerKv | GqaLayerKv


@dataclass(frozen=True, slots=True)
class KvPools:
    """All layers' pools, the decoder's first, then those of the MTP layers that are in use.

    `bad_slot`: as in the layers; the host reads it with a step's results.
    """

    kv_format: KvFormat
    num_pages: int
    layers: tuple[LayerKv, ...]
    bad_slot: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all pools."""
        tensors = [
            tensor
            for layer in self.layers
            for tensor in (
                (layer.pool, layer.indexer_pool)
                if isinstance(layer, MlaLayerKv)
                else (layer.key_pool, layer.value_pool)
            )
            if tensor is not None
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
