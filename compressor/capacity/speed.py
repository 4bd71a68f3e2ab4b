"""The speed model's answer for one stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt.compressor.capacity.gpus import Gpu
from memopt.compressor.capacity.kv_bytes import CacheFormat
from memopt.compressor.capacity.kv_crossover import KvCrossover, kv_crossover
from memopt.compressor.capacity.memory_plan import engine_sizes
from memopt.compressor.capacity.rank_plan import StageRank
from memopt.compressor.capacity.throughput import RankModel, StepBound, Workload, decode_step, prefill
from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.errors import ConfigError


@dataclass(frozen=True)
class SpeedBound:
    """The bound for `load`: a decode step of all requests, or the prefill of one.

    `tokens_per_second`: of all ranks together, at most (with MTP, if every draft is accepted); None without the GPU's
    rates. `crossover`: of a decode stage
    whose cache is not BF16.
    """

    load: Workload
    step: StepBound
    tokens_per_second: float | None
    crossover: KvCrossover | None


def _rank_model(rank: StageRank) -> RankModel:
    shape, request = rank.shape, rank.request
    if shape.experts_per_token is None:
        raise ConfigError("num_experts_per_tok is missing", file=CONFIG_NAME, remedy="complete config.json")
    token = rank.token(rank.stage.kv_format)
    return RankModel(
        shape, shape.experts_per_token, rank.weights, token, request.is_mtp_on, request.has_absorbed_copies
    )


def _crossover(rank: StageRank, model: RankModel, gpu: Gpu, requests: int) -> KvCrossover | None:
    form = rank.stage.kv_format
    if form is CacheFormat.BF16:
        return None
    return kv_crossover(
        replace(model, token=rank.token(CacheFormat.BF16)),
        model,
        gpu,
        requests,
        bf16_pool_bytes=rank.pool_bytes(CacheFormat.BF16),
        pool_bytes=rank.pool_bytes(form),
        share=rank.request.share,
        overhead_seconds=rank.request.overhead_seconds,
    )


def speed_bound(rank: StageRank, gpu: Gpu, load: Workload) -> SpeedBound:
    """Which resource binds `rank` on `gpu` at `load` (prefill: one request of its length), and how fast it can be.

    ConfigError if config.json does not say how many experts a token takes.
    """
    model = _rank_model(rank)
    if rank.stage.name == "prefill":
        load = replace(load, requests=1)
        bound = prefill(model, gpu, load.length, engine_sizes(gpu.memory_bytes, rank.layout.num_ranks).chunk_tokens)
        tokens, crossover = load.length, None
    else:
        bound = decode_step(model, gpu, load)
        tokens = load.requests * model.tokens_per_request
        crossover = _crossover(rank, model, gpu, load.requests)
    return SpeedBound(load, bound, tokens / bound.seconds if bound.seconds else None, crossover)
