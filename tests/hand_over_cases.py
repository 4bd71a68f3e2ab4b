"""Pools, hand-overs and a model without weights for the tests of the two stages."""

from __future__ import annotations

import torch
from page_reading_model import EOS, VOCAB_SIZE, hash_of, logits_of
from torch import Tensor

from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_cache.kv_load import read_mla_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_cache.kv_store import mla_store
from memopt.kernels.kv_formats import BF16, KvFormat
from memopt.kernels.layout import MLA_LATENT_SIZE, MLA_ROPE_SIZE
from memopt.runtime.engine.admission import EngineLimits, pages_for
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.layer_kv import GqaLayerKv, KvPools, LayerKv, MlaLayerKv
from memopt.runtime.model.step_rows import StepRows
from memopt.runtime.stages.hand_over import HandOver
from memopt.runtime.stages.kv_geometry import geometry_of
from memopt.runtime.stages.model_identity import ModelIdentity

MODEL = ModelIdentity("ab" * 32, "cd" * 32)
# Two heads of a size that the kernels know.
_HEADS, _HEAD_DIM = 2, 64
_DIGIT = 16


def mla_pools(num_pages: int, kv_format: KvFormat = BF16) -> KvPools:
    """Two MLA layers, the first with an indexer."""
    scale = torch.tensor(0.5) if kv_format.has_layer_scale else None
    layers = tuple(
        MlaLayerKv(
            new_mla_pool(kv_format, num_pages), scale, new_indexer_pool(num_pages) if layer == 0 else None, kv_format
        )
        for layer in range(2)
    )
    return KvPools(kv_format, num_pages, layers)


def gqa_pools(num_pages: int, kv_format: KvFormat = BF16) -> KvPools:
    """Two GQA layers."""
    scale = torch.tensor([0.5, 2.0]) if kv_format.has_layer_scale else None
    layers = tuple(
        GqaLayerKv(
            new_gqa_pool(kv_format, num_pages, _HEADS, _HEAD_DIM),
            new_gqa_pool(kv_format, num_pages, _HEADS, _HEAD_DIM),
            scale,
            scale,
            kv_format,
        )
        for _ in range(2)
    )
    return KvPools(kv_format, num_pages, layers)


def tensors_of(layer: LayerKv) -> list[Tensor]:
    """The pools of a layer."""
    pools = (layer.pool, layer.indexer_pool) if isinstance(layer, MlaLayerKv) else (layer.key_pool, layer.value_pool)
    return [pool for pool in pools if pool is not None]


def fill_pools(pools: KvPools, seed: int = 0) -> None:
    """Random finite values in every page."""
    generator = torch.Generator().manual_seed(seed)
    for layer in pools.layers:
        for pool in tensors_of(layer):
            if pool.dtype == torch.uint8:
                # The sign bits alone, and small codes: no NaN among them, nor among the scales.
                pool.copy_(torch.randint(0, 0x40, pool.shape, dtype=torch.uint8, generator=generator))
            else:
                pool.copy_(torch.randn(pool.shape, generator=generator))


def hand_over_of(
    pools: KvPools, pages: list[int], num_tokens: int, *, number: int = 1, tags: list[int] | None = None
) -> HandOver:
    """A hand-over of `num_tokens` tokens in `pages`."""
    assert len(pages) == pages_for(num_tokens)
    return HandOver(
        number=number,
        request_id=f"request {number}",
        tenant="",
        token_ids=tuple(range(num_tokens)),
        first_token=7,
        params=SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, seed=3, stop=("ende", "fin")),
        model=MODEL,
        geometry=geometry_of(pools),
        pages=tuple(HeldPage(page, tag) for page, tag in zip(pages, tags or [0] * len(pages), strict=True)),
    )


class PooledModel:
    """A PageReadingModel that keeps token ids in pools of a real format: as two small numbers in each layer's latents.

    They survive every format's rounding, so that a request's tokens show whether its pages came through.
    """

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        """float64 [R, 1]: the hash of the tokens that each row reads from the last layer; all layers must agree."""
        latent = torch.zeros(rows.num_rows, MLA_LATENT_SIZE)
        latent[:, 0], latent[:, 1] = rows.token_ids // _DIGIT, rows.token_ids % _DIGIT
        hashes: list[list[int]] = []
        for layer in pools.layers:
            assert isinstance(layer, MlaLayerKv)
            rope = torch.zeros(rows.num_rows, MLA_ROPE_SIZE)
            mla_store(latent, rope, layer.pool, rows.slots, layer.kv_format, layer.scale)
            # Rows of one request have one block table.
            longest: dict[tuple[int, ...], int] = {}
            tables = [tuple(table) for table in rows.block_table.tolist()]
            counts = rows.num_tokens.tolist()
            for table, count in zip(tables, counts, strict=True):
                longest[table] = max(count, longest.get(table, 0))
            tokens = {table: read_tokens(layer, torch.tensor(table), count) for table, count in longest.items()}
            hashes.append([hash_of(tokens[table][:count]) for table, count in zip(tables, counts, strict=True)])
        assert all(found == hashes[0] for found in hashes)
        return torch.tensor(hashes[0], dtype=torch.float64)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab]: pseudo-random logits that the hash decides."""
        return torch.stack([logits_of(int(value)) for value in hidden[:, 0].tolist()])


def read_tokens(layer: MlaLayerKv, table: Tensor, num_tokens: int) -> list[int]:
    """The token ids that a PooledModel finds in the pages of a block table."""
    slots = slots_of_pages(table[: pages_for(num_tokens)], num_tokens)
    values = read_mla_tokens(layer.pool, slots, layer.kv_format, layer.scale)[:, :2]
    return (values[:, 0].round() * _DIGIT + values[:, 1].round()).to(torch.int64).tolist()


def pooled_core(
    pools: KvPools, tracker: PageTracker | None = None, *, prefix_namespace: bytes | None = None, **limits: int
) -> EngineCore:
    """An engine core around a PooledModel. `limits`: of EngineLimits."""
    chosen = {"max_requests": 4, "max_step_tokens": 100, "max_tokens": 512} | limits
    return EngineCore(
        PooledModel(),
        pools,
        EngineLimits(**chosen),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        tracker=tracker,
        prefix_namespace=prefix_namespace,
    )
