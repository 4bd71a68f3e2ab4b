"""Stores into KV pages and the page-tag check: bytes against the reference, and microseconds a launch.

Decode stores 64 tokens a step, one a request; its goal is a launch. Prefill stores a chunk of 8192.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.gpu.case import GpuCase, Prepared
from benchmarks.gpu.timing import poison
from memopt.kernels.kv_cache import kv_store_reference
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_store import gqa_store, indexer_store, mla_store
from memopt.kernels.kv_cache.page_tags import verify_page_tags
from memopt.kernels.kv_cache.page_tags_reference import PageTagCheck, new_check
from memopt.kernels.kv_cache.page_tags_reference import verify_page_tags as verify_reference
from memopt.kernels.kv_formats import FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import (
    INDEXER_KEY_SIZE,
    INDEXER_TOKEN_BYTES,
    MLA_KEY_SIZE,
    MLA_LATENT_SIZE,
    MLA_ROPE_SIZE,
    PAGE_TOKENS,
)

DECODE_TOKENS, PREFILL_TOKENS = 64, 8192
GLM_4_6_KV_HEADS_TP8, GLM_4_6_HEAD_DIM = 1, 128
NUM_REQUESTS, CONTEXT_TOKENS, LONG_CONTEXT_TOKENS = 64, 131072, 1048576
STORE_GOAL_MICROSECONDS = TAG_GOAL_MICROSECONDS = 5.0
# No goal was set for prefill: it is a copy whose static instruction count allows about this much.
PREFILL_GOAL = 0.3
NAN_SHARE = 1000


def cases() -> Iterator[GpuCase]:
    """Every store at decode, the MLA one at prefill too, and the tag check at two context lengths."""
    micros = STORE_GOAL_MICROSECONDS
    for kv_format in (FP8_DS_MLA, FP8_E4M3):
        name = f"kv_store/mla-{kv_format.name}"
        yield GpuCase(f"{name}-decode", _mla(kv_format, DECODE_TOKENS), micros, "microseconds")
        yield GpuCase(f"{name}-prefill", _mla(kv_format, PREFILL_TOKENS), PREFILL_GOAL, "bandwidth")
    yield GpuCase("kv_store/gqa-fp8_e4m3-decode", _gqa(DECODE_TOKENS), micros, "microseconds")
    yield GpuCase("kv_store/indexer-decode", _indexer(DECODE_TOKENS), micros, "microseconds")
    for num_requests, num_tokens in ((NUM_REQUESTS, CONTEXT_TOKENS), (1, LONG_CONTEXT_TOKENS)):
        name = f"page_tags/{num_requests}x{num_tokens}-tokens"
        yield GpuCase(name, _tags(num_requests, num_tokens // PAGE_TOKENS), TAG_GOAL_MICROSECONDS, "microseconds")


def _mla(kv_format: KvFormat, num_tokens: int) -> Callable[[torch.Generator], Prepared]:
    def prepare(generator: torch.Generator) -> Prepared:
        latent = _values((num_tokens, MLA_LATENT_SIZE), generator)
        rope = _values((num_tokens, MLA_ROPE_SIZE), generator)
        scale = torch.tensor(0.02, device=generator.device) if kv_format.has_layer_scale else None
        pool = new_mla_pool(kv_format, _num_pages(num_tokens), generator.device)
        slots, bad_slot = _slots(num_tokens, generator)

        def reference(pools: tuple[Tensor, ...]) -> None:
            kv_store_reference.mla_store(latent, rope, *pools, slots, kv_format, scale)

        return Prepared(
            run=lambda: mla_store(latent, rope, pool, slots, kv_format, scale, bad_slot),
            outputs=(pool,),
            check=lambda: _difference((pool,), reference, bad_slot),
            tolerance=0.0,
            bytes_moved=num_tokens * (MLA_KEY_SIZE * latent.element_size() + kv_format.mla_token_bytes),
            peers=_vllm_mla(latent, rope, pool.clone(), slots, kv_format, scale),
        )

    return prepare


def _gqa(num_tokens: int) -> Callable[[torch.Generator], Prepared]:
    def prepare(generator: torch.Generator) -> Prepared:
        heads = GLM_4_6_KV_HEADS_TP8, GLM_4_6_HEAD_DIM
        key, value = (_values((num_tokens, *heads), generator) for _ in range(2))
        scale = torch.full((heads[0],), 0.02, device=generator.device)
        pools = tuple(new_gqa_pool(FP8_E4M3, _num_pages(num_tokens), *heads, device=generator.device) for _ in range(2))
        slots, bad_slot = _slots(num_tokens, generator)

        def reference(copies: tuple[Tensor, ...]) -> None:
            kv_store_reference.gqa_store(key, value, *copies, slots, FP8_E4M3, scale, scale)

        return Prepared(
            run=lambda: gqa_store(key, value, *pools, slots, FP8_E4M3, scale, scale, bad_slot),
            outputs=pools,
            check=lambda: _difference(pools, reference, bad_slot),
            tolerance=0.0,
            bytes_moved=2 * key.numel() * key.element_size() + num_tokens * FP8_E4M3.gqa_token_bytes(*heads),
        )

    return prepare


def _indexer(num_tokens: int) -> Callable[[torch.Generator], Prepared]:
    def prepare(generator: torch.Generator) -> Prepared:
        key = _values((num_tokens, INDEXER_KEY_SIZE), generator)
        pool = new_indexer_pool(_num_pages(num_tokens), generator.device)
        slots, bad_slot = _slots(num_tokens, generator)

        def reference(pools: tuple[Tensor, ...]) -> None:
            kv_store_reference.indexer_store(key, *pools, slots)

        return Prepared(
            run=lambda: indexer_store(key, pool, slots, bad_slot),
            outputs=(pool,),
            check=lambda: _difference((pool,), reference, bad_slot),
            tolerance=0.0,
            bytes_moved=num_tokens * (INDEXER_KEY_SIZE * key.element_size() + INDEXER_TOKEN_BYTES),
        )

    return prepare


def _tags(num_requests: int, max_pages: int) -> Callable[[torch.Generator], Prepared]:
    def prepare(generator: torch.Generator) -> Prepared:
        device, num_physical_pages = generator.device, num_requests * max_pages + 1
        tags = torch.randint(1, 1 << 62, (num_physical_pages,), generator=generator, device=device)
        pages = torch.randperm(num_physical_pages, generator=generator, device=device)[: num_requests * max_pages]
        table = pages.view(num_requests, max_pages).to(torch.int32)
        expected = tags[table.to(torch.int64)]
        num_pages = torch.full((num_requests,), max_pages, dtype=torch.int32, device=device)
        # Every other request loses a page to somebody else.
        lost = torch.randint(max_pages, (num_requests,), generator=generator, device=device)
        tags[table[torch.arange(num_requests, device=device), lost][::2].to(torch.int64)] += 1
        out = new_check(table)

        def check() -> float:
            wanted: PageTagCheck = verify_reference(table, num_pages, tags, expected)
            is_same = torch.equal(out.flags, wanted.flags) and torch.equal(out.first_mismatch, wanted.first_mismatch)
            return 0.0 if is_same and int(out.flags.sum()) == -(-num_requests // 2) else float("inf")

        def run() -> None:
            verify_page_tags(table, num_pages, tags, expected, out)

        entry_bytes = table.element_size() + tags.element_size() + expected.element_size()
        return Prepared(
            run=run,
            outputs=(out.flags, out.first_mismatch),
            check=check,
            tolerance=0.0,
            bytes_moved=num_requests * max_pages * entry_bytes,
        )

    return prepare


def _values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """BF16 of very different sizes, with a few NaN."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    spread = torch.randn(shape[0], generator=generator, device=generator.device).mul_(4).exp2_()
    values.mul_(spread.view(-1, *([1] * (len(shape) - 1))))
    values.view(-1)[::NAN_SHARE] = torch.nan
    return values.to(torch.bfloat16)


