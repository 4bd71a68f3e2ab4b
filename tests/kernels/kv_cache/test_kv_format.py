"""Pools: shapes, dtypes, views of the fields in a page, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memopt.errors import AlignmentError, ShapeError
from memopt.kernels.kv_cache.kv_format import (
    ds_mla_views,
    indexer_views,
    new_gqa_pool,
    new_indexer_pool,
    new_mla_pool,
    require_gqa_pool,
    require_gqa_scale,
    require_indexer_pool,
    require_mla_pool,
    require_mla_scale,
)
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3


def test_new_pools_fit_and_are_zero() -> None:
    for kv_format, dtype, row in (
        (BF16, torch.bfloat16, 576),
        (FP8_E4M3, torch.uint8, 576),
        (FP8_DS_MLA, torch.uint8, 656),
    ):
        pool = new_mla_pool(kv_format, 3)
        assert (pool.shape, pool.dtype) == ((3, 64, row), dtype)
        assert not pool.view(torch.uint8).any()
        require_mla_pool(pool, kv_format)
    for kv_format in (BF16, FP8_E4M3):
        require_gqa_pool("K", new_gqa_pool(kv_format, 2, 8, 128), kv_format, 8, 128)
    indexer = new_indexer_pool(2)
    assert indexer.shape == (2, 8448)
    require_indexer_pool(indexer)


def test_ds_mla_views_are_the_bytes_of_a_token() -> None:
    pool = new_mla_pool(FP8_DS_MLA, 2)
    views = ds_mla_views(pool)
    views.latent[1, 5] = 7
    views.scales[1, 5] = torch.tensor([1.0, 2.0, 4.0, -8.0])
    views.rope[1, 5] = 1.5
    row = bytes(pool[1, 5].tolist())
    assert row[:512] == bytes([7] * 512)
    assert row[512:528] == bytes.fromhex("0000803f 00000040 00008040 000000c1")
    assert row[528:] == bytes.fromhex("c03f") * 64
    pool[1, 5] = 0
    assert not pool.any()


def test_indexer_views_are_the_bytes_of_a_page() -> None:
    pool = new_indexer_pool(2)
    views = indexer_views(pool)
    views.keys[1, 63] = 9
    views.scales[1, 63] = 0.5
    page = bytes(pool[1].tolist())
    assert page[63 * 128 : 64 * 128] == bytes([9] * 128)
    assert page[64 * 128 + 63 * 4 :] == bytes.fromhex("0000003f")
    assert sum(value != 0 for value in page) == 128 + 1


def test_layers_may_share_an_allocation() -> None:
    layers = torch.zeros(4, 3, 64, 656, dtype=torch.uint8)
    layer = layers[:, 1]
    require_mla_pool(layer, FP8_DS_MLA)
    ds_mla_views(layer).scales[3, 0, 0] = 1.0
    assert bytes(layers[3, 1, 0, 512:516].tolist()) == bytes.fromhex("0000803f")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.zeros(2, 64, 576, dtype=torch.uint8), ShapeError, r"\[2, 64, 576\], but \[any, 64, 656\]"),
        (lambda: torch.zeros(2, 64, 656, dtype=torch.int8), ShapeError, "int8, but uint8"),
        (lambda: torch.zeros(0, 64, 656, dtype=torch.uint8), ShapeError, "has no pages"),
        (lambda: torch.zeros(2, 656, 64, dtype=torch.uint8).mT, ShapeError, "each page must be contiguous"),
        (
            lambda: torch.zeros(1, 64, 656, dtype=torch.uint8).expand(2, -1, -1),
            ShapeError,
            "each page must be contiguous",
        ),
        (lambda: torch.zeros(64 * 656 * 2 + 8, dtype=torch.uint8)[8:].view(2, 64, 656), AlignmentError, "address"),
        (
            lambda: torch.zeros(2 * (64 * 656 + 8), dtype=torch.uint8).as_strided((2, 64, 656), (64 * 656 + 8, 656, 1)),
            AlignmentError,
            "page stride of the MLA pool is 41992",
        ),
    ],
)
def test_pools_that_do_not_fit(make: Callable[[], torch.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        require_mla_pool(make(), FP8_DS_MLA)


def test_scales() -> None:
    pool, one, heads = torch.zeros(1), torch.tensor(1.0), torch.ones(8)
    require_mla_scale(one, FP8_E4M3, like=pool)
    require_mla_scale(None, FP8_DS_MLA, like=pool)
    require_gqa_scale("k_scale", heads, FP8_E4M3, 8, like=pool)
    with pytest.raises(ShapeError, match=r"fp8_e4m3 needs scale, a float32 tensor \[\], but got none"):
        require_mla_scale(None, FP8_E4M3, like=pool)
    with pytest.raises(ShapeError, match="fp8_ds_mla has no layer scale"):
        require_mla_scale(one, FP8_DS_MLA, like=pool)
    with pytest.raises(ShapeError, match=r"k_scale is \[8\], but \[4\]"):
        require_gqa_scale("k_scale", heads, FP8_E4M3, 4, like=pool)
    with pytest.raises(ShapeError, match="float64, but float32"):
        require_mla_scale(one.double(), FP8_E4M3, like=pool)
