"""GPU cases of decode attention: MLA at GLM-5.2's and Kimi K2.6's shapes, GQA at GLM-4.7's, and DSA's indexer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.case import GpuCase, Prepared
from memopt.kernels.attention import (
    gqa_decode_reference,
    indexer_scores_reference,
    mla_decode_reference,
    top_k_reference,
)
from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.gqa_decode import gqa_decode
from memopt.kernels.attention.indexer_scores import indexer_scores
from memopt.kernels.attention.mla_decode import mla_decode, sparse_mla_decode
from memopt.kernels.attention.top_k import top_k
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_store import gqa_store, indexer_store, mla_store
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import (
    DS_MLA_SCALE_GROUP,
    INDEXER_KEY_SIZE,
    INDEXER_TOKEN_BYTES,
    MLA_KEY_SIZE,
    MLA_LATENT_SIZE,
    MLA_ROPE_SIZE,
    PAGE_TOKENS,
)

MLA_SOFTMAX_SCALE = 256**-0.5
# BF16 results are rounded by 2e-3 of themselves, BF16 probabilities by 3.9e-3; scores and log-sum-exps are float32.
TOLERANCE = 8e-3
SCORE_TOLERANCE = 1e-5
F32_BYTES = 4
# What top_k reads of the scores: three passes of digits, one count, one compaction.
TOP_K_PASSES = 5


def _block_table(num_requests: int, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Permuted pages, int32 [B, pages a request]."""
    pages = -(-num_tokens // PAGE_TOKENS)
    order = torch.randperm(num_requests * pages, generator=generator, device=generator.device)
    return order.to(torch.int32).view(num_requests, pages)


def _slots(block_table: Tensor) -> Tensor:
    """Slots int64 of every place in a block table's pages, in order."""
    place = torch.arange(PAGE_TOKENS, device=block_table.device)
    return (block_table.to(torch.int64)[:, :, None] * PAGE_TOKENS + place).flatten()


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16)


def _rows(generator: torch.Generator, *shape: int) -> Tensor:
    """BF16 rows whose runs of 64 elements differ in size by a factor of up to 16: a scale in a wrong place shows."""
    values = torch.randn(shape, generator=generator, device=generator.device).unflatten(-1, (-1, 64))
    sizes = torch.rand(values.shape[:-1], generator=generator, device=generator.device)
    return (values * torch.exp2(4 * sizes - 2)[..., None]).flatten(-2).to(torch.bfloat16)


def _error(found: AttentionOutput, wanted: AttentionOutput) -> float:
    """The larger of the output's error, relative to the largest of its scale group in a head, and the log-sum-exp's."""
    exact = wanted.output.unflatten(-1, (-1, min(DS_MLA_SCALE_GROUP, wanted.output.shape[-1])))
    errors = (found.output.view_as(exact).double() - exact).abs().amax(dim=-1) / exact.abs().amax(dim=-1)
    return float(torch.maximum(errors.amax(), (found.log_sum_exp - wanted.log_sum_exp).double().abs().amax()))


def prepare_mla(
    kv_format: KvFormat, num_heads: int, num_requests: int, num_tokens: int, num_splits: int,
    generator: torch.Generator, num_selected: int | None = None,
) -> Prepared:  # fmt: skip
    """Requests of `num_tokens` each; over `num_selected` tokens of each when given."""
    device = generator.device
    table = _block_table(num_requests, num_tokens, generator)
    pool = new_mla_pool(kv_format, table.numel(), device)
    scale = torch.tensor(0.02, device=device) if kv_format.has_layer_scale else None
    slots = _slots(table)
    rows = _rows(generator, slots.shape[0], MLA_KEY_SIZE)
    bad_slot = torch.zeros(1, dtype=torch.int32, device=device)
    mla_store(rows[:, :MLA_LATENT_SIZE], rows[:, MLA_LATENT_SIZE:], pool, slots, kv_format, scale, bad_slot)
    query_latent = _normal(generator, num_requests, num_heads, MLA_LATENT_SIZE)
    query_rope = _normal(generator, num_requests, num_heads, MLA_ROPE_SIZE)
    counts = torch.full((num_requests,), num_tokens, dtype=torch.int32, device=device)
    out = new_output(query_latent, MLA_LATENT_SIZE)
    options: dict[str, Any] = {
        "kv_format": kv_format, "scale": scale, "softmax_scale": MLA_SOFTMAX_SCALE, "num_splits": num_splits,
    }  # fmt: skip
    which, kernel, reference = counts, mla_decode, mla_decode_reference.mla_decode
    if num_selected is not None:
        order = torch.rand((num_requests, num_tokens), generator=generator, device=device).argsort(dim=1)
        which = order[:, :num_selected].sort(dim=1).values.to(torch.int32)
        kernel, reference = sparse_mla_decode, mla_decode_reference.sparse_mla_decode

    def check() -> float:
        wanted = reference(query_latent.double(), query_rope.double(), pool, table, which, **options)
        return _error(out, wanted)

    peers: dict[str, Callable[[], None]] = {}
    if num_selected is None:
        query = torch.cat((query_latent, query_rope), dim=2)
        keys = rows.view(num_requests, -1, MLA_KEY_SIZE)[:, :num_tokens]
        peers["torch bf16 matmuls, contiguous tokens"] = partial(_torch_attention, query, keys)
        if kv_format is BF16 and importlib.util.find_spec("flash_mla") is not None:
            peers["flash_mla"] = _flash_mla(query, pool, table, counts)
    num_read = num_requests * (num_tokens if num_selected is None else num_selected)
    return Prepared(
        run=lambda: _drop(kernel(query_latent, query_rope, pool, table, which, out=out, **options)),
        outputs=(out.output, out.log_sum_exp),
        check=check,
        tolerance=TOLERANCE,
        bytes_moved=num_read * kv_format.mla_token_bytes + query_latent.nbytes + query_rope.nbytes + out.output.nbytes,
        flops=2 * num_read * num_heads * (MLA_KEY_SIZE + MLA_LATENT_SIZE),
        peers=peers,
    )


