"""Tokens read back from KV pages: exact values, and what a round trip through each format loses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memopt.errors import ShapeError, UsageError
from memopt.kernels.kv_cache import kv_load, kv_load_reference, kv_store
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_rows_entry import load_scaled_entry
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat

FORMATS = [BF16, FP8_E4M3, FP8_DS_MLA]
SLOTS = torch.tensor([130, -1, 5, 64, 5])


def _random_bytes(pool: torch.Tensor, seed: int) -> torch.Tensor:
    """The pool with any bytes in it, NaN scales and ropes included."""
    pool.view(torch.uint8).copy_(torch.randint(256, pool.view(torch.uint8).shape, generator=_generator(seed)))
    return pool


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(12345.0), other.nan_to_num(12345.0)) and torch.equal(one.isnan(), other.isnan())


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.empty(256, 1)
    load_scaled_entry()(codes.numpy(), np.arange(256), np.ones(1, np.float32), values.numpy())
    wanted = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert _same(values[:, 0], wanted)
    assert _same(kv_load.e4m3_values(codes.view(16, 16)), wanted.view(16, 16))
    is_number = ~wanted.isnan()
    for found in (values[:, 0], kv_load.e4m3_values(codes)):
        assert torch.equal(torch.signbit(found)[is_number], torch.signbit(wanted)[is_number])


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
def test_mla_tokens_of_any_bytes(kv_format: KvFormat) -> None:
    pool = _random_bytes(new_mla_pool(kv_format, 3), 1)
    scale = torch.tensor(0.3) if kv_format.has_layer_scale else None
    tokens = kv_load.read_mla_tokens(pool, SLOTS, kv_format, scale)
    assert (tokens.shape, tokens.dtype) == ((5, 576), torch.float32)
    assert _same(tokens, kv_load_reference.read_mla_tokens(pool, SLOTS, kv_format, scale))
    assert not tokens[1].any()
    assert kv_load.read_mla_tokens(pool, SLOTS[:0], kv_format, scale).shape == (0, 576)


@pytest.mark.parametrize("kv_format", FORMATS[:2], ids=lambda kv_format: kv_format.name)
def test_gqa_tokens_of_any_bytes(kv_format: KvFormat) -> None:
    pool = _random_bytes(new_gqa_pool(kv_format, 3, 4, 32), 2)
    scale = torch.tensor([0.3, 1.0, 7.0, 1e-3]) if kv_format.has_layer_scale else None
    tokens = kv_load.read_gqa_tokens(pool, SLOTS, kv_format, scale)
    assert (tokens.shape, tokens.dtype) == ((5, 4, 32), torch.float32)
    assert _same(tokens, kv_load_reference.read_gqa_tokens(pool, SLOTS, kv_format, scale))
    assert not tokens[1].any()


def test_indexer_keys_of_any_bytes() -> None:
    pool = _random_bytes(new_indexer_pool(3), 3)
    keys = kv_load.read_indexer_keys(pool, SLOTS)
    assert (keys.shape, keys.dtype) == ((5, 128), torch.float32)
    assert _same(keys, kv_load_reference.read_indexer_keys(pool, SLOTS))
    assert not keys[1].any()


def test_pools_of_interleaved_layers() -> None:
    for kv_format in (BF16, FP8_DS_MLA):
        pool = _random_bytes(new_mla_pool(kv_format, 3), 7)
        layers = torch.stack((torch.zeros_like(pool), pool), dim=1)
        plain = kv_load.read_mla_tokens(pool, SLOTS, kv_format)
        assert _same(kv_load.read_mla_tokens(layers[:, 1], SLOTS, kv_format), plain)
    indexer = _random_bytes(new_indexer_pool(3), 8)
    layers = torch.stack((torch.zeros_like(indexer), indexer), dim=1)
    assert _same(kv_load.read_indexer_keys(layers[:, 1], SLOTS), kv_load.read_indexer_keys(indexer, SLOTS))


def test_bf16_comes_back_bit_for_bit() -> None:
    latent, rope = (torch.randn(5, size, generator=_generator(4)).bfloat16() for size in (512, 64))
    pool, slots = new_mla_pool(BF16, 3), torch.tensor([191, 0, 64, 2, 63])
    kv_store.mla_store(latent, rope, pool, slots, BF16)
    assert torch.equal(kv_load.read_mla_tokens(pool, slots, BF16), torch.cat((latent, rope), 1).float())


def test_what_a_round_trip_loses() -> None:
    # Half a step of e4m3 is 2**-4 of a normal number; below the first normal one it is half of 2**-9 of the scale.
    latent, rope = (torch.randn(64, size, generator=_generator(5)) for size in (512, 64))
    slots = torch.randperm(128, generator=_generator(6))[:64]
    pool = new_mla_pool(FP8_DS_MLA, 2)
    kv_store.mla_store(latent, rope, pool, slots, FP8_DS_MLA)
    back = kv_load.read_mla_tokens(pool, slots, FP8_DS_MLA)
    scale = latent.view(64, 4, 128).abs().amax(dim=2).repeat_interleave(128, dim=1) / 448
    bound = torch.maximum(latent.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)
    assert bool(((back[:, :512] - latent).abs() <= bound).all())
    assert bool(((back[:, 512:] - rope).abs() <= rope.abs() * 2.0**-8).all())
    assert float((back[:, :512] - latent).norm() / latent.norm()) < 0.03


def test_slots_past_the_pool_and_misfits_are_refused() -> None:
    pool = new_mla_pool(BF16, 1)
    with pytest.raises(UsageError, match="slot 64 is past the pool: 1 pages have 64 slots"):
        kv_load.read_mla_tokens(pool, torch.tensor([0, 64]), BF16)
    with pytest.raises(ShapeError, match="int32, but int64"):
        kv_load.read_mla_tokens(pool, torch.tensor([0], dtype=torch.int32), BF16)
    with pytest.raises(ShapeError, match="needs scale"):
        kv_load.read_mla_tokens(new_mla_pool(FP8_E4M3, 1), torch.tensor([0]), FP8_E4M3)
    with pytest.raises(ShapeError, match=r"the pool is \[1, 64, 576\]"):
        kv_load.read_gqa_tokens(pool, torch.tensor([0]), BF16)
