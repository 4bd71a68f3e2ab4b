"""The capacity plan: weights, KV cache, tokens, requests and bounds on speed, for each stage on one GPU of N."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.compressor.capacity.fit import (
    require_context,
    require_pool_fits,
    require_requests_fit,
    require_weights_fit,
)
from memopt.compressor.capacity.kv_bytes import TokenBytes
from memopt.compressor.capacity.memory_plan import MemoryPlan, requests_in, tokens_in, whole_pages
from memopt.compressor.capacity.model_shape import ModelShape, model_shape
from memopt.compressor.capacity.rank_plan import RankPlan, StageRank, other_rank_plans, rank_plan, stage_rank
from memopt.compressor.capacity.rank_weights import RankWeights, rank_weights
from memopt.compressor.capacity.request import CapacityRequest
from memopt.compressor.capacity.speed import SpeedBound, speed_bound
from memopt.compressor.capacity.stages import Stage, stages_of
from memopt.compressor.capacity.throughput import Workload
from memopt.compressor.plan import Plan
from memopt.compressor.ranks.layout import TENSOR_PARALLEL, rank_layout
from memopt.manifests.rank_folders import RankLayout


@dataclass(frozen=True)
class StageCapacity:
    """One stage. `weights_bytes`: what is loaded on a rank, as planned or as given. `memory` is None without a GPU.

    `tokens`: of KV cache that fit (None without a GPU or a pool); `requests`: of the asked length that fit.
    """

    stage: Stage
    weights: RankWeights
    weights_bytes: int
    token: TokenBytes
    memory: MemoryPlan | None
    pool_bytes: int | None
    tokens: int | None
    requests: int | None
    speed: SpeedBound | None


@dataclass(frozen=True)
class CapacityPlan:
    """All stages that were asked for, on `layout.num_ranks` GPUs each."""

    request: CapacityRequest
    shape: ModelShape
    layout: RankLayout
    stages: tuple[StageCapacity, ...]


def planned_layout(plan: Plan) -> RankLayout:
    """The ranks that a plan was checked for: those it was asked for, else the recipe's."""
    asked = rank_layout(plan.options.tensor_parallel, plan.options.expert_parallel)
    return asked or RankLayout(TENSOR_PARALLEL, plan.tensor_parallel)


def plan_weights(plan: Plan) -> RankWeights:
    """The weights of one rank at the plan's own degree; ConfigError or UnsupportedError for its config."""
    return rank_weights(plan.tensors, model_shape(plan.source.config), planned_layout(plan))


def _require_fit(rank: StageRank, token: TokenBytes, plan: RankPlan | None, tokens: int | None) -> None:
    """CapacityError unless the weights, and the requests that were asked for, fit."""
    request = rank.request
    # Prefill works on a request at a time: of many, one must fit.
    requests = 1 if rank.stage.name == "prefill" else request.requests or 1
    length = request.context or 1
    others: tuple[RankPlan, ...] = ()
    if plan is not None:
        if plan.tokens < requests * whole_pages(length):
            others = tuple(other_rank_plans(rank, plan.memory.gpu))
        require_weights_fit(rank.stage, plan, others)
    elif request.gpu is not None and request.kv_pool_bytes is not None:
        require_pool_fits(rank.stage, rank.loaded_bytes, request.kv_pool_bytes, request.gpu)
    if tokens is not None and request.context is not None:
        require_requests_fit(rank.stage, tokens, requests, length, token=token, plan=plan, others=others)


def _stage_capacity(rank: StageRank) -> StageCapacity:
    request, form = rank.request, rank.stage.kv_format
    token, pool_bytes = rank.token(form), rank.pool_bytes(form)
    plan = rank_plan(rank, request.gpu) if request.gpu is not None and request.kv_pool_bytes is None else None
    tokens = None if pool_bytes is None else tokens_in(pool_bytes, token)
    _require_fit(rank, token, plan, tokens)
    requests: int | None = None
    speed: SpeedBound | None = None
    if request.context is not None:
        requests = None if tokens is None else requests_in(tokens, request.context)
        if request.gpu is not None:
            speed = speed_bound(rank, request.gpu, Workload(request.requests or requests or 1, request.context))
    return StageCapacity(
        stage=rank.stage,
        weights=rank.weights,
        weights_bytes=rank.loaded_bytes,
        token=token,
        memory=None if plan is None else plan.memory,
        pool_bytes=pool_bytes,
        tokens=tokens,
        requests=requests,
        speed=speed,
    )


def plan_capacity(plan: Plan, request: CapacityRequest) -> CapacityPlan:
    """What fits and how fast it could be, from the plan alone: no weight is read.

    Raises CapacityError, saying what would fit, for a GPU too small for the weights, a length above the model's maximum
    or more requests than fit; UsageError for a KV format of another attention; AlignmentError and RecipeError for the
    prefill stage's recipe; ConfigError for a field that is missing.
    """
    shape, layout = model_shape(plan.source.config), planned_layout(plan)
    if request.context is not None:
        require_context(request.context, shape)
    ranks = [stage_rank(stage, shape, layout, request) for stage in stages_of(plan, shape, request)]
    return CapacityPlan(request, shape, layout, tuple(_stage_capacity(rank) for rank in ranks))
