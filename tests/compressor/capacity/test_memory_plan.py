"""Memory of a GPU: fraction, reserves, whole pages."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from tiny_plans import published

from memopt.compressor.capacity.gpus import GIB, MIB, gpu_named
from memopt.compressor.capacity.kv_bytes import CacheFormat, TokenBytes
from memopt.compressor.capacity.memory_plan import (
    EngineSizes,
    MemoryPlan,
    Reserves,
    default_reserves,
    engine_sizes,
    requests_in,
    require_fraction,
    tokens_in,
    whole_pages,
)
from memopt.compressor.capacity.model_shape import model_shape
from memopt.errors import UsageError

H200 = gpu_named("h200")
GLM_5_2 = model_shape(published("glm-5.2-fp8").config)
NOTHING = Reserves(0, 0, 0, 0, 0)


def token_of(size_bytes: int) -> TokenBytes:
    return TokenBytes(CacheFormat.BF16, 1, size_bytes, 0, 0, 0, 0, 1)


def test_default_reserves_are_the_engines_rules() -> None:
    reserves = default_reserves(GLM_5_2, CacheFormat.FP8_DS_MLA, H200, 8)
    assert reserves == Reserves(
        activations=12 * GIB,
        graphs=GIB,
        communication=GIB,
        # Five times a context of 1,048,576 tokens of 576 BF16 elements.
        kv_scratch=5 * 1_048_576 * 1152,
        runtime=512 * MIB,
    )
    assert reserves.total_bytes == sum(getattr(reserves, field.name) for field in fields(reserves))
    assert reserves.total_bytes < 0.15 * H200.memory_bytes


def test_scratch_follows_the_longest_request_and_the_format() -> None:
    assert default_reserves(GLM_5_2, CacheFormat.FP8_DS_MLA, H200, 8, 1000).kv_scratch == 5 * 1000 * 1152
    assert default_reserves(GLM_5_2, CacheFormat.BF16, H200, 8).kv_scratch == 0
    unknown = replace(GLM_5_2, max_tokens=None)
    assert default_reserves(unknown, CacheFormat.FP8_DS_MLA, H200, 8).kv_scratch == 5 * 131_072 * 1152


@pytest.mark.parametrize(
    ("gpu", "num_ranks", "chunk_tokens", "graph_requests"),
    [
        ("l40s", 1, 4096, 32),
        ("l40s", 8, 4096, 160),
        ("h100", 1, 8192, 256),
        ("h100", 4, 8192, 512),
        ("h200", 8, 8192, 512),
        ("b200", 1, 16384, 512),
    ],
)
def test_sizes_of_chunks_and_graphs_follow_the_gpu(
    gpu: str, num_ranks: int, chunk_tokens: int, graph_requests: int
) -> None:
    assert engine_sizes(gpu_named(gpu).memory_bytes, num_ranks) == EngineSizes(chunk_tokens, graph_requests)
    assert engine_sizes(None, 8) == EngineSizes(8192, 512)
    assert engine_sizes(GIB, 8) == EngineSizes(2048, 8)


def test_the_fraction_sets_the_pool_while_the_reserves_fit() -> None:
    memory = MemoryPlan(H200, 0.85, NOTHING, 52 * GIB)
    assert (memory.static_bytes, memory.is_limited_by_reserves) == (int(0.85 * H200.memory_bytes), False)
    assert memory.pool_bytes == memory.static_bytes - 52 * GIB


def test_reserves_that_do_not_fit_come_off_the_pool() -> None:
    memory = MemoryPlan(H200, 0.85, replace(NOTHING, activations=30 * GIB), 0)
    assert (memory.static_bytes, memory.is_limited_by_reserves) == (H200.memory_bytes - 30 * GIB, True)


@given(st.integers(-10, 10**12), st.integers(1, 10**6))
def test_tokens_are_whole_pages_that_fit(pool_bytes: int, size_bytes: int) -> None:
    tokens = tokens_in(pool_bytes, token_of(size_bytes))
    assert tokens % 64 == 0
    assert tokens * size_bytes <= max(pool_bytes, 0)
    assert (tokens + 64) * size_bytes > pool_bytes


@given(st.integers(0, 10**7), st.integers(1, 10**6))
def test_every_request_has_pages_of_its_own(tokens: int, length: int) -> None:
    number, pages = requests_in(tokens, length), whole_pages(length)
    assert length <= pages < length + 64
    assert number * pages <= tokens < (number + 1) * pages


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with refusal(UsageError, "memory fraction"):
        require_fraction(fraction)
    require_fraction(1.0)
