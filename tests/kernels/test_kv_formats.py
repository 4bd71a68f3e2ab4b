"""The figures of the KV formats: bytes that vLLM, FlashMLA and the capacity planner agree on."""

from __future__ import annotations

import pytest

from memopt.errors import UnsupportedError, UsageError
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, FP32, KV_FORMATS, kv_format, mla_token_bytes


def test_bytes_of_an_mla_token() -> None:
    assert {name: item.mla_token_bytes for name, item in KV_FORMATS.items()} == {
        "bf16": 1152,
        "fp8_e4m3": 576,
        "fp8_ds_mla": 656,
    }
    assert mla_token_bytes(FP8_DS_MLA, has_indexer=True) == 656 + 132
    assert mla_token_bytes(BF16, has_indexer=False) == 1152


def test_bytes_of_a_gqa_token() -> None:
    # GLM-4.6: 8 KV heads of 128, 92 layers, 188,416 bytes a token.
    assert FP8_E4M3.gqa_token_bytes(8, 128) * 92 == 188_416
    assert BF16.gqa_token_bytes(8, 128) == 2 * FP8_E4M3.gqa_token_bytes(8, 128)


def test_page_shapes() -> None:
    assert BF16.mla_page_shape == FP8_E4M3.mla_page_shape == (64, 576)
    assert FP8_DS_MLA.mla_page_shape == (64, 656)
    assert FP8_E4M3.gqa_page_shape(8, 128) == (64, 8, 128)


def test_names() -> None:
    assert all(kv_format(name) is item and item.name == name for name, item in KV_FORMATS.items())
    assert kv_format("fp32") is FP32
    assert "fp32" not in KV_FORMATS
    with pytest.raises(UsageError, match="'fp8' is unknown"):
        kv_format("fp8")


def test_heads_do_not_fit_fp8_ds_mla() -> None:
    with pytest.raises(UnsupportedError, match="not 8 heads of 128"):
        FP8_DS_MLA.gqa_page_shape(8, 128)
    with pytest.raises(UnsupportedError, match="use bf16 or fp8_e4m3"):
        FP8_DS_MLA.gqa_token_bytes(8, 128)
