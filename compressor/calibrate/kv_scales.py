"""A layer's scales of an FP8 KV cache, from what all threads and ranks saw it store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.errors import ContentError
from memopt.kernels.layout import E4M3_MAX, MAGNITUDE_BINS
from memopt.runtime.kv.kv_range import WHOLE_RANGE, HeadMagnitudes, KvRange
from memopt.runtime.kv.kv_scales import UNIT_SCALE, kv_scale_name
from memopt.runtime.model.model_config import GqaConfig


def layer_kv_scales(run: CalibrationRun, number: int, ranges: Sequence[KvRange]) -> dict[str, float]:
    """float32 numbers by name: value = code * scale. One for all KV heads, as vLLM's strategy "tensor" has it.

    The largest head's bound is brought to 448. MLA stores one vector for K and V: both have its scale. All ranks call
    it together. ContentError for values that are not finite.
    """
    attention = run.config.attention
    num_heads = attention.num_kv_heads if isinstance(attention, GqaConfig) else 1
    layers = [kv_range.of_layer(number) for kv_range in ranges]
    key = _scale(run, number, [layer.key for layer in layers], num_heads)
    is_gqa = isinstance(attention, GqaConfig)
    value = _scale(run, number, [layer.value for layer in layers], num_heads) if is_gqa else key
    prefix = run.config.name_prefix
    return {kv_scale_name(number, "k", prefix): key, kv_scale_name(number, "v", prefix): value}


def _scale(run: CalibrationRun, number: int, seen: Sequence[HeadMagnitudes], num_heads: int) -> float:
    largest = torch.zeros(num_heads)
    counts = torch.zeros((num_heads, MAGNITUDE_BINS), dtype=torch.int64)
    for part in seen:
        if part.largest is not None and part.counts is not None:
            largest = torch.maximum(largest, part.largest.cpu())
            counts += part.counts.cpu()
    all_ranks = HeadMagnitudes(_maximum(run, largest), run.communicator.sum(counts))
    percentile = run.kv_cache.percentile if run.kv_cache is not None else None
    bound = all_ranks.bound(WHOLE_RANGE if percentile is None else percentile).amax()
    if not bool(torch.isfinite(all_ranks.largest).all()):  # type: ignore[arg-type]
        raise ContentError(
            f"layer {number} stores keys or values that are not finite", remedy="check the source weights"
        )
    return float(bound / E4M3_MAX) if bool(bound > 0) else UNIT_SCALE


def _maximum(run: CalibrationRun, largest: Tensor) -> Tensor:
    """The maximum over ranks of float32 numbers that are not negative: their bits are in the same order."""
    return run.communicator.maximum(largest.view(torch.int32)).view(torch.float32)
