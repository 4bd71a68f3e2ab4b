"""A capacity plan for machines (docs/plan.schema.json)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memopt.compressor.capacity.assumptions import assumptions
from memopt.compressor.capacity.capacity_plan import CapacityPlan, StageCapacity
from memopt.compressor.capacity.kv_bytes import ELEMENT_BITS
from memopt.compressor.capacity.kv_formula import DenseCache
from memopt.compressor.capacity.rank_weights import RankWeights
from memopt.compressor.capacity.speed import SpeedBound


def weights_fields(weights: RankWeights) -> dict[str, Any]:
    """Bytes of weights a GPU: true ones and checkpoint / ranks, without and with MTP layers."""
    return {
        "num_ranks": weights.num_ranks,
        **{
            name: {
                "checkpoint_size_bytes": weights.checkpoint_size_bytes(is_mtp_on=is_on),
                "checkpoint_share_bytes": weights.checkpoint_size_bytes(is_mtp_on=is_on) / weights.num_ranks,
                "rank_size_bytes": weights.size_bytes(is_mtp_on=is_on),
                "absorbed_copies_bytes": weights.absorbed_size_bytes(is_mtp_on=is_on),
            }
            for name, is_on in (("without_mtp", False), ("with_mtp", True))
        },
    }


def _speed_fields(speed: SpeedBound) -> dict[str, Any]:
    step = speed.step
    return {
        "requests": speed.load.requests,
        "length": speed.load.length,
        "expert_bytes": step.expert_bytes,
        "other_weight_bytes": step.other_weight_bytes,
        "kv_bytes": step.kv_bytes,
        "flops": step.flops,
        "memory_seconds": step.memory_seconds,
        "compute_seconds": step.compute_seconds,
        "binds": step.binds,
        "tokens_per_second": speed.tokens_per_second,
        "kv_crossover": None if speed.crossover is None else asdict(speed.crossover),
    }


def _stage_fields(stage: StageCapacity) -> dict[str, Any]:
    token, memory = stage.token, stage.memory
    return {
        "stage": stage.stage.name,
        "recipe": stage.stage.recipe,
        "weight_formats": list(stage.stage.weight_formats),
        "weights": weights_fields(stage.weights),
        "loaded_bytes": stage.weights_bytes,
        "kv_format": str(token.format),
        "kv_bytes_per_token": token.size_bytes,
        "kv_key_bytes": token.key_bytes,
        "kv_layers": token.num_layers,
        "indexer_bytes": token.indexer_bytes,
        "indexer_layers": token.num_indexer_layers,
        "kv_heads_per_rank": token.heads_per_rank,
        "kv_head_copies": token.head_copies,
        "static_bytes": None if memory is None else memory.static_bytes,
        "reserves": None if memory is None else asdict(memory.reserves),
        "kv_pool_bytes": stage.pool_bytes,
        "tokens": stage.tokens,
        "requests": stage.requests,
        "speed": None if stage.speed is None else _speed_fields(stage.speed),
    }


def capacity_fields(plan: CapacityPlan) -> dict[str, Any]:
    """The plan's figures, sizes in bytes, and its assumptions in words."""
    request = plan.request
    return {
        "layout": plan.layout.folder,
        "gpu": None if request.gpu is None else asdict(request.gpu),
        "memory_fraction": request.memory_fraction,
        "context": request.context,
        "requests": request.requests,
        "is_mtp_on": request.is_mtp_on,
        "has_absorbed_copies": request.has_absorbed_copies,
        "indexer_cache": request.indexer_cache,
        "stages": [_stage_fields(stage) for stage in plan.stages],
        "assumptions": list(assumptions(plan)),
    }


def dense_cache_fields(cache: DenseCache) -> dict[str, Any]:
    """The plain formula's answer in every format whose elements are alike."""
    sizes = {str(form): cache.size_bytes(form) for form in ELEMENT_BITS}
    return {"kv_formula": asdict(cache) | {"size_bytes": sizes}}
