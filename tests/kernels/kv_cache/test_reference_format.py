"""The fp32 format: what goes in comes out, by the CPU path and the reference, and only on the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from memopt.errors import ShapeError
from memopt.kernels.attention.mla_decode import mla_decode
from memopt.kernels.kv_cache import kv_load, kv_load_reference, kv_store, kv_store_reference
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool, require_mla_pool
from memopt.kernels.kv_formats import BF16, FP32
from memopt.kernels.layout import INDEXER_KEY_SIZE, MLA_KEY_SIZE, MLA_LATENT_SIZE, PAGE_TOKENS

SLOTS = torch.tensor([70, -1, 3, 127])
STORES = pytest.mark.parametrize("store", [kv_store, kv_store_reference])
LOADS = pytest.mark.parametrize("load", [kv_load, kv_load_reference])


def values(*shape: int) -> torch.Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)) * 1e-3


def kept(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens as they read back: padding as zeros."""
    return tokens.masked_fill((SLOTS < 0).view(-1, *([1] * (tokens.ndim - 1))), 0.0)


@STORES
@LOADS
def test_mla(store: ModuleType, load: ModuleType) -> None:
    pool, tokens = new_mla_pool(FP32, 2), values(MLA_KEY_SIZE)
    store.mla_store(tokens[:, :MLA_LATENT_SIZE], tokens[:, MLA_LATENT_SIZE:], pool, SLOTS, FP32)
    assert pool.dtype == torch.float32
    assert torch.equal(load.read_mla_tokens(pool, SLOTS, FP32), kept(tokens))
    assert int((pool != 0).any(dim=2).sum()) == 3


@STORES
@LOADS
def test_gqa(store: ModuleType, load: ModuleType) -> None:
    pools, key, value = [new_gqa_pool(FP32, 2, 3, 64) for _ in range(2)], values(3, 64), values(3, 64) + 1
    store.gqa_store(key, value, *pools, SLOTS, FP32)
    assert [torch.equal(load.read_gqa_tokens(pool, SLOTS, FP32), kept(part))
            for pool, part in zip(pools, (key, value), strict=True)] == [True, True]  # fmt: skip


@STORES
@LOADS
def test_indexer_keys(store: ModuleType, load: ModuleType) -> None:
    pool, keys = new_indexer_pool(2, kv_format=FP32), values(INDEXER_KEY_SIZE)
    store.indexer_store(keys, pool, SLOTS)
    assert torch.equal(load.read_indexer_keys(pool, SLOTS), kept(keys))


def test_decode_reads_it() -> None:
    pool, tokens = new_mla_pool(FP32, 1), values(MLA_KEY_SIZE)
    kv_store.mla_store(tokens[:, :MLA_LATENT_SIZE], tokens[:, MLA_LATENT_SIZE:], pool, torch.arange(4), FP32)
    query = values(2, MLA_KEY_SIZE)[:1] * 1e5
    found = mla_decode(
        query[..., :MLA_LATENT_SIZE].contiguous(), query[..., MLA_LATENT_SIZE:].contiguous(), pool,
        torch.zeros((1, 1), dtype=torch.int32), torch.tensor([4], dtype=torch.int32), kv_format=FP32, softmax_scale=1.0,
    ).output  # fmt: skip
    wanted = torch.softmax(query[0].double() @ tokens.double().T, dim=1) @ tokens[:, :MLA_LATENT_SIZE].double()
    assert torch.allclose(found[0].double(), wanted, rtol=1e-4, atol=1e-9)


def test_bytes_and_checks() -> None:
    assert FP32.mla_token_bytes == 4 * MLA_KEY_SIZE
    assert (FP32.indexer_token_bytes, BF16.indexer_token_bytes) == (4 * INDEXER_KEY_SIZE, INDEXER_KEY_SIZE + 4)
    assert new_indexer_pool(3, kv_format=FP32).nbytes == 3 * PAGE_TOKENS * FP32.indexer_token_bytes
    with pytest.raises(ShapeError, match="bfloat16, but float32 is needed"):
        require_mla_pool(new_mla_pool(BF16, 1), FP32)
