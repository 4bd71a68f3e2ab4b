"""Bytes of KV cache a token: the published figures, the kernels' own layouts, and what each attention refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from tiny_checkpoints import CONFIGS, NAMES, tiny_config

from memopt.compressor.capacity.kv_bytes import (
    GROUPED_FORMATS,
    LATENT_FORMATS,
    CacheFormat,
    default_kv_format,
    heads_per_rank,
    token_bytes,
)
from memopt.compressor.capacity.model_shape import GroupedAttention, LatentAttention, ModelShape, model_shape
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.errors import ConfigError, UsageError
from memopt.kernels.kv_formats import KV_FORMATS
from memopt.kernels.layout import INDEXER_TOKEN_BYTES


def shape_of(name: str, **changes: object) -> ModelShape:
    table = json.loads((CONFIGS / f"{name}.json").read_text())
    table.get("text_config", table).update(changes)
    return model_shape(parse_config(json.dumps(table).encode()))


@pytest.mark.parametrize(
    ("config", "form", "indexer_cache", "size_bytes"),
    [
        ("kimi-k2.6-int4", "bf16", "all", 70_272),
        ("kimi-k2.6-int4", "fp8_e4m3", "all", 35_136),
        ("glm-5.2-fp8", "fp8_ds_mla", "all", 61_464),
        ("glm-5.2-fp8", "fp8_ds_mla", "own", 53_940),
        ("glm-5.2-fp8", "bf16", "own", 92_628),
        ("glm-5.2-fp8", "fp8_e4m3", "own", 47_700),
        # Every layer of GLM-5.1 owns an indexer.
        ("glm-5.1-fp8", "fp8_ds_mla", "own", 61_464),
        ("glm-4.7-fp8", "fp8_e4m3", "all", 188_416),
        ("glm-4.7-fp8", "bf16", "all", 376_832),
        ("glm-4.7-fp8", "int8", "all", 188_416),
        ("glm-4.7-fp8", "int4", "all", 94_208),
    ],
)
def test_published_bytes_a_token(config: str, form: str, indexer_cache: str, size_bytes: int) -> None:
    token = token_bytes(shape_of(config), CacheFormat(form), indexer_cache=indexer_cache)  # type: ignore[arg-type]
    assert token.size_bytes == size_bytes


def test_an_mtp_layer_has_a_cache_and_an_indexer_of_its_own() -> None:
    shape = shape_of("glm-5.2-fp8")
    for cache in ("all", "own"):
        off = token_bytes(shape, CacheFormat.FP8_DS_MLA, indexer_cache=cache)  # type: ignore[arg-type]
        on = token_bytes(shape, CacheFormat.FP8_DS_MLA, indexer_cache=cache, is_mtp_on=True)  # type: ignore[arg-type]
        assert on.size_bytes - off.size_bytes == 656 + 132
    assert (off.num_read_indexer_layers, on.num_read_indexer_layers) == (21, 22)


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_the_kernels_pages_take_as_many_bytes(name: str) -> None:
    kernel, form = KV_FORMATS[name], CacheFormat(name)
    shape = shape_of("glm-5.2-fp8")
    token = token_bytes(shape, form)
    assert (token.key_bytes, token.indexer_bytes) == (kernel.mla_token_bytes, INDEXER_TOKEN_BYTES)
    if kernel.has_gqa:
        assert token_bytes(shape_of("glm-4.7-fp8"), form).key_bytes == kernel.gqa_token_bytes(8, 128)


def test_mla_is_whole_on_every_rank_and_gqa_is_cut() -> None:
    latent, grouped = shape_of("kimi-k2.6-int4"), shape_of("glm-4.7-fp8")
    assert token_bytes(latent, CacheFormat.BF16, num_ranks=8).size_bytes == 70_272
    eighth = token_bytes(grouped, CacheFormat.FP8_E4M3, num_ranks=8)
    assert (eighth.size_bytes, eighth.heads_per_rank, eighth.head_copies) == (23_552, 1, 1)


def test_heads_are_repeated_where_there_are_more_ranks() -> None:
    token = token_bytes(shape_of("glm-4.7-fp8"), CacheFormat.FP8_E4M3, num_ranks=32)
    assert (token.size_bytes, token.heads_per_rank, token.head_copies) == (23_552, 1, 4)
    with refusal(UsageError, "8 key/value heads over 12 ranks", "divides 8"):
        heads_per_rank(8, 12)


@given(st.integers(0, 7), st.integers(0, 7))
def test_all_heads_are_somewhere(log_heads: int, log_ranks: int) -> None:
    heads, copies = heads_per_rank(2**log_heads, 2**log_ranks)
    assert heads * 2**log_ranks == 2**log_heads * copies
    assert heads == 1 or copies == 1


def test_a_format_of_the_other_attention_is_refused() -> None:
    latent, grouped = shape_of("kimi-k2.6-int4"), shape_of("glm-4.7-fp8")
    with refusal(UsageError, "int4 is no KV format of MLA", "fp8_ds_mla"):
        token_bytes(latent, CacheFormat.INT4)
    with refusal(UsageError, "fp8_ds_mla is no KV format of grouped-query attention", "int8"):
        token_bytes(grouped, CacheFormat.FP8_DS_MLA)
    assert {*LATENT_FORMATS, *GROUPED_FORMATS} == set(CacheFormat)


def test_decode_runs_fp8_by_default() -> None:
    forms = {name: default_kv_format(shape_of(name)) for name in ("glm-5.2-fp8", "kimi-k2.6-int4", "glm-4.7-fp8")}
    assert [*forms.values()] == [CacheFormat.FP8_DS_MLA, CacheFormat.FP8_E4M3, CacheFormat.FP8_E4M3]


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_a_shape(name: str) -> None:
    shape = model_shape(parse_config(json.dumps(tiny_config(name)).encode()))
    is_grouped = isinstance(shape.attention, GroupedAttention)
    assert (is_grouped, shape.is_sparse) == (name == "glm-4.7-fp8", name.startswith("glm-5"))
    assert (shape.num_layers, shape.experts_per_token, shape.max_tokens) == (3, 2, 4096)


def test_glm_5_2_as_a_planner_sees_it() -> None:
    shape = shape_of("glm-5.2-fp8")
    assert shape.attention == LatentAttention(64, 512, 64, 192, 256, 32, 128, 2048, 21)
    assert replace(shape, num_mtp_layers=0).cached_layers(is_mtp_on=True) == 78
    assert shape_of("glm-5.2-fp8", index_topk=None).attention == shape.attention


@pytest.mark.parametrize("field", ["num_experts_per_tok", "max_position_embeddings", "index_topk"])
@pytest.mark.parametrize("value", [0, -1, "8", 2.5, True])
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with refusal(ConfigError, "config.json", field):
        shape_of("glm-5.2-fp8", **{field: value})