def _drop(_: object) -> None:
    """A kernel's result is in the tensors that it was given."""


def _torch_attention(query: Tensor, keys: Tensor) -> None:
    scores = torch.softmax(query @ keys.mT * MLA_SOFTMAX_SCALE, dim=2)
    _drop(scores @ keys[..., :MLA_LATENT_SIZE])


def _flash_mla(query: Tensor, pool: Tensor, table: Tensor, counts: Tensor) -> Callable[[], None]:
    """DeepSeek's kernel on the same BF16 pages (FlashMLA README, "How to use MLA kernels")."""
    flash_mla = importlib.import_module("flash_mla")
    metadata, num_splits = flash_mla.get_mla_metadata(counts, query.shape[1], 1)
    query, pages = query[:, None], pool[:, :, None]
    return lambda: _drop(
        flash_mla.flash_mla_with_kvcache(
            query, pages, table, counts, MLA_LATENT_SIZE, metadata, num_splits, softmax_scale=MLA_SOFTMAX_SCALE
        )
    )


def prepare_gqa(
    kv_format: KvFormat, group_heads: int, head_dim: int, num_requests: int, num_tokens: int, num_splits: int,
    generator: torch.Generator,
) -> Prepared:  # fmt: skip
    """Requests of `num_tokens` each, and one KV head that serves `group_heads` query heads."""
    device = generator.device
    table = _block_table(num_requests, num_tokens, generator)
    pools = [new_gqa_pool(kv_format, table.numel(), 1, head_dim, device) for _ in range(2)]
    scales = [torch.full((1,), 0.02, device=device) if kv_format.has_layer_scale else None for _ in range(2)]
    slots = _slots(table)
    key, value = (_rows(generator, slots.shape[0], 1, head_dim) for _ in range(2))
    gqa_store(
        key, value, pools[0], pools[1], slots, kv_format, scales[0], scales[1],
        torch.zeros(1, dtype=torch.int32, device=device),
    )  # fmt: skip
    query = _normal(generator, num_requests, group_heads, head_dim)
    counts = torch.full((num_requests,), num_tokens, dtype=torch.int32, device=device)
    out = new_output(query, head_dim)
    options: dict[str, Any] = {
        "kv_format": kv_format, "k_scale": scales[0], "v_scale": scales[1], "softmax_scale": head_dim**-0.5,
        "num_splits": num_splits,
    }  # fmt: skip
    keys, values = (rows.view(num_requests, 1, -1, head_dim)[:, :, :num_tokens] for rows in (key, value))

    def check() -> float:
        return _error(out, gqa_decode_reference.gqa_decode(query.double(), *pools, table, counts, **options))

    def torch_attention() -> None:
        attention = torch.nn.functional.scaled_dot_product_attention
        _drop(attention(query[:, :, None], keys, values, enable_gqa=True))

    return Prepared(
        run=lambda: _drop(gqa_decode(query, pools[0], pools[1], table, counts, out=out, **options)),
        outputs=(out.output, out.log_sum_exp),
        check=check,
        tolerance=TOLERANCE,
        bytes_moved=num_requests * num_tokens * kv_format.gqa_token_bytes(1, head_dim) + 2 * query.nbytes,
        flops=4 * num_requests * num_tokens * group_heads * head_dim,
        peers={"torch bf16 scaled_dot_product_attention, contiguous tokens": torch_attention},
    )


