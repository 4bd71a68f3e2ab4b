"""Stores into KV pages: golden bytes, the rounding rule, the CPU path against the reference, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_store_cases import STORES, StoreCase, poison, rounding_cases, same_bytes

from memopt.errors import ShapeError, UnsupportedError, UsageError
from memopt.kernels.kv_cache import kv_store, kv_store_reference
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_rows_entry import store_scaled_entry
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3

each_store = pytest.mark.parametrize("case", STORES, ids=lambda case: case.name)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """e4m3 codes by looking for the nearest value in a table, in float64."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    magnitudes = values.to(torch.float64).abs().clamp(max=448.0).nan_to_num(0.0)
    above = torch.searchsorted(table, magnitudes).clamp(max=0x7E)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - magnitudes, magnitudes - table[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = torch.where(is_above, above, below) | (torch.signbit(values).to(torch.int64) << 7)
    return codes.masked_fill(values.isnan(), 0x7F).to(torch.uint8)


def test_rounding_to_e4m3_is_to_nearest_even_and_saturates() -> None:
    values = rounding_cases()
    codes = kv_store_reference.e4m3_codes(values)
    assert torch.equal(codes, _nearest(values))
    finite = values[values.abs() < 464.0]
    assert torch.equal(kv_store_reference.e4m3_codes(finite), finite.to(torch.float8_e4m3fn).view(torch.uint8))


def test_numba_rounds_every_case_alike() -> None:
    values = rounding_cases()
    stored = np.full(values.shape[0], 0xA5, np.uint8)
    offsets = np.arange(values.shape[0])
    store_scaled_entry()(values[:, None].numpy(), np.ones(1, np.float32), offsets, stored)
    assert stored.tobytes() == kv_store_reference.e4m3_codes(values).numpy().tobytes()


def test_a_scale_of_a_group() -> None:
    values = torch.tensor([[448.0, -1.0], [449.0, 0.0], [float("nan"), -224.0], [0.0, 0.0], [float("inf"), 1.0]])
    plain = kv_store_reference.group_scales(values, 2, 2.0**-126, power_of_two=False)[:, 0]
    assert plain.tolist() == [1.0, float(np.float32(449) / np.float32(448)), 0.5, 2.0**-126, float("inf")]
    rounded = kv_store_reference.group_scales(values, 2, 2.0**-22, power_of_two=True)[:, 0]
    assert rounded.tolist() == [1.0, 2.0, 0.5, 2.0**-22, float("inf")]


@given(st.floats(width=32, min_value=0, allow_nan=False, allow_infinity=False))
def test_the_indexer_scale_is_the_next_power_of_two(amax: float) -> None:
    scale = float(kv_store_reference.group_scales(torch.tensor([[amax]]), 1, 2.0**-22, power_of_two=True))
    quotient = float(np.float32(amax) / np.float32(448))
    assert np.log2(scale) == round(np.log2(scale))
    assert quotient <= scale
    assert scale / 2 < quotient or scale == 2.0**-22


def test_golden_bytes_of_fp8_ds_mla() -> None:
    latent = torch.zeros(1, 512)
    latent[0, :4] = torch.tensor([448.0, -1.0, 17.0, 19.0])  # scale 1; 17 and 19 are ties: 16 and 20
    latent[0, 128:130] = torch.tensor([-1792.0, 4.0])  # scale 4
    latent[0, 384] = 3.0  # scale 3 / 448
    rope = torch.full((1, 64), -1.5)
    pool = new_mla_pool(FP8_DS_MLA, 2)
    kv_store.mla_store(latent.bfloat16(), rope.bfloat16(), pool, torch.tensor([64 + 9]), FP8_DS_MLA)
    codes = bytearray(512)
    codes[:4] = bytes([0x7E, 0xB8, 0x58, 0x5A])
    codes[128:130] = bytes([0xFE, 0x38])
    codes[384] = 0x7E
    scales = struct.pack("<4f", 1.0, 4.0, 2.0**-126, 3.0 / 448)
    assert bytes(pool[1, 9].tolist()) == bytes(codes) + scales + bytes.fromhex("c0bf") * 64
    pool[1, 9] = 0
    assert not pool.any()


def test_golden_bytes_of_the_other_mla_formats() -> None:
    latent, rope = torch.zeros(1, 512), torch.zeros(1, 64)
    latent[0, 0], latent[0, 511], rope[0, 0], rope[0, 63] = 1.0, -1000.0, 0.5, 2.0**-9
    slots = torch.tensor([3])
    bf16, fp8 = new_mla_pool(BF16, 1), new_mla_pool(FP8_E4M3, 1)
    kv_store.mla_store(latent, rope, bf16, slots, BF16)
    kv_store.mla_store(latent, rope, fp8, slots, FP8_E4M3, torch.tensor(0.5))
    middle, gap = bytes(510), bytes(62)
    assert bytes(fp8[0, 3].tolist()) == b"\x40" + middle + b"\xfe" + b"\x38" + gap + b"\x02"
    wanted = "803f" + "0000" * 510 + "7ac4" + "003f" + "0000" * 62 + "003b"
    assert bytes(bf16.view(torch.uint8)[0, 3].tolist()) == bytes.fromhex(wanted)


def test_golden_bytes_of_gqa() -> None:
    key = torch.tensor([[[1.0, 2.0], [3.0, -4.0]]])
    pools = new_gqa_pool(FP8_E4M3, 1, 2, 2), new_gqa_pool(FP8_E4M3, 1, 2, 2)
    scales = torch.tensor([1.0, 0.5]), torch.tensor([2.0, 4.0])
    kv_store.gqa_store(key, -key, *pools, torch.tensor([1]), FP8_E4M3, *scales)
    assert bytes(pools[0][0, 1].flatten().tolist()) == bytes([0x38, 0x40, 0x4C, 0xD0])
    assert bytes(pools[1][0, 1].flatten().tolist()) == bytes([0xB0, 0xB8, 0xB4, 0x38])


def test_golden_bytes_of_the_indexer_page() -> None:
    key = torch.zeros(2, 128)
    key[0, :2], key[1, 127] = torch.tensor([450.0, 2.0]), -1e-9  # scales 2 and the least one
    pool = new_indexer_pool(2)
    kv_store.indexer_store(key.bfloat16(), pool, torch.tensor([64 + 1, 64 + 63]))
    page = bytearray(8448)
    page[128:130] = bytes([0x76, 0x38])  # 224, 1
    page[63 * 128 + 127] = 0x80 | 0x02  # 1e-9 / 2**-22 = 0.0042: two steps of 2**-9
    page[8192 + 4 : 8192 + 8] = struct.pack("<f", 2.0)
    page[8192 + 252 :] = struct.pack("<f", 2.0**-22)
    assert bytes(pool[1].tolist()) == bytes(page)
    assert not pool[0].any()


@each_store
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_cpu_path_writes_the_bytes_of_the_reference(case: StoreCase, data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1, 4))
    slots = data.draw(st.permutations(range(num_pages * 64)))[: data.draw(st.integers(0, 20))]
    padding = data.draw(st.sets(st.integers(0, 19)))
    slots = [-1 - i if i in padding else slot for i, slot in enumerate(slots)]
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    inputs = case.inputs(len(slots), dtype, data.draw(st.integers(0, 1000)))
    wanted, found = poison(case.new_pools(num_pages)), poison(case.new_pools(num_pages))
    places = torch.tensor(slots, dtype=torch.int64)
    case.store(kv_store_reference, wanted, inputs, places, None)
    case.store(kv_store, found, inputs, places, None)
    assert same_bytes(wanted, found)
    # Tokens that are not written to keep every byte.
    written = {slot // 64 for slot in slots if slot >= 0}
    for pool in found:
        for page in set(range(num_pages)) - written:
            assert bool((pool[page].view(torch.uint8) == 0xA5).all())


@each_store
def test_strided_rows_and_pools_of_interleaved_layers(case: StoreCase) -> None:
    slots = torch.tensor([70, -1, 3, 129])
    inputs = case.inputs(4, torch.bfloat16, 5)
    # Each tensor with a stride of its own.
    wide = tuple(torch.stack([one] * (2 + n), dim=1)[:, 1] for n, one in enumerate(inputs))
    plain = poison(case.new_pools(3))
    interleaved = tuple(torch.stack([pool] * (2 + n), dim=1)[:, 1] for n, pool in enumerate(plain))
    case.store(kv_store, plain, inputs, slots, None)
    case.store(kv_store, interleaved, wide, slots, None)
    assert interleaved[0].stride(0) == 2 * plain[0].stride(0)
    assert same_bytes(plain, tuple(pool.contiguous() for pool in interleaved))


@each_store
def test_the_reference_skips_a_slot_past_the_pool_and_says_so(case: StoreCase) -> None:
    inputs, bad_slot = case.inputs(3, torch.float32, 1), torch.zeros(1, dtype=torch.int32)
    some, all_in = poison(case.new_pools(2)), poison(case.new_pools(2))
    case.store(kv_store_reference, some, inputs, torch.tensor([5, -1, 6]), bad_slot)
    assert int(bad_slot) == 0
    case.store(kv_store_reference, all_in, inputs, torch.tensor([5, 128, 6]), bad_slot)
    assert int(bad_slot) == 1
    assert same_bytes(some, all_in)
    case.store(kv_store_reference, all_in, inputs, torch.tensor([5, -1, 6]), bad_slot)
    assert int(bad_slot) == 1, "a later store must not clear the flag"


@each_store
def test_a_store_is_refused_whole(case: StoreCase) -> None:
    pools = poison(case.new_pools(2))
    for slots, message in (([1, 128], "past the pool"), ([1, 1], "share slot 1")):
        with pytest.raises(UsageError, match=message):
            case.store(kv_store, pools, case.inputs(2, torch.float32, 1), torch.tensor(slots), None)
    assert same_bytes(pools, poison(case.new_pools(2)))


def test_pages_past_two_gib() -> None:
    # 2.1 GB of address space, of which only the pages written to take memory.
    num_pages = 2**31 // (64 * 656) + 3
    pool = torch.empty((num_pages, 64, 656), dtype=torch.uint8)
    (case,) = (one for one in STORES if one.name == "mla-fp8_ds_mla")
    inputs, small = case.inputs(2, torch.bfloat16, 3), poison(case.new_pools(1))
    pool[num_pages - 1].fill_(0xA5)
    last = (num_pages - 1) * 64
    case.store(kv_store, (pool,), inputs, torch.tensor([last + 63, last]), None)
    case.store(kv_store_reference, small, inputs, torch.tensor([63, 0]), None)
    assert same_bytes(small, (pool[num_pages - 1 :],))


LATENT, ROPE, SLOTS = torch.zeros(2, 512), torch.zeros(2, 64), torch.tensor([0, 1])
HEADS, HEAD_POOL = torch.zeros(2, 8, 16), new_gqa_pool(BF16, 1, 8, 16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: kv_store.mla_store(LATENT[:, :500], ROPE, p, SLOTS, BF16), ShapeError, r"latent is \[2, 500\]"),
        (
            lambda p: kv_store.mla_store(LATENT, ROPE[:1], p, SLOTS, BF16),
            ShapeError,
            r"rope is \[1, 64\], but \[2, 64\]",
        ),
        (lambda p: kv_store.mla_store(LATENT, ROPE.bfloat16(), p, SLOTS, BF16), ShapeError, "bfloat16, but float32"),
        (lambda p: kv_store.mla_store(LATENT.half(), ROPE, p, SLOTS, BF16), ShapeError, "float16, but bfloat16 or"),
        (lambda p: kv_store.mla_store(LATENT, ROPE, p, SLOTS[:1], BF16), ShapeError, r"slots is \[1\], but \[2\]"),
        (lambda p: kv_store.mla_store(LATENT, ROPE, p, SLOTS.int(), BF16), ShapeError, "int32, but int64"),
        (lambda p: kv_store.mla_store(LATENT, ROPE, p, SLOTS, FP8_E4M3), ShapeError, "bfloat16, but uint8"),
        (lambda p: kv_store.mla_store(LATENT, ROPE, p, SLOTS, BF16, torch.tensor(1.0)), ShapeError, "no layer scale"),
        (lambda p: kv_store.mla_store(LATENT[0], ROPE, p, SLOTS, BF16), ShapeError, r"latent is \[512\]"),
        (
            lambda p: kv_store.mla_store(torch.zeros(512, 2).T, ROPE, p, SLOTS, BF16),
            ShapeError,
            "each token's row must be contiguous",
        ),
        (
            lambda p: kv_store.mla_store(LATENT, ROPE, p, SLOTS, BF16, None, torch.zeros(2, dtype=torch.int32)),
            ShapeError,
            r"bad_slot is \[2\], but \[1\]",
        ),
        (
            lambda p: kv_store.gqa_store(HEADS, HEADS[:, :4], HEAD_POOL, HEAD_POOL, SLOTS, BF16),
            ShapeError,
            r"value is \[2, 4, 16\], but \[2, 8, 16\]",
        ),
        (
            lambda p: kv_store.gqa_store(HEADS, HEADS, HEAD_POOL, new_gqa_pool(BF16, 2, 8, 16), SLOTS, BF16),
            ShapeError,
            r"K pool is \[1, 64, 8, 16\], but the V pool is \[2, 64, 8, 16\]",
        ),
        (
            lambda p: kv_store.gqa_store(HEADS, HEADS, HEAD_POOL, HEAD_POOL, SLOTS, FP8_DS_MLA),
            UnsupportedError,
            "not 8 heads of 16",
        ),
        (lambda p: kv_store.indexer_store(ROPE, new_indexer_pool(1), SLOTS), ShapeError, r"key is \[2, 64\]"),
        (lambda p: kv_store.indexer_store(LATENT[:, :128], p, SLOTS), ShapeError, r"indexer pool is \[1, 64, 576\]"),
    ],
)
def test_calls_that_do_not_fit(call: Callable[[Any], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(new_mla_pool(BF16, 1))
