"""Pools of every family and format: shapes, shared page ids, bytes, scales of a rank, refusals."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from transformers_attention import deepseek_pair, glm4_pair, glm_dsa_pair

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, FP32, KvFormat
from memopt.kernels.layout import INDEXER_TOKEN_BYTES, MLA_KEY_SIZE, PAGE_TOKENS
from memopt.runtime.kv.kv_pools import kv_token_bytes, new_kv_pools
from memopt.runtime.kv.kv_scales import KvScales, LayerScales
from memopt.runtime.kv.layer_kv import GqaLayerKv, MlaLayerKv
from memopt.runtime.model.model_config import GqaConfig, MlaConfig

PAGES = 3
DSA, DENSE, GQA = glm_dsa_pair().config, deepseek_pair().config, glm4_pair().config


@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3, FP8_DS_MLA, FP32], ids=lambda item: item.name)
@pytest.mark.parametrize("config", [DSA, DENSE, GQA], ids=["dsa", "dense", "gqa"])
def test_all_pools_have_the_same_pages(config: object, kv_format: KvFormat) -> None:
    if config is GQA and kv_format is FP8_DS_MLA:
        with pytest.raises(UnsupportedError, match="not 2 heads of 64"):
            new_kv_pools(GQA, kv_format, PAGES, num_layers=2, num_kv_heads_here=2)
        return
    model = {id(item): item for item in (DSA, DENSE, GQA)}[id(config)]
    pools = new_kv_pools(model, kv_format, PAGES, num_layers=2, num_kv_heads_here=2)
    assert (pools.kv_format, pools.num_pages, len(pools.layers)) == (kv_format, PAGES, 2)
    for layer in pools.layers:
        assert layer.bad_slot is pools.bad_slot
        assert layer.kv_format is kv_format
        assert layer.observer is None
        if isinstance(layer, MlaLayerKv):
            found = [layer.pool] + ([] if layer.indexer_pool is None else [layer.indexer_pool])
            assert (layer.scale is None) == (not kv_format.has_layer_scale)
        else:
            found = [layer.key_pool, layer.value_pool]
            assert (layer.k_scale is None) == (layer.v_scale is None) == (not kv_format.has_layer_scale)
        assert all(pool.shape[0] == PAGES and not bool(pool.any()) for pool in found)
    token_bytes = kv_token_bytes(model, kv_format, num_layers=2, num_kv_heads_here=2)
    assert pools.size_bytes == PAGES * PAGE_TOKENS * token_bytes


def test_layers_without_an_indexer_have_no_keys_for_it() -> None:
    pools = new_kv_pools(DSA, BF16, PAGES, num_layers=3, num_kv_heads_here=1)
    # Layer 1 shares; layer 2 is an MTP layer, which owns one.
    assert [isinstance(layer, MlaLayerKv) and layer.indexer_pool is not None for layer in pools.layers] == [
        True, False, True,
    ]  # fmt: skip
    expected = 3 * MLA_KEY_SIZE * 2 + 2 * INDEXER_TOKEN_BYTES
    assert kv_token_bytes(DSA, BF16, num_layers=3, num_kv_heads_here=1) == expected


def test_scales_reach_their_layers_and_ranks() -> None:
    heads = LayerScales(torch.tensor([0.5, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0, 7.0, 8.0]))
    scales = KvScales(MappingProxyType({1: heads}))
    pools = new_kv_pools(GQA, FP8_E4M3, PAGES, num_layers=2, num_kv_heads_here=2, scales=scales, rank=1)
    first, second = pools.layers
    assert isinstance(first, GqaLayerKv)
    assert isinstance(second, GqaLayerKv)
    assert first.k_scale is not None
    assert first.k_scale.tolist() == [1.0, 1.0]
    assert second.k_scale is not None
    assert second.v_scale is not None
    assert (second.k_scale.tolist(), second.v_scale.tolist()) == ([3.0, 4.0], [7.0, 8.0])
    layer = KvScales(MappingProxyType({0: LayerScales(torch.tensor(0.25), None)}))
    mla = new_kv_pools(DENSE, FP8_E4M3, PAGES, num_layers=1, num_kv_heads_here=1, scales=layer).layers[0]
    assert isinstance(mla, MlaLayerKv)
    assert mla.scale is not None
    assert float(mla.scale) == 0.25
    with pytest.raises(ShapeError, match="layer 1 has KV scales of 4 heads, but this rank's are 4 to 5"):
        new_kv_pools(GQA, FP8_E4M3, PAGES, num_layers=2, num_kv_heads_here=2, scales=scales, rank=2)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="0 pages holds nothing"):
        new_kv_pools(DENSE, BF16, 0, num_layers=1, num_kv_heads_here=1)
    assert isinstance(DENSE.attention, MlaConfig)
    wide = replace(DENSE, attention=replace(DENSE.attention, latent_size=1024))
    with pytest.raises(UnsupportedError, match="the latent has 1024 elements, but a page holds 512"):
        new_kv_pools(wide, BF16, PAGES, num_layers=1, num_kv_heads_here=1)
    assert isinstance(GQA.attention, GqaConfig)
    tall = replace(GQA, attention=replace(GQA.attention, head_dim=256))
    with pytest.raises(UnsupportedError, match="heads have 256 elements, but the kernels hold at most 128"):
        new_kv_pools(tall, BF16, PAGES, num_layers=1, num_kv_heads_here=1)