def prepare_indexer(num_heads: int, num_requests: int, num_tokens: int, generator: torch.Generator) -> Prepared:
    """FP8 queries over requests of `num_tokens` each."""
    device = generator.device
    table = _block_table(num_requests, num_tokens, generator)
    pool, slots = new_indexer_pool(table.numel(), device), _slots(table)
    keys = _normal(generator, slots.shape[0], INDEXER_KEY_SIZE)
    indexer_store(keys, pool, slots, torch.zeros(1, dtype=torch.int32, device=device))
    query = _normal(generator, num_requests, num_heads, INDEXER_KEY_SIZE).to(torch.float8_e4m3fn)
    weights = torch.randn((num_requests, num_heads), generator=generator, device=device)
    counts = torch.full((num_requests,), num_tokens, dtype=torch.int32, device=device)
    scores = torch.empty((num_requests, table.shape[1] * PAGE_TOKENS), dtype=torch.float32, device=device)

    def check() -> float:
        wanted = indexer_scores_reference.indexer_scores(query.float().double(), weights, pool, table, counts)
        wanted, found = wanted[:, :num_tokens], scores[:, :num_tokens]
        return float((found - wanted).abs().amax() / wanted.abs().amax())

    return Prepared(
        run=lambda: _drop(indexer_scores(query, weights, pool, table, counts, out=scores)),
        outputs=(scores,),
        check=check,
        tolerance=SCORE_TOLERANCE,
        bytes_moved=num_requests * num_tokens * (INDEXER_TOKEN_BYTES + F32_BYTES),
        flops=2 * num_requests * num_tokens * num_heads * INDEXER_KEY_SIZE,
    )


def prepare_top_k(k: int, num_requests: int, num_tokens: int, generator: torch.Generator) -> Prepared:
    """Scores with ties; the positions must be the reference's exactly."""
    device = generator.device
    scores = torch.randn((num_requests, num_tokens), generator=generator, device=device)
    scores = (scores * 4096).round() / 4096
    counts = torch.full((num_requests,), num_tokens, dtype=torch.int32, device=device)
    positions = torch.empty((num_requests, k), dtype=torch.int32, device=device)

    def check() -> float:
        return 0.0 if torch.equal(positions, top_k_reference.top_k(scores, counts, k)) else float("inf")

    return Prepared(
        run=lambda: _drop(top_k(scores, counts, k, positions)),
        outputs=(positions,),
        check=check,
        tolerance=0.0,
        bytes_moved=TOP_K_PASSES * scores.nbytes,
        peers={"torch.topk, not deterministic for ties": lambda: _drop(torch.topk(scores, k, dim=1))},
    )


def cases() -> Iterator[GpuCase]:
    """Splits give two programs a processor. Goals of MLA and GQA are the issue's, the indexer's and top-k's our own."""
    for kv_format in (FP8_E4M3, FP8_DS_MLA, BF16):
        prepare = partial(prepare_mla, kv_format, 8, 32, 8192, 8)
        yield GpuCase(f"mla_decode/kimi-k2.6-tp8-{kv_format.name}-32x8192", prepare, 0.65, "bandwidth")
    yield GpuCase(
        "mla_decode/64-heads-fp8_ds_mla-32x8192", partial(prepare_mla, FP8_DS_MLA, 64, 32, 8192, 4), 0.30, "bandwidth"
    )
    yield GpuCase(
        "mla_decode/one-split-fp8_e4m3-256x2048", partial(prepare_mla, FP8_E4M3, 8, 256, 2048, 1), 0.65, "bandwidth"
    )
    sparse = partial(prepare_mla, FP8_DS_MLA, 8, 64, 16384, 4, num_selected=2048)
    yield GpuCase("sparse_mla_decode/glm-5.2-tp8-fp8_ds_mla-64x2048", sparse, 0.40, "bandwidth")
    for kv_format in (FP8_E4M3, BF16):
        gqa = partial(prepare_gqa, kv_format, 12, 128, 64, 16384, 4)
        yield GpuCase(f"gqa_decode/glm-4.7-tp8-{kv_format.name}-64x16384", gqa, 0.70, "bandwidth")
    yield GpuCase("indexer_scores/glm-5.2-16x65536", partial(prepare_indexer, 32, 16, 65536), 0.50, "bandwidth")
    yield GpuCase("top_k/glm-5.2-2048-of-16x65536", partial(prepare_top_k, 2048, 16, 65536), 60.0, "microseconds")
