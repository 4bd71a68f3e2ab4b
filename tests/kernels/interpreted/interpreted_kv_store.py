"""Triton stores into KV pages against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from guarded_memory import guarded
from kv_store_cases import STORES, StoreCase, poison, rounding_cases, same_bytes

from memopt.kernels.kv_cache import kv_store_reference, kv_store_triton
from memopt.kernels.kv_cache.kv_format import new_mla_pool
from memopt.kernels.kv_formats import FP8_DS_MLA, FP8_E4M3
from memopt.kernels.layout import MLA_KEY_SIZE, MLA_LATENT_SIZE

each_store = pytest.mark.parametrize("case", STORES, ids=lambda case: case.name)


def _flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


@each_store
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (19, 3)])
def test_bytes_are_those_of_the_reference(case: StoreCase, dtype: torch.dtype, num_tokens: int, num_pages: int) -> None:
    slots = torch.randperm(num_pages * 64)[:num_tokens]
    slots[3:15:4] = torch.tensor([-1, -64, -(2**63)])[: slots[3:15:4].shape[0]]
    inputs = case.inputs(num_tokens, dtype, seed=num_tokens)
    wanted, found, flag = poison(case.new_pools(num_pages)), poison(case.new_pools(num_pages)), _flag()
    case.store(kv_store_reference, wanted, inputs, slots, None)
    found, ends = (tuple(guarded(one) for one in tensors) for tensors in (found, inputs))
    case.store(kv_store_triton, found, ends, guarded(slots), flag)
    assert same_bytes(wanted, found)
    assert int(flag) == 0


@each_store
def test_a_slot_past_the_pool_is_not_written_and_sets_the_flag(case: StoreCase) -> None:
    inputs = case.inputs(4, torch.bfloat16, seed=2)
    pool_and_more = poison(case.new_pools(3))
    pools = tuple(pool[:2] for pool in pool_and_more)
    wanted, flag = poison(case.new_pools(3)), _flag()
    case.store(kv_store_triton, pools, inputs, torch.tensor([127, 128, 2**62, 5]), flag)
    assert int(flag) == 1
    case.store(kv_store_reference, wanted, inputs, torch.tensor([127, -1, -1, 5]), None)
    assert same_bytes(wanted, pool_and_more)


@each_store
def test_the_first_slot_past_the_pool_sets_the_flag(case: StoreCase) -> None:
    pools, inputs = poison(case.new_pools(2)), case.inputs(1, torch.bfloat16, seed=2)
    for slot, expected in ((-1, 0), (127, 0), (128, 1)):
        flag = _flag()
        case.store(kv_store_triton, pools, inputs, torch.tensor([slot]), flag)
        assert int(flag) == expected


@each_store
def test_strided_rows_and_pools_of_interleaved_layers(case: StoreCase) -> None:
    slots, inputs = torch.tensor([70, -1, 3, 129, 0]), case.inputs(5, torch.bfloat16, seed=5)
    # Each tensor with a stride of its own.
    wide = tuple(torch.stack([one] * (2 + n), dim=1)[:, 1] for n, one in enumerate(inputs))
    plain = poison(case.new_pools(3))
    interleaved = tuple(torch.stack([pool] * (2 + n), dim=1)[:, 1] for n, pool in enumerate(plain))
    case.store(kv_store_reference, plain, inputs, slots, None)
    case.store(kv_store_triton, interleaved, wide, slots, _flag())
    assert same_bytes(plain, tuple(pool.contiguous() for pool in interleaved))


def test_rounding_to_e4m3() -> None:
    values = rounding_cases()
    num_tokens = -(-values.shape[0] // MLA_KEY_SIZE)
    rows = torch.zeros(num_tokens * MLA_KEY_SIZE)
    rows[: values.shape[0]] = values
    rows = rows.view(num_tokens, MLA_KEY_SIZE)
    pool = new_mla_pool(FP8_E4M3, -(-num_tokens // 64))
    kv_store_triton.mla_store(
        rows[:, :MLA_LATENT_SIZE], rows[:, MLA_LATENT_SIZE:], pool, torch.arange(num_tokens), FP8_E4M3,
        torch.tensor(1.0), _flag(),
    )  # fmt: skip
    assert torch.equal(pool.flatten(0, 1)[:num_tokens], kv_store_reference.e4m3_codes(rows))


def test_pages_past_two_gib() -> None:
    # 2.1 GB of address space, of which only the pages written to take memory.
    num_pages = 2**31 // (64 * 656) + 3
    pool = torch.empty((num_pages, 64, 656), dtype=torch.uint8)
    (case,) = (one for one in STORES if one.name == f"mla-{FP8_DS_MLA.name}")
    inputs, small = case.inputs(2, torch.bfloat16, 3), poison(case.new_pools(1))
    pool[num_pages - 1].fill_(0xA5)
    last = (num_pages - 1) * 64
    case.store(kv_store_triton, (pool,), inputs, torch.tensor([last + 63, last]), _flag())
    case.store(kv_store_reference, small, inputs, torch.tensor([63, 0]), None)
    assert same_bytes(small, (pool[num_pages - 1 :],))
