"""Stores into KV pages and the page-tag check, at the shapes of GLM-5.2, Kimi K2.6 and GLM-4.6 at TP8.

MLA latents and indexer keys are replicated: GLM-5.2 and Kimi have the same kernel at any TP. No instruction budget: at
decode a launch takes longer than the work, and the counts of a straight-line kernel hold the slow paths of division.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled.case import CompileCase
from memopt.kernels.kv_cache import kv_store_triton, page_tags_triton
from memopt.kernels.kv_cache.kv_store_triton import HEAD_BLOCK_TOKENS, MLA_BLOCK_TOKENS, NUM_WARPS
from memopt.kernels.layout import PAGE_TOKENS

NVIDIA, AMD = ("sm_90", "sm_100"), ("gfx942",)
# Kimi K2.6 at its 262,144 tokens has the same variant.
GLM_5_2_CONTEXT_TOKENS = 1048576
GLM_4_6_KV_HEADS_TP8, GLM_4_6_HEAD_DIM = 1, 128

COUNTS = {"slots": "*i64", "bad_slot": "*i32", "num_tokens": "i32", "num_pages": "i32"}
MLA_SIGNATURE = {
    "latent": "*bf16", "rope": "*bf16", "scale": "*fp32", "pool_scales": "*fp32", "pool_rope": "*bf16",
    "latent_stride": "i32", "rope_stride": "i32", "page_stride": "i32", **COUNTS,
}  # fmt: skip
GQA_SIGNATURE = {
    "key": "*bf16", "value": "*bf16", "k_scale": "*fp32", "v_scale": "*fp32", "key_stride": "i32",
    "value_stride": "i32", "key_page_stride": "i32", "value_page_stride": "i32", **COUNTS,
}  # fmt: skip
TAG_SIGNATURE = {
    "block_table": "*i32", "num_pages": "*i32", "tags": "*i64", "expected": "*i64", "flags": "*i32",
    "first_mismatch": "*i32", "num_physical_pages": "i32", "max_pages": "i32", "table_stride": "i32",
    "expected_stride": "i32",
}  # fmt: skip


def _case(
    name: str, kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], targets: tuple[str, ...]
) -> CompileCase:
    names = [one for one in kernel.arg_names if one not in constants]
    return CompileCase(
        name=f"kv_cache/{name}",
        kernel=kernel,
        signature={one: signature[one] for one in names},
        constants=constants,
        aligned=frozenset(one for one in names if one.endswith("_stride")),
        num_warps=NUM_WARPS,
        num_stages=1,
        targets=targets,
    )


def _stores(targets: tuple[str, ...], *, converts: bool) -> list[CompileCase]:
    """Every store for `targets`. `converts`: with NVIDIA's instruction for float32 -> e4m3, which AMD lacks."""
    cases = []
    for kv_format, pool in (("bf16", "*bf16"), ("fp8_e4m3", "*u8")):
        is_quantized = pool == "*u8"
        constants = {"QUANTIZED": is_quantized, "CONVERT": converts and is_quantized}
        mla = {"BLOCK_TOKENS": MLA_BLOCK_TOKENS, **constants, **({} if is_quantized else {"scale": None})}
        heads = {"NUM_HEADS": GLM_4_6_KV_HEADS_TP8, "HEAD_DIM": GLM_4_6_HEAD_DIM, "BLOCK_TOKENS": HEAD_BLOCK_TOKENS}
        gqa = {**heads, **constants, **({} if is_quantized else {"k_scale": None, "v_scale": None})}
        mla_signature = {**MLA_SIGNATURE, "pool": pool}
        gqa_signature = {**GQA_SIGNATURE, "key_pool": pool, "value_pool": pool}
        cases += [
            _case(f"mla_store-{kv_format}", kv_store_triton.mla_store_kernel, mla_signature, mla, targets),
            _case(f"gqa_store-{kv_format}-glm-4.6-tp8", kv_store_triton.gqa_store_kernel, gqa_signature, gqa, targets),
        ]
    own_scales = {"pool": "*u8", "pool_scales": "*fp32"}
    ds_mla = {"BLOCK_TOKENS": MLA_BLOCK_TOKENS, "CONVERT": converts}
    indexer = {"BLOCK_TOKENS": HEAD_BLOCK_TOKENS, "CONVERT": converts}
    return [
        *cases,
        _case(
            "mla_store-fp8_ds_mla",
            kv_store_triton.ds_mla_store_kernel,
            {**MLA_SIGNATURE, **own_scales},
            ds_mla,
            targets,
        ),
        _case(
            "indexer_store",
            kv_store_triton.indexer_store_kernel,
            {**GQA_SIGNATURE, **own_scales, "page_stride": "i32"},
            indexer,
            targets,
        ),
    ]


def _tag_check(name: str, num_tokens: int) -> CompileCase:
    block = page_tags_triton.block_pages(num_tokens // PAGE_TOKENS)
    return CompileCase(
        name=f"kv_cache/verify_page_tags-{name}",
        kernel=page_tags_triton.verify_page_tags_kernel,
        signature=TAG_SIGNATURE,
        constants={"BLOCK_PAGES": block},
        aligned=frozenset(),
        num_warps=page_tags_triton.num_warps(block),
        num_stages=1,
        # Tags are gathered, 64 bits each, and a row ends anywhere: there is nothing wider to load.
        min_load_bits=64,
    )


CASES: tuple[CompileCase, ...] = (
    *_stores(NVIDIA, converts=True),
    *_stores(AMD, converts=False),
    _tag_check("glm-5.2-1M", GLM_5_2_CONTEXT_TOKENS),
    _tag_check("8K", 8192),
)
