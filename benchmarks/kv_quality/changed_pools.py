"""Engines that are not as they should be: scales that get lost; and one that is better, with exact indexer keys."""

from __future__ import annotations

from dataclasses import replace

from memopt.kernels.kv_cache.kv_format import new_indexer_pool
from memopt.kernels.kv_formats import FP32
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.integrity.tracker import NoopTracker, PageTracker
from memopt.runtime.kv.kv_scales import UNIT_SCALE
from memopt.runtime.kv.layer_kv import KvPools, LayerKv, MlaLayerKv


def lose_scales(core: EngineCore) -> None:
    """From now on every layer stores and reads under unit scales, whatever is in the pages already."""
    for layer in core.pools.layers:
        scales = (layer.scale,) if isinstance(layer, MlaLayerKv) else (layer.k_scale, layer.v_scale)
        for scale in scales:
            if scale is not None:
                scale.fill_(UNIT_SCALE)


def with_exact_indexer(pools: KvPools) -> tuple[KvPools, PageTracker]:
    """The pools, with float32 indexer keys in every layer that has an indexer: a `PlacePools`."""

    def changed(layer: LayerKv) -> LayerKv:
        if not isinstance(layer, MlaLayerKv) or layer.indexer_pool is None:
            return layer
        return replace(layer, indexer_pool=new_indexer_pool(pools.num_pages, kv_format=FP32))

    return replace(pools, layers=tuple(map(changed, pools.layers))), NoopTracker()
