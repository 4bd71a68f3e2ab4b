"""layers x 2 x tokens x kv_heads x head_dim x bytes x requests, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from memopt.compressor.capacity.kv_bytes import CacheFormat
from memopt.compressor.capacity.kv_formula import DenseCache, parse_dense_cache
from memopt.errors import UsageError

PUBLISHED = "layers=64,kv_heads=8,head_dim=128,tokens=32768,requests=16"


@pytest.mark.parametrize(("form", "in_gib"), [("bf16", 128), ("fp8_e4m3", 64), ("int8", 64), ("int4", 32)])
def test_the_published_figures(form: str, in_gib: int) -> None:
    assert parse_dense_cache(PUBLISHED).size_bytes(CacheFormat(form)) == in_gib * 2**30


sizes = st.integers(1, 10**6)


@given(sizes, sizes, sizes, sizes, sizes)
def test_the_formula_is_the_product(layers: int, heads: int, size: int, tokens: int, requests: int) -> None:
    cache = DenseCache(layers, heads, size, tokens, requests)
    assert cache.size_bytes(CacheFormat.BF16) == layers * 2 * tokens * heads * size * 2 * requests
    assert cache.size_bytes(CacheFormat.INT4) * 4 == cache.size_bytes(CacheFormat.BF16)
    text = f"layers={layers}, kv_heads={heads},head_dim={size},tokens={tokens},requests={requests}"
    assert parse_dense_cache(text) == cache


def test_one_request_unless_more_are_said() -> None:
    assert parse_dense_cache("layers=1,kv_heads=1,head_dim=64,tokens=2") == DenseCache(1, 1, 64, 2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not one of"),
        ("layers=64", "lacks kv_heads, head_dim, tokens"),
        (f"{PUBLISHED},heads=2", "'heads=2'"),
        (f"{PUBLISHED},layers=2", "'layers=2'"),
        (PUBLISHED.replace("=8", "=-8"), "'kv_heads=-8'"),
        (PUBLISHED.replace("=8", "=0"), "kv_heads=0: must be 1 or more"),
        (PUBLISHED.replace("=8", "=8.5"), "'kv_heads=8.5'"),
        (PUBLISHED.replace("=8", "=²"), "kv_heads=²"),
        (PUBLISHED.replace("=8", "=" + "9" * 5000), "kv_heads=9"),
    ],
)
def test_what_is_no_formula_is_refused(text: str, words: str) -> None:
    with refusal(UsageError, words):
        parse_dense_cache(text)
