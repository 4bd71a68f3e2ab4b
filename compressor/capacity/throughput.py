"""Bounds on speed, as a model: decode reads bytes, prefill computes; whichever takes longer binds.

A bound, not a measurement: full bandwidth and full dense rate are assumed, and communication, launches, routing that is
not uniform and every inefficiency are left out. Formulas and their assumptions: docs/capacity.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt.compressor.capacity.gpus import Gpu
from memopt.compressor.capacity.kv_bytes import TokenBytes
from memopt.compressor.capacity.model_shape import LatentAttention, ModelShape
from memopt.compressor.capacity.rank_weights import RankWeights, RoleWeights
from memopt.compressor.families.roles import Role

# Not read by a step of the text model.
_UNREAD_ROLES = frozenset({Role.BUFFER, Role.VISION})
# Computed for the tokens that are sampled alone, not for every token of a prefill.
_HEAD_ROLES = frozenset({Role.LM_HEAD, Role.MTP_HEAD, Role.EMBEDDING})
# Multiply and add.
_FLOPS_PER_ELEMENT = 2
# An MTP layer drafts one token ahead in each step.
_DRAFTS_PER_STEP = 1


@dataclass(frozen=True)
class Workload:
    """`requests` together in a step, each with `length` tokens of context; both 1 or more."""

    requests: int
    length: int


@dataclass(frozen=True)
class RankModel:
    """What one rank reads and computes. `experts_per_token`: of the shape's `num_experts`."""

    shape: ModelShape
    experts_per_token: int
    weights: RankWeights
    token: TokenBytes
    is_mtp_on: bool
    has_absorbed_copies: bool

    @property
    def tokens_per_request(self) -> int:
        """Tokens that a decode step works on for each request, and yields at most: with MTP a draft as well."""
        return 1 + (_DRAFTS_PER_STEP if self.is_mtp_on and self.shape.num_mtp_layers else 0)


@dataclass(frozen=True)
class StepBound:
    """One step on one rank. `binds`: what takes longest: weights or KV cache (both memory bandwidth), or compute.

    Times and `binds` are None where a rate of the GPU is unknown.
    """

    expert_bytes: int
    other_weight_bytes: int
    kv_bytes: int
    flops: float
    memory_seconds: float | None
    compute_seconds: float | None

    @property
    def weight_bytes(self) -> int:
        return self.expert_bytes + self.other_weight_bytes

    @property
    def seconds(self) -> float | None:
        """The least time that the step takes, by the rates that are known."""
        known = [value for value in (self.memory_seconds, self.compute_seconds) if value is not None]
        return max(known, default=None)

    @property
    def binds(self) -> str | None:
        """One of "compute", "memory bandwidth: weights", "memory bandwidth: KV cache"; None if a rate is unknown."""
        if self.memory_seconds is None or self.compute_seconds is None:
            return None
        if self.compute_seconds > self.memory_seconds:
            return "compute"
        return f"memory bandwidth: {'KV cache' if self.kv_bytes > self.weight_bytes else 'weights'}"


def touched_share(experts_per_token: int, num_experts: int, tokens: int) -> float:
    """Expected share of a layer's experts that `tokens` tokens touch under uniform routing: 1 - (1 - k/E)**tokens."""
    return 1 - (1 - experts_per_token / num_experts) ** tokens


def read_keys(shape: ModelShape, length: int) -> int:
    """Tokens whose keys one query reads: all `length`, or the indexer's top k of them."""
    return min(length, shape.top_k) if shape.is_sparse else length


def _is_read(row: RoleWeights, has_head: bool) -> bool:
    if row.is_lookup:
        # A tied embedding is the output head as well.
        return row.role is Role.EMBEDDING and not has_head
    return row.role not in _UNREAD_ROLES


def _weight_bytes(model: RankModel, tokens: int, *, on_latents: bool) -> tuple[int, int]:
    """(routed experts, everything else) that a step of `tokens` tokens reads on a rank.

    Attention on latents reads the copies of W_UK and W_UV, where there are any, in place of kv_b_proj.
    """
    reads_copies = model.has_absorbed_copies and on_latents
    rows = model.weights.kept(is_mtp_on=model.is_mtp_on)
    has_head = any(row.role is Role.LM_HEAD for row in rows)
    share = touched_share(model.experts_per_token, model.shape.num_experts, tokens)
    experts = other = 0
    for row in rows:
        if row.role is Role.ROUTED_EXPERT:
            experts += round(share * row.rank_size_bytes)
        elif row.role is Role.KV_B and reads_copies:
            continue
        elif _is_read(row, has_head):
            other += row.rank_size_bytes
    if reads_copies:
        other += model.weights.absorbed_size_bytes(is_mtp_on=model.is_mtp_on)
    return experts, other


