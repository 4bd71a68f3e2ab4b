"""GQA blocks against transformers' GLM-4.x attention: biases, norms of heads, partial rope, formats, small heads."""

from __future__ import annotations

import pytest
import torch
from attention_steps import PagedSequences, Part
from torch import Tensor
from transformers_attention import AttentionPair, RoundedCache, glm4_pair, hidden_states

from memopt.errors import UsageError
from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_load_reference import read_gqa_tokens
from memopt.kernels.kv_cache.kv_store_reference import gqa_store
from memopt.kernels.kv_formats import BF16, FP8_E4M3, FP32, KvFormat
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.layer_kv import MlaLayerKv
from memopt.runtime.model.rope import RotaryTable

KV_HEADS, TOKENS, PROMPT = 2, 150, 110
STEPS = [
    [Part(0, 0, 70, True)],
    [Part(0, 70, PROMPT, True)],
    *([Part(0, position, position + 1, False)] for position in range(PROMPT, TOKENS - 10)),
    [Part(0, TOKENS - 10, TOKENS, False)],
]
PAIRS = {
    "glm4": glm4_pair,
    "no_norms": lambda: glm4_pair(use_qk_norm=False, attention_bias=False),
    "head_of_128": lambda: glm4_pair(head_dim=128),
    "head_of_32": lambda: glm4_pair(head_dim=32),
}


def run(pair: AttentionPair, kv_format: KvFormat, hidden: Tensor) -> Tensor:
    sequences = PagedSequences([hidden])
    pools = new_kv_pools(pair.config, kv_format, sequences.num_pages, num_layers=1, num_kv_heads_here=KV_HEADS)
    return sequences.run(pair.block(), pools.layers[0], RotaryTable(pair.config.rope), STEPS)[0][0]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", PAIRS)
def test_equals_transformers(name: str) -> None:
    pair, hidden = PAIRS[name](), hidden_states([TOKENS])[0]
    wanted, _ = pair.outputs(hidden)
    assert error(run(pair, FP32, hidden), wanted) < 5e-6


def rounded_cache(kv_format: KvFormat) -> RoundedCache:
    """A cache of transformers that rounds as pages of `kv_format` do, by the stores' reference."""

    def rounded(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        _, num_heads, count, head_dim = key.shape
        slots = torch.arange(count)
        pools = [new_gqa_pool(kv_format, -(-count // PAGE_TOKENS), num_heads, head_dim) for _ in range(2)]
        scale = torch.ones(num_heads) if kv_format.has_layer_scale else None
        gqa_store(*(part[0].transpose(0, 1) for part in (key, value)), *pools, slots, kv_format, scale, scale)
        key, value = (read_gqa_tokens(pool, slots, kv_format, scale).transpose(0, 1)[None] for pool in pools)
        return key, value

    return RoundedCache(rounded, lambda key: key)


@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3], ids=lambda item: item.name)
def test_equals_transformers_over_rounded_keys(kv_format: KvFormat) -> None:
    pair, hidden = glm4_pair(), hidden_states([TOKENS])[0]
    wanted, _ = pair.outputs(hidden, cache=rounded_cache(kv_format))
    assert error(run(pair, kv_format, hidden), wanted) < 5e-6
    # The comparison above would notice a cache that does not round.
    assert error(run(pair, FP32, hidden), wanted) > 1e-3


def test_pools_of_another_kind_are_refused() -> None:
    pair, sequences = glm4_pair(), PagedSequences(hidden_states([4]))
    kv = MlaLayerKv(new_mla_pool(BF16, 2), None, None, BF16)
    with pytest.raises(UsageError, match="pools of MLA latents"):
        sequences.run(pair.block(), kv, RotaryTable(pair.config.rope), [[Part(0, 0, 4, True)]])
