"""The hand-over from BF16 pages to the pages of decode writes what a direct store would have written."""

from __future__ import annotations

import pytest
import torch
from kv_store_cases import poison, same_bytes

from memopt.errors import ShapeError, UsageError
from memopt.kernels.kv_cache.kv_convert import convert_gqa_tokens, convert_mla_tokens
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_cache.kv_store import gqa_store, mla_store
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat

NUM_TOKENS = 130
SOURCE_SLOTS = slots_of_pages(torch.tensor([4, 0, 2]), NUM_TOKENS)
TARGET_SLOTS = slots_of_pages(torch.tensor([1, 3, 0]), NUM_TOKENS)


@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3, FP8_DS_MLA], ids=lambda kv_format: kv_format.name)
def test_mla(kv_format: KvFormat) -> None:
    torch.manual_seed(1)
    latent, rope = torch.randn(NUM_TOKENS, 512).bfloat16(), torch.randn(NUM_TOKENS, 64).bfloat16()
    scale = torch.tensor(0.02) if kv_format.has_layer_scale else None
    source, wanted, found = new_mla_pool(BF16, 5), *(poison((new_mla_pool(kv_format, 4),)) for _ in range(2))
    mla_store(latent, rope, source, SOURCE_SLOTS, BF16)
    mla_store(latent, rope, *wanted, TARGET_SLOTS, kv_format, scale)
    convert_mla_tokens(source, SOURCE_SLOTS, *found, TARGET_SLOTS, kv_format, scale)
    assert same_bytes(wanted, found)


@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3], ids=lambda kv_format: kv_format.name)
def test_gqa(kv_format: KvFormat) -> None:
    torch.manual_seed(2)
    key, value = torch.randn(NUM_TOKENS, 2, 16).bfloat16(), torch.randn(NUM_TOKENS, 2, 16).bfloat16()
    scales = (torch.tensor([0.02, 0.5]), torch.tensor([0.1, 1.0])) if kv_format.has_layer_scale else (None, None)
    sources = new_gqa_pool(BF16, 5, 2, 16), new_gqa_pool(BF16, 5, 2, 16)
    wanted, found = (poison(tuple(new_gqa_pool(kv_format, 4, 2, 16) for _ in range(2))) for _ in range(2))
    gqa_store(key, value, *sources, SOURCE_SLOTS, BF16)
    gqa_store(key, value, *wanted, TARGET_SLOTS, kv_format, *scales)
    convert_gqa_tokens(*sources, SOURCE_SLOTS, *found, TARGET_SLOTS, kv_format, *scales)
    assert same_bytes(wanted, found)


def test_padding_and_sources_that_are_not_there() -> None:
    source, pool = new_mla_pool(BF16, 1), poison((new_mla_pool(FP8_DS_MLA, 1),))
    convert_mla_tokens(source, torch.tensor([-1, 5]), *pool, torch.tensor([-1, -1]), FP8_DS_MLA)
    assert same_bytes(pool, poison((new_mla_pool(FP8_DS_MLA, 1),)))
    for slot, target in ((-1, 2), (-1, 0), (64, 2), (64, -1)):
        with pytest.raises(UsageError, match=f"token 1 would go from slot {slot} to slot {target}"):
            convert_mla_tokens(source, torch.tensor([0, slot]), *pool, torch.tensor([1, target]), FP8_DS_MLA)
    with pytest.raises(ShapeError, match=r"source_slots is \[1\], but \[2\]"):
        convert_mla_tokens(source, torch.tensor([0]), *pool, torch.tensor([1, 2]), FP8_DS_MLA)
    with pytest.raises(ShapeError, match="uint8, but bfloat16"):
        convert_mla_tokens(new_mla_pool(FP8_E4M3, 1), torch.tensor([0]), *pool, torch.tensor([1]), FP8_DS_MLA)