def _num_pages(num_tokens: int) -> int:
    """Twice what the tokens need: half of the slots stay as they are."""
    return max(2 * num_tokens // PAGE_TOKENS, 2)


def _slots(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slots in random order, one of them padding; and the flag for one past the pool."""
    num_slots = _num_pages(num_tokens) * PAGE_TOKENS
    slots = torch.randperm(num_slots, generator=generator, device=generator.device)[:num_tokens]
    slots[num_tokens // 2] = -1
    return slots, torch.zeros(1, dtype=torch.int32, device=generator.device)


def _difference(pools: tuple[Tensor, ...], store: Callable[[tuple[Tensor, ...]], None], bad_slot: Tensor) -> float:
    """0.0 when every byte of the pools is as the reference leaves it in pools that were poisoned alike."""
    wanted = tuple(torch.empty_like(pool) for pool in pools)
    for pool in wanted:
        poison(pool)
    store(wanted)
    is_same = all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(pools, wanted, strict=True)
    )
    return 0.0 if is_same and int(bad_slot) == 0 else float("inf")


def _vllm_mla(
    latent: Tensor, rope: Tensor, pool: Tensor, slots: Tensor, kv_format: KvFormat, scale: Tensor | None
) -> Mapping[str, Callable[[], None]]:
    """vLLM's store of the same format, if it is installed."""
    if find_spec("vllm") is None:
        return {}
    names = {FP8_DS_MLA.name: "fp8_ds_mla", FP8_E4M3.name: "fp8"}
    one = torch.ones((), device=latent.device) if scale is None else scale

    def store() -> None:
        from vllm import _custom_ops

        _custom_ops.concat_and_cache_mla(latent, rope, pool, slots, names[kv_format.name], one)

    return {"vllm concat_and_cache_mla": store}
