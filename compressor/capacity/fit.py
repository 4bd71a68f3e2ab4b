"""Refusals of what does not fit, each with what would."""

from __future__ import annotations

from memopt.compressor.capacity.gpus import GIB, MIB, Gpu
from memopt.compressor.capacity.kv_bytes import TokenBytes
from memopt.compressor.capacity.memory_plan import requests_in, tokens_in, whole_pages
from memopt.compressor.capacity.model_shape import ModelShape
from memopt.compressor.capacity.rank_plan import RankPlan
from memopt.compressor.capacity.stages import Stage
from memopt.errors import CapacityError
from memopt.kernels.layout import PAGE_TOKENS


def gib(size_bytes: int) -> str:
    """A size in GiB with one digit, a small one in MiB."""
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:,.1f} MiB"


def require_context(context: int, shape: ModelShape) -> None:
    """CapacityError if a request of `context` tokens is longer than the model can be asked for."""
    if shape.max_tokens is not None and context > shape.max_tokens:
        raise CapacityError(
            f"a context of {context:,} tokens is above the model's maximum of {shape.max_tokens:,} "
            "(max_position_embeddings)",
            remedy=f"use at most {shape.max_tokens:,}",
        )


def what_fits(plan: RankPlan, others: tuple[RankPlan, ...], tokens: int) -> str:
    """Which of `others`, more ranks of the same GPU or as many of another, hold `tokens` tokens beside the weights."""
    fitting = [other for other in others if other.tokens >= tokens]
    degrees = [str(other.num_ranks) for other in fitting if other.memory.gpu == plan.memory.gpu]
    gpus = [other.memory.gpu.name for other in fitting if other.memory.gpu != plan.memory.gpu]
    choices = []
    if degrees:
        choices.append(f"{', '.join(degrees)} ranks of this GPU")
    if gpus:
        choices.append(f"{plan.num_ranks} of {', '.join(gpus)}")
    if choices:
        return f"would fit: {'; or '.join(choices)}"
    # Weights that are given say nothing of other degrees, so none was tried.
    return f"no {'' if plan.are_weights_given else 'degree and no '}GPU that memopt knows would fit"


def require_weights_fit(stage: Stage, plan: RankPlan, others: tuple[RankPlan, ...]) -> None:
    """CapacityError unless a page of KV cache fits beside the weights."""
    if plan.tokens >= PAGE_TOKENS:
        return
    memory = plan.memory
    limit, remedy = f"a fraction of {memory.fraction:g} leaves", what_fits(plan, others, PAGE_TOKENS)
    if memory.is_limited_by_reserves:
        limit = f"{gib(memory.reserves.total_bytes)} of reserves leave"
        if tokens_in(memory.fraction_bytes - memory.weights_bytes, plan.token):
            remedy += "; or smaller reserves (--reserve-activations and its like)"
    left = gib(memory.static_bytes) if memory.static_bytes > 0 else "nothing"
    raise CapacityError(
        f"{stage.name}: {gib(memory.weights_bytes)} of weights a GPU; {memory.gpu.name} has "
        f"{gib(memory.gpu.memory_bytes)}, of which {limit} {left} for weights and KV cache",
        remedy=remedy,
    )


def require_pool_fits(stage: Stage, weights_bytes: int, pool_bytes: int, gpu: Gpu) -> None:
    """CapacityError unless a KV pool whose size was given has room beside the weights."""
    left = gpu.memory_bytes - weights_bytes
    if pool_bytes > left:
        raise CapacityError(
            f"{stage.name}: a KV pool of {gib(pool_bytes)} beside {gib(weights_bytes)} of weights is more than the "
            f"{gib(gpu.memory_bytes)} of {gpu.name}",
            remedy=f"give a pool below {gib(left)}" if left > 0 else "use more ranks or larger GPUs",
        )


def require_requests_fit(
    stage: Stage,
    tokens: int,
    requests: int,
    context: int,
    *,
    token: TokenBytes,
    plan: RankPlan | None,
    others: tuple[RankPlan, ...],
) -> None:
    """CapacityError unless `requests` of `context` tokens fit into `tokens`. `plan` None: the pool's size was given."""
    needed = requests * whole_pages(context)
    if needed <= tokens:
        return
    length = tokens // requests // PAGE_TOKENS * PAGE_TOKENS
    choices = []
    if fitting := requests_in(tokens, context):
        choices.append(f"{fitting:,} of that length")
    if length:
        choices.append(f"{requests:,} of {length:,} tokens")
    if plan is None:
        choices.append(f"a KV pool of {needed * token.size_bytes:,} bytes holds them")
    else:
        choices.append(what_fits(plan, others, needed))
    number, verb = (f"{requests:,} requests", "need") if requests > 1 else ("1 request", "needs")
    raise CapacityError(
        f"{stage.name}: {number} of {context:,} tokens {verb} {needed:,} tokens of {stage.kv_format} KV cache, "
        f"{tokens:,} fit",
        remedy="; ".join(choices),
    )