@dataclass(frozen=True)
class _Flops:
    """FLOPs by the rate that they run at: `fp8` falls back to the BF16 rate where the GPU has no other."""

    bf16: float
    fp8: float

    def __add__(self, other: _Flops) -> _Flops:
        return _Flops(self.bf16 + other.bf16, self.fp8 + other.fp8)

    def seconds(self, gpu: Gpu) -> float | None:
        if gpu.bf16_flops is None:
            return None
        return self.bf16 / gpu.bf16_flops + self.fp8 / (gpu.fp8_flops or gpu.bf16_flops)


def _linear_flops(model: RankModel, tokens: int, head_tokens: int) -> _Flops:
    """FLOPs of the Linear layers on a rank: FP8 weights at the FP8 rate, the others at the BF16 rate."""
    rows = model.weights.kept(is_mtp_on=model.is_mtp_on)
    has_head = any(row.role is Role.LM_HEAD for row in rows)
    flops = {True: 0.0, False: 0.0}
    for row in rows:
        if not _is_read(row, has_head):
            continue
        count = float(head_tokens if row.role in _HEAD_ROLES else tokens)
        if row.role is Role.ROUTED_EXPERT:
            count *= model.experts_per_token / model.shape.num_experts
        flops[row.is_float8] += _FLOPS_PER_ELEMENT * row.rank_elements * count
    return _Flops(bf16=flops[False], fp8=flops[True])


def _attention_flops(model: RankModel, pairs: float, read_pairs: float, *, on_latents: bool) -> _Flops:
    """FLOPs of attention on a rank for `pairs` of query and token, of which `read_pairs` are attended to."""
    attention, token = model.shape.attention, model.token
    heads = attention.num_heads // model.weights.num_ranks
    if not isinstance(attention, LatentAttention):
        return _Flops(token.num_layers * _FLOPS_PER_ELEMENT * heads * 2 * attention.head_dim * read_pairs, 0.0)
    sizes = attention.key + attention.latent if on_latents else attention.nope + attention.rope + attention.value
    attended = token.num_layers * _FLOPS_PER_ELEMENT * heads * sizes * read_pairs
    # The indexer is replicated: every rank scores every token, in FP8 as its keys are cached.
    scored = _FLOPS_PER_ELEMENT * attention.indexer_heads * attention.indexer_key * pairs
    return _Flops(attended, token.num_read_indexer_layers * scored)


def _read_cache_bytes(model: RankModel, key_tokens: int, tokens: int) -> int:
    """Bytes of cache of `tokens` tokens that are read, the keys and values of `key_tokens` of them."""
    token = model.token
    keys = token.num_layers * token.key_bytes * key_tokens
    return keys + token.num_read_indexer_layers * token.indexer_bytes * tokens


def _bound(experts: int, other: int, kv: int, flops: _Flops, gpu: Gpu) -> StepBound:
    bandwidth = gpu.bandwidth_bytes_per_second
    memory = None if bandwidth is None else (experts + other + kv) / bandwidth
    return StepBound(experts, other, kv, flops.bf16 + flops.fp8, memory, flops.seconds(gpu))


def decode_bound(model: RankModel, gpu: Gpu, requests: int) -> Callable[[int], StepBound]:
    """`decode_step` for `requests` requests, as a function of their length."""
    # The tokens of one request are together: they read its cache once.
    queries = requests * model.tokens_per_request
    experts, other = _weight_bytes(model, queries, on_latents=True)
    linear = _linear_flops(model, queries, queries)

    def at(length: int) -> StepBound:
        read = read_keys(model.shape, length)
        attention = _attention_flops(model, queries * length, queries * read, on_latents=True)
        return _bound(experts, other, requests * _read_cache_bytes(model, read, length), linear + attention, gpu)

    return at


def decode_step(model: RankModel, gpu: Gpu, load: Workload) -> StepBound:
    """One decode step: `load.requests` requests, each reading the cache of its `load.length` tokens.

    It yields `model.tokens_per_request` tokens a request at most, with MTP if every draft is accepted.
    """
    return decode_bound(model, gpu, load.requests)(load.length)


def prefill(model: RankModel, gpu: Gpu, length: int, chunk_tokens: int) -> StepBound:
    """The prefill of one request of `length` tokens in chunks: weights are read once a chunk, earlier keys again."""
    # Dense MLA expands latents to heads for prefill; sparse MLA attends to latents here too.
    is_sparse = model.shape.is_sparse
    num_earlier, last = divmod(length - 1, chunk_tokens)
    num_chunks = num_earlier + 1
    experts, other = _weight_bytes(model, last + 1, on_latents=is_sparse)
    experts += num_earlier * _weight_bytes(model, chunk_tokens, on_latents=is_sparse)[0]
    earlier = chunk_tokens * num_chunks * num_earlier // 2
    pairs = length * (length + 1) / 2
    top = read_keys(model.shape, length)
    read_pairs = top * (top + 1) / 2 + (length - top) * top
    attention = _attention_flops(model, pairs, read_pairs, on_latents=is_sparse)
    linear = _linear_flops(model, length, 1)
    kv = _read_cache_bytes(model, earlier, earlier)
    return _bound(experts, num_chunks * other, kv, linear + attention, gpu)
