"""Paged decode problems: permuted pages, everything that must not be read filled with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_cache.kv_store import gqa_store, indexer_store, mla_store
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import INDEXER_KEY_SIZE, MLA_KEY_SIZE, MLA_LATENT_SIZE, MLA_ROPE_SIZE, PAGE_TOKENS

MLA_FORMATS = (BF16, FP8_E4M3, FP8_DS_MLA)
GQA_FORMATS = (BF16, FP8_E4M3)
# All bits set: NaN as e4m3, as bfloat16 and as float32.
POISON_BYTE = 0xFF
# What a block table holds past a request's pages: no page at all.
UNUSED_PAGE = -(1 << 31)
SOFTMAX_SCALE = 576**-0.5


@dataclass(frozen=True)
class Paging:
    """Pages of a batch, in any order: `block_table` int32 [B, max_pages], `num_tokens` int32 [B]."""

    block_table: torch.Tensor
    num_tokens: torch.Tensor
    num_pages: int

    def slots(self, request: int) -> torch.Tensor:
        """Slots of a request's tokens."""
        return slots_of_pages(self.block_table[request], int(self.num_tokens[request]))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def new_paging(lengths: Sequence[int], seed: int, spare_pages: int = 2) -> Paging:
    """Permuted pages for requests of these lengths, and pages that nobody owns."""
    wanted = [-(-length // PAGE_TOKENS) for length in lengths]
    pages = torch.randperm(sum(wanted) + spare_pages, generator=generator(seed)).to(torch.int32)
    table = torch.full((len(lengths), max([*wanted, 0]) + 1), UNUSED_PAGE, dtype=torch.int32)
    for request, count in enumerate(wanted):
        first = sum(wanted[:request])
        table[request, :count] = pages[first : first + count]
    return Paging(table, torch.tensor(lengths, dtype=torch.int32), pages.shape[0])


def poisoned(pool: torch.Tensor) -> torch.Tensor:
    """The pool with NaN everywhere."""
    pool.view(torch.uint8).fill_(POISON_BYTE)
    return pool


def spread(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Gaussian float32 rows, each run of 128 elements of its own size, over a factor of 64."""
    values = torch.randn(shape, generator=generator(seed))
    groups = values.unflatten(-1, (-1, 128)) if shape[-1] % 128 == 0 else values[..., None, :]
    sizes = torch.exp2(torch.rand(groups.shape[:-1], generator=generator(seed + 1)) * 6 - 3)
    return (groups * sizes[..., None]).reshape(shape)


@dataclass(frozen=True)
class MlaCase:
    """Arguments of `mla_decode`."""

    query_latent: torch.Tensor
    query_rope: torch.Tensor
    pool: torch.Tensor
    paging: Paging
    kv_format: KvFormat
    scale: torch.Tensor | None
    softmax_scale: float = SOFTMAX_SCALE

    def run(
        self, module: Any, num_splits: int = 1, dtype: torch.dtype | None = None, **changes: Any
    ) -> AttentionOutput:
        """`module.mla_decode` of this case; `dtype` of the queries."""
        queries = [q.to(dtype or q.dtype) for q in (self.query_latent, self.query_rope)]
        arguments: dict[str, Any] = {
            "kv_format": self.kv_format, "scale": self.scale, "softmax_scale": self.softmax_scale,
            "num_splits": num_splits, **changes,
        }  # fmt: skip
        return module.mla_decode(*queries, self.pool, self.paging.block_table, self.paging.num_tokens, **arguments)

    def run_selected(
        self, module: Any, positions: torch.Tensor, num_splits: int = 1, dtype: torch.dtype | None = None
    ) -> AttentionOutput:
        """`module.sparse_mla_decode` of this case over `positions`."""
        queries = [q.to(dtype or q.dtype) for q in (self.query_latent, self.query_rope)]
        return module.sparse_mla_decode(
            *queries, self.pool, self.paging.block_table, positions, kv_format=self.kv_format, scale=self.scale,
            softmax_scale=self.softmax_scale, num_splits=num_splits,
        )  # fmt: skip


def mla_case(
    lengths: Sequence[int], num_heads: int, kv_format: KvFormat, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> MlaCase:
    """Queries of `dtype`, and requests of these lengths whose tokens a pool of poisoned pages holds."""
    paging = new_paging(lengths, seed)
    pool = poisoned(new_mla_pool(kv_format, paging.num_pages))
    scale = torch.tensor(0.0425) if kv_format.has_layer_scale else None
    for request, length in enumerate(lengths):
        latent = spread((length, MLA_LATENT_SIZE), seed + 10 * request)
        rope = spread((length, MLA_ROPE_SIZE), seed + 10 * request + 5)
        mla_store(latent, rope, pool, paging.slots(request), kv_format, scale)
    query = torch.randn((len(lengths), num_heads, MLA_KEY_SIZE), generator=generator(seed + 1)).to(dtype)
    latent, rope = query.split((MLA_LATENT_SIZE, MLA_ROPE_SIZE), dim=2)
    return MlaCase(latent.contiguous(), rope.contiguous(), pool, paging, kv_format, scale)


@dataclass(frozen=True)
class GqaCase:
    """Arguments of `gqa_decode`."""

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    paging: Paging
    kv_format: KvFormat
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def run(self, module: Any, num_splits: int = 1, dtype: torch.dtype | None = None) -> AttentionOutput:
        """`module.gqa_decode` of this case; `dtype` of the query."""
        return module.gqa_decode(
            self.query.to(dtype or self.query.dtype), self.key_pool, self.value_pool, self.paging.block_table,
            self.paging.num_tokens, kv_format=self.kv_format, k_scale=self.k_scale, v_scale=self.v_scale,
            softmax_scale=self.query.shape[2] ** -0.5, num_splits=num_splits,
        )  # fmt: skip


def gqa_case(
    lengths: Sequence[int], num_heads: int, num_kv_heads: int, head_dim: int, kv_format: KvFormat, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> GqaCase:  # fmt: skip
    """A query of `dtype`, and requests of these lengths whose tokens pools of poisoned pages hold."""
    paging = new_paging(lengths, seed)
    pools = [poisoned(new_gqa_pool(kv_format, paging.num_pages, num_kv_heads, head_dim)) for _ in range(2)]
    scales = [None, None]
    if kv_format.has_layer_scale:
        scales = [torch.rand(num_kv_heads, generator=generator(seed + 2 + i)) * 0.02 + 0.005 for i in range(2)]
    for request, length in enumerate(lengths):
        key, value = (spread((length, num_kv_heads, head_dim), seed + 10 * request + 3 + i) for i in range(2))
        gqa_store(key, value, *pools, paging.slots(request), kv_format, *scales)
    query = torch.randn((len(lengths), num_heads, head_dim), generator=generator(seed + 1)).to(dtype)
    return GqaCase(query, *pools, paging, kv_format, *scales)


@dataclass(frozen=True)
class IndexerCase:
    """Arguments of `indexer_scores`."""

    query: torch.Tensor
    head_weights: torch.Tensor
    pool: torch.Tensor
    paging: Paging

    def run(self, module: Any) -> torch.Tensor:
        """`module.indexer_scores` of this case."""
        return module.indexer_scores(
            self.query, self.head_weights, self.pool, self.paging.block_table, self.paging.num_tokens
        )


def indexer_case(lengths: Sequence[int], num_heads: int, dtype: torch.dtype, seed: int = 0) -> IndexerCase:
    """A query of `dtype`, and requests of these lengths whose keys a pool of poisoned pages holds."""
    paging = new_paging(lengths, seed)
    pool = poisoned(new_indexer_pool(paging.num_pages))
    for request, length in enumerate(lengths):
        indexer_store(spread((length, INDEXER_KEY_SIZE), seed + 10 * request), pool, paging.slots(request))
    query = torch.randn((len(lengths), num_heads, INDEXER_KEY_SIZE), generator=generator(seed + 1)).to(dtype)
    weights = torch.randn((len(lengths), num_heads), generator=generator(seed + 2))
    return IndexerCase(query, weights, pool, paging)


def difference(found: AttentionOutput, wanted: AttentionOutput) -> float:
    """Largest error of the output or of the log-sum-exp; inf for NaN.

    Errors of the output are relative to the largest element of the same run of 128 of the same head.
    """
    exact = wanted.output.double().unflatten(-1, (-1, min(128, wanted.output.shape[-1])))
    size = exact.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    same_empty = torch.isneginf(found.log_sum_exp) == torch.isneginf(wanted.log_sum_exp)
    if not bool(torch.isfinite(found.output).all()) or not bool(same_empty.all()):
        return torch.inf
    output = ((found.output.double().view_as(exact) - exact).abs() / size).amax()
    log_sum_exp = (found.log_sum_exp.double() - wanted.log_sum_exp.double()).nan_to_num(0.0).abs().amax()
    return float(torch.maximum(output, log_sum_exp))
