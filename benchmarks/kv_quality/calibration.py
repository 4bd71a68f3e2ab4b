"""Scales of an fp8_e4m3 cache from what a model stores while it reads some text."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.kernels.kv_formats import kv_format
from memopt.runtime.engine.admission import EngineLimits, pages_for
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.kv_range import KvRange
from memopt.runtime.kv.kv_scales import KvScales, kv_scales_of
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.model_config import GqaConfig


def calibrated_scales(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> KvScales:
    """Scales that bring the largest value of each layer (GQA: of each KV head) to 448, read back from their tensors.

    The prompts run through a bf16 cache. What a release would store, names and shapes, is what the engine gets.
    """
    config = decoder.config
    limits = EngineLimits(1, max(map(len, prompts)) + 1, max(map(len, prompts)) + 1)
    seen = KvRange()
    pools = new_kv_pools(
        config,
        kv_format("bf16"),
        pages_for(limits.max_tokens) + 1,
        num_layers=config.num_layers,
        num_kv_heads_here=config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1,
        kv_range=seen,
    )
    core = EngineCore(decoder, pools, limits, vocab_size=config.vocab_size, eos_token_ids=())
    for prompt in prompts:
        core.submit(prompt, SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
    return kv_scales_of(config, seen.scales().tensors(config.name_prefix))
