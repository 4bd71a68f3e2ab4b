"""What a capacity plan takes for granted, in words: printed with every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from memopt.compressor.capacity.capacity_plan import CapacityPlan, StageCapacity
from memopt.compressor.capacity.gpus import GIB, MIB
from memopt.compressor.capacity.kv_bytes import CacheFormat
from memopt.compressor.capacity.memory_plan import (
    GRAPH_BYTES_PER_REQUEST,
    SCRATCH_LENGTHS,
    MemoryPlan,
    engine_sizes,
)
from memopt.compressor.capacity.model_shape import LatentAttention
from memopt.kernels.layout import PAGE_TOKENS


def _reserve_words(memory: MemoryPlan) -> str:
    parts = [
        f"{field.name.replace('_', ' ')} {getattr(memory.reserves, field.name) / GIB:.2f} GiB"
        for field in fields(memory.reserves)
    ]
    total = memory.reserves.total_bytes / GIB
    rest = (1 - memory.fraction) * memory.gpu.memory_bytes / GIB
    effect = "exceed it: they, not the fraction, set the pool" if memory.is_limited_by_reserves else "fit into it"
    return (
        f"reserves {', '.join(parts)}: {total:.1f} GiB; the fraction leaves {rest:.1f} GiB outside weights and KV "
        f"cache, and they {effect}"
    )


def _memory(plan: CapacityPlan, stages: tuple[StageCapacity, ...]) -> Iterator[str]:
    gpu = plan.request.gpu
    if gpu is not None:
        yield f"{gpu.name} has {gpu.memory_bytes:,} bytes ({gpu.memory_bytes / GIB:.1f} GiB; {gpu.source})"
    if plan.request.kv_pool_bytes is not None:
        yield "the KV pool's size is given, not planned from the GPU's memory"
    for stage in stages:
        if stage.memory is not None:
            yield (
                f"{stage.stage.name}: weights and KV cache take at most {stage.memory.fraction:g} of a GPU "
                "(SGLang's mem_fraction_static)"
            )
            yield f"{stage.stage.name}: {_reserve_words(stage.memory)}"
    if any(stage.memory is not None for stage in stages):
        sizes = engine_sizes(None if gpu is None else gpu.memory_bytes, plan.layout.num_ranks)
        yield (
            f"default reserves: SGLang's rule for prefill chunks of {sizes.chunk_tokens:,} tokens and CUDA graphs of "
            f"{sizes.graph_requests} requests, {GRAPH_BYTES_PER_REQUEST // MIB} MiB each; vLLM's for fp8_ds_mla "
            f"scratch, BF16 keys of {SCRATCH_LENGTHS} times the longest request"
        )


def _weights(plan: CapacityPlan) -> Iterator[str]:
    request = plan.request
    mtp = "loaded, with a cache of their own" if request.is_mtp_on else "not loaded and have no cache"
    if plan.shape.num_mtp_layers:
        yield f"MTP layers are {mtp} (--mtp, --no-mtp)"
    elif request.is_mtp_on:
        yield "the model has no MTP layers: --mtp changes nothing"
    if request.weights_per_gpu_bytes is not None:
        yield f"weights a GPU are given: {request.weights_per_gpu_bytes / GIB:.1f} GiB, not the planned bytes"
    elif isinstance(plan.shape.attention, LatentAttention):
        copies = (
            "are kept beside kv_b_proj (SGLang; vLLM only of a quantized kv_b_proj)"
            if request.has_absorbed_copies
            else "are not counted"
        )
        yield f"BF16 copies of W_UK and W_UV {copies} (--absorbed-copies, --no-absorbed-copies)"


def _cache(plan: CapacityPlan, stages: tuple[StageCapacity, ...]) -> Iterator[str]:
    if isinstance(plan.shape.attention, LatentAttention):
        yield "MLA: every rank holds the whole KV cache (tensor-parallel attention), so tokens do not grow with ranks"
        if plan.shape.is_sparse:
            kept = "on every layer (SGLang)" if plan.request.indexer_cache == "all" else "on layers that own one (vLLM)"
            yield f"the DSA indexer's cache is charged {kept} (--indexer-cache)"
    else:
        for copies in sorted({stage.token.head_copies for stage in stages} - {1}):
            yield f"fewer key/value heads than ranks: each is held by {copies} ranks"
    if {stage.stage.kv_format for stage in stages} & {CacheFormat.FP8_E4M3, CacheFormat.INT8, CacheFormat.INT4}:
        yield "scales of the KV cache are one a layer or head and not counted; one a token would add to its bytes"
    yield f"a pool holds whole pages of {PAGE_TOKENS} tokens; requests share none (no prefix cache)"


def _speed(plan: CapacityPlan, stages: tuple[StageCapacity, ...]) -> Iterator[str]:
    if not any(stage.speed is not None for stage in stages):
        return
    yield (
        "speed is a bound by a model, not a measurement: full bandwidth, full dense rate (FP8 weights and the "
        "indexer's scores at the FP8 rate, all else at the BF16 rate), no communication, no launches"
    )
    yield (
        "decode reads once a step: the expected share of experts that uniform routing touches, 1 - (1 - k/E)^tokens; "
        "all other weights but the embedding; the cache of every request"
    )
    if plan.shape.is_sparse:
        yield (
            f"a query reads the keys of at most {plan.shape.top_k:,} tokens and the indexer's keys of all, "
            "on layers that own an indexer"
        )
    gpu = plan.request.gpu
    if any(stage.stage.name == "prefill" for stage in stages):
        chunk_tokens = engine_sizes(None if gpu is None else gpu.memory_bytes, plan.layout.num_ranks).chunk_tokens
        yield f"prefill is one request in chunks of {chunk_tokens:,} tokens: weights are read once a chunk"
    if plan.request.is_mtp_on and plan.shape.num_mtp_layers:
        yield "with MTP: a step works on a token and a draft of each request, and at most both are accepted"


def assumptions(plan: CapacityPlan) -> tuple[str, ...]:
    """Every assumption behind the figures of `plan`, one sentence each."""
    stages = plan.stages
    return (*_memory(plan, stages), *_weights(plan), *_cache(plan, stages), *_speed(plan, stages))
