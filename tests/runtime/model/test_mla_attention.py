"""MLA blocks against transformers' attention modules: prompt and decode rows, DSA, yarn, every KV format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_steps import PagedSequences, Part
from torch import Tensor
from transformers_attention import (
    AttentionPair,
    RoundedCache,
    deepseek_pair,
    glm_dsa_pair,
    hidden_states,
)

from memopt.errors import UsageError
from memopt.kernels.kv_cache.kv_format import new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_load_reference import read_indexer_keys, read_mla_tokens
from memopt.kernels.kv_cache.kv_store_reference import indexer_store, mla_store
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, FP32, KvFormat
from memopt.kernels.layout import INDEXER_KEY_SIZE, MLA_LATENT_SIZE, MLA_ROPE_SIZE, PAGE_TOKENS
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.layer_kv import GqaLayerKv, LayerKv, MlaLayerKv
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.selection import Selection
from memopt.runtime.weights.load_options import LoadOptions

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
PAIRS = {
    "dsa": lambda: glm_dsa_pair(16),
    "dsa_short": lambda: glm_dsa_pair(1000),
    "dense": deepseek_pair,
    "yarn": lambda: deepseek_pair(rope_parameters=YARN, max_position_embeddings=256),
    "one_q_proj": lambda: deepseek_pair(q_lora_rank=None),
    "wide": lambda: deepseek_pair(kv_lora_rank=512, qk_rope_head_dim=64),
}
TOKENS, PROMPT = 150, 110
# A prompt in two chunks, then single tokens and a run of drafts, as an engine would.
STEPS = [
    [Part(0, 0, 70, True)],
    [Part(0, 70, PROMPT, True)],
    *([Part(0, position, position + 1, False)] for position in range(PROMPT, TOKENS - 10)),
    [Part(0, TOKENS - 10, TOKENS, False)],
]


def layer_kv(pair: AttentionPair, kv_format: KvFormat, num_pages: int) -> LayerKv:
    return new_kv_pools(pair.config, kv_format, num_pages, num_layers=2, num_kv_heads_here=1).layers[pair.layer]


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted element."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def run(pair: AttentionPair, kv_format: KvFormat, hidden: Tensor, options: LoadOptions | None = None) -> Tensor:
    sequences = PagedSequences([hidden])
    kv = layer_kv(pair, kv_format, sequences.num_pages)
    rotary = RotaryTable(pair.config.rope)
    return sequences.run(pair.block(options), kv, rotary, STEPS)[0][0]


@pytest.mark.parametrize("name", PAIRS)
def test_equals_transformers(name: str) -> None:
    pair, hidden = PAIRS[name](), hidden_states([TOKENS])[0]
    wanted, _ = pair.outputs(hidden)
    assert error(run(pair, FP32, hidden), wanted) < 5e-6


def test_selects_what_transformers_selects() -> None:
    pair, hidden = glm_dsa_pair(16), hidden_states([TOKENS])[0]
    _, wanted = pair.outputs(hidden)
    sequences = PagedSequences([hidden])
    kv, rotary = layer_kv(pair, FP32, sequences.num_pages), RotaryTable(pair.config.rope)
    steps = [[Part(0, 0, PROMPT, True)], [Part(0, PROMPT, TOKENS, False)]]
    for parts in steps:
        _, chosen = sequences.run(pair.block(), kv, rotary, [parts])
        assert chosen is not None
        assert wanted is not None
        for row, position in enumerate(range(parts[0].first, parts[0].after)):
            # Before there are 16 tokens, transformers fills up with tokens that its mask hides.
            expected = sorted(wanted[position].tolist()) if position >= 15 else list(range(position + 1))
            assert [p for p in chosen.positions[row].tolist() if p >= 0] == expected


def test_a_shared_layer_reads_the_selection_of_the_last_full_one() -> None:
    pair, hidden = glm_dsa_pair(4, layer=1), hidden_states([12])[0]
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(max(4, p + 1), generator=generator)[:4].sort().values for p in range(12)])
    wanted, _ = pair.outputs(hidden, previous=chosen)
    sequences = PagedSequences([hidden])
    kv, rotary = layer_kv(pair, FP32, sequences.num_pages), RotaryTable(pair.config.rope)
    positions = chosen.masked_fill(chosen > torch.arange(12)[:, None], -1).to(torch.int32)
    prompt, selection = sequences.run(
        pair.block(), kv, rotary, [[Part(0, 0, 12, True)]], selection=Selection(positions)
    )
    assert error(prompt[0], wanted) < 5e-6
    assert selection is not None
    assert torch.equal(selection.positions, positions)
    decoded, _ = sequences.run(pair.block(), kv, rotary, [[Part(0, 0, 12, False)]], selection=Selection(positions))
    assert error(decoded[0], wanted) < 5e-6


def rounded_cache(kv_format: KvFormat) -> RoundedCache:
    """A cache of transformers that rounds as pages of `kv_format` do, by the stores' reference."""

    def rounded(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        count = latent.shape[2]
        slots, pages = torch.arange(count), -(-count // PAGE_TOKENS)
        pool, scale = new_mla_pool(kv_format, pages), torch.tensor(1.0) if kv_format.has_layer_scale else None
        parts = [torch.zeros(count, size) for size in (MLA_LATENT_SIZE, MLA_ROPE_SIZE)]
        for part, values in zip(parts, (latent, rope), strict=True):
            part[:, : values.shape[3]] = values[0, 0]
        mla_store(*parts, pool, slots, kv_format, scale)
        tokens = read_mla_tokens(pool, slots, kv_format, scale)
        kept_rope = tokens[:, MLA_LATENT_SIZE : MLA_LATENT_SIZE + rope.shape[3]]
        return tokens[None, None, :, : latent.shape[3]], kept_rope[None, None]

    def rounded_indexer(key: Tensor) -> Tensor:
        slots = torch.arange(key.shape[1])
        pool = new_indexer_pool(-(-key.shape[1] // PAGE_TOKENS), kv_format=kv_format)
        indexer_store(torch.nn.functional.pad(key[0], (0, INDEXER_KEY_SIZE - key.shape[2])), pool, slots)
        return read_indexer_keys(pool, slots)[None, :, : key.shape[2]]

    return RoundedCache(rounded, rounded_indexer)


@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3, FP8_DS_MLA], ids=lambda item: item.name)
@pytest.mark.parametrize("name", ["dsa", "dense"])
def test_equals_transformers_over_rounded_keys(name: str, kv_format: KvFormat) -> None:
    pair, hidden = PAIRS[name](), hidden_states([TOKENS])[0]
    wanted, _ = pair.outputs(hidden, cache=rounded_cache(kv_format))
    found = run(pair, kv_format, hidden)
    assert error(found, wanted) < 5e-6
    # The comparison above would notice a cache that does not round.
    assert error(run(pair, FP32, hidden), wanted) > 1e-3


def test_bfloat16_is_near() -> None:
    pair, hidden = deepseek_pair(), hidden_states([TOKENS], dtype=torch.bfloat16)[0]
    found = run(pair, BF16, hidden, LoadOptions("bfloat16"))
    pair.module.to(torch.bfloat16).to(torch.float32)
    wanted, _ = pair.outputs(hidden.float())
    assert found.dtype == torch.bfloat16
    assert error(found, wanted) < 0.03


@pytest.mark.parametrize("pair", [deepseek_pair(), glm_dsa_pair()], ids=["dense", "dsa"])
def test_pools_of_another_kind_are_refused(pair: AttentionPair) -> None:
    sequences, rotary = PagedSequences(hidden_states([4])), RotaryTable(pair.config.rope)
    arguments: tuple[Any, ...] = (rotary, [[Part(0, 0, 4, True)]])
    pool = new_mla_pool(BF16, 1)
    with pytest.raises(UsageError, match="pools of K and V heads"):
        sequences.run(pair.block(), GqaLayerKv(pool, pool, None, None, BF16), *arguments)
    if pair.config.has_indexer(0):
        with pytest.raises(UsageError, match="no indexer keys"):
            sequences.run(pair.block(), MlaLayerKv(new_mla_pool(FP32, 2), None, None, FP32), *arguments)
