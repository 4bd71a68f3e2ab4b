"""A layer's KV scales from what several ranks, with several threads each, saw: those of one that saw it all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRank, run_ranks
from tiny_checkpoints import tiny_config

from memopt.compressor.calibrate.kv_scales import layer_kv_scales
from memopt.compressor.kv_cache_choice import KvCacheChoice
from memopt.errors import ContentError
from memopt.runtime.kv.kv_range import KvRange
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import GqaConfig

LAYER, NUM_ROWS = 1, 40


@pytest.mark.parametrize("percentile", [None, 90.0])
@pytest.mark.parametrize("name", ["glm-4.7-fp8", "glm-5.1-fp8"])
def test_ranks_and_threads_are_joined(name: str, percentile: float | None) -> None:
    config = parse_model_config(tiny_config(name))
    is_gqa = isinstance(config.attention, GqaConfig)
    num_heads = config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1
    generator = torch.Generator().manual_seed(0)
    # Six parts, two of each rank; the fifth saw nothing: a rank may have fewer batches than threads.
    sizes = (1.0, 3.0, 0.5, 2.0, 0.0, 4.0)
    parts = [torch.randn(2, NUM_ROWS if size else 0, num_heads, 16, generator=generator) * size for size in sizes]
    slots = torch.arange(NUM_ROWS)
    whole = KvRange()
    ranges = [KvRange() for _ in parts]
    for part, kv_range in zip(parts, ranges, strict=True):
        for seen in (whole, kv_range):
            if part.shape[1]:
                seen.of_layer(LAYER).observe(part[0], part[1] if is_gqa else None, slots)

    def work(rank: ThreadRank) -> dict[str, float]:
        choice = KvCacheChoice(format="fp8_e4m3", percentile=percentile)
        run: Any = SimpleNamespace(config=config, communicator=rank, kv_cache=choice)
        return layer_kv_scales(run, LAYER, ranges[2 * rank.rank : 2 * rank.rank + 2])

    found = run_ranks(3, work)
    expected = whole.scales(percentile or 100.0).layers[LAYER]
    prefix = f"model.layers.{LAYER}.self_attn."
    k = float(expected.k.max())
    v = k if expected.v is None else float(expected.v.max())
    assert found == [{f"{prefix}k_scale": k, f"{prefix}v_scale": v}] * 3
    assert (k == v) == (not is_gqa)


def test_what_is_not_finite_on_one_rank_stops_all() -> None:
    config = parse_model_config(tiny_config("glm-5.1-fp8"))
    ranges = [KvRange(), KvRange()]
    for kv_range, value in zip(ranges, (1.0, float("nan")), strict=True):
        kv_range.of_layer(LAYER).observe(torch.full((1, 1, 4), value), None, torch.zeros(1, dtype=torch.int64))

    def work(rank: ThreadRank) -> str:
        run: Any = SimpleNamespace(config=config, communicator=rank, kv_cache=KvCacheChoice(format="fp8_e4m3"))
        with pytest.raises(ContentError, match="layer 1 stores keys or values that are not finite") as refused:
            layer_kv_scales(run, LAYER, ranges[rank.rank : rank.rank + 1])
        return refused.value.code

    assert len(run_ranks(2, work)) == 2
