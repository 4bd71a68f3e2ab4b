"""One stage on one GPU: weights loaded, memory divided, tokens that fit; and the same on more or larger GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from memopt.compressor.alignment import COMMON_DEGREES
from memopt.compressor.capacity.gpus import GPUS, Gpu
from memopt.compressor.capacity.kv_bytes import CacheFormat, TokenBytes, token_bytes
from memopt.compressor.capacity.memory_plan import MemoryPlan, Reserves, default_reserves, tokens_in
from memopt.compressor.capacity.model_shape import ModelShape
from memopt.compressor.capacity.rank_weights import RankWeights, rank_weights
from memopt.compressor.capacity.request import CapacityRequest
from memopt.compressor.capacity.stages import Stage, require_stage_divides
from memopt.errors import AlignmentError
from memopt.manifests.rank_folders import RankLayout


@dataclass(frozen=True)
class StageRank:
    """A stage of a model as one rank holds it."""

    stage: Stage
    shape: ModelShape
    layout: RankLayout
    weights: RankWeights
    request: CapacityRequest

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights on the GPU, MTP layers and copies as chosen; or what the request says."""
        if self.request.weights_per_gpu_bytes is not None:
            return self.request.weights_per_gpu_bytes
        is_mtp_on = self.request.is_mtp_on
        copies = self.weights.absorbed_size_bytes(is_mtp_on=is_mtp_on) if self.request.has_absorbed_copies else 0
        return self.weights.size_bytes(is_mtp_on=is_mtp_on) + copies

    def token(self, form: CacheFormat) -> TokenBytes:
        """What a token takes with a cache in `form`."""
        return token_bytes(
            self.shape,
            form,
            num_ranks=self.layout.num_ranks,
            is_mtp_on=self.request.is_mtp_on,
            indexer_cache=self.request.indexer_cache,
        )

    def memory(self, gpu: Gpu, form: CacheFormat) -> MemoryPlan:
        """How `gpu` is divided with a cache in `form`."""
        defaults = default_reserves(self.shape, form, gpu, self.layout.num_ranks, self.request.context)
        given = {field.name: getattr(self.request.reserves, field.name) for field in fields(Reserves)}
        reserves = replace(defaults, **{name: value for name, value in given.items() if value is not None})
        return MemoryPlan(gpu, self.request.memory_fraction, reserves, self.loaded_bytes)

    def pool_bytes(self, form: CacheFormat) -> int | None:
        """Bytes for a cache in `form`: as given, or what the GPU leaves; None if nothing tells."""
        if self.request.kv_pool_bytes is not None:
            return self.request.kv_pool_bytes
        return None if self.request.gpu is None else self.memory(self.request.gpu, form).pool_bytes


@dataclass(frozen=True)
class RankPlan:
    """One stage on one GPU of `num_ranks`. `are_weights_given`: their bytes were, so they hold for no other degree."""

    num_ranks: int
    memory: MemoryPlan
    token: TokenBytes
    are_weights_given: bool

    @property
    def tokens(self) -> int:
        """Tokens of KV cache that fit, in whole pages."""
        return tokens_in(self.memory.pool_bytes, self.token)


def stage_rank(stage: Stage, shape: ModelShape, layout: RankLayout, request: CapacityRequest) -> StageRank:
    """`stage` cut over the ranks of `layout`; AlignmentError if a tensor cannot be cut so."""
    require_stage_divides(stage, layout)
    return StageRank(stage, shape, layout, rank_weights(stage.tensors, shape, layout), request)


def rank_plan(rank: StageRank, gpu: Gpu) -> RankPlan:
    """`rank` on `gpu`, with the stage's own KV format."""
    form = rank.stage.kv_format
    are_given = rank.request.weights_per_gpu_bytes is not None
    return RankPlan(rank.layout.num_ranks, rank.memory(gpu, form), rank.token(form), are_given)


def other_rank_plans(rank: StageRank, gpu: Gpu) -> Iterator[RankPlan]:
    """The same stage on more of these GPUs, for every common degree that divides it, then on larger ones."""
    # Weights that are given say nothing of other degrees.
    degrees = COMMON_DEGREES if rank.request.weights_per_gpu_bytes is None else ()
    for degree in degrees:
        if degree > rank.layout.num_ranks:
            try:
                more = stage_rank(rank.stage, rank.shape, replace(rank.layout, num_ranks=degree), rank.request)
            except AlignmentError:
                continue
            yield rank_plan(more, gpu)
    for larger in sorted(GPUS.values(), key=lambda known: known.memory_bytes):
        if larger.memory_bytes > gpu.memory_bytes:
            yield rank_plan(rank, larger)
