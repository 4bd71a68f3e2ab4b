"""Tokens of KV cache that fit beside the weights, and the requests they make.

The fraction has SGLang's meaning (mem_fraction_static, model_executor/pool_configurator.py): weights and KV pool take
at most `fraction` of the GPU's memory. The reserves must fit into the rest; what does not comes off the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from memopt.compressor.capacity.gpus import GIB, MIB, Gpu
from memopt.compressor.capacity.kv_bytes import CacheFormat, TokenBytes
from memopt.compressor.capacity.model_shape import LatentAttention, ModelShape
from memopt.errors import UsageError
from memopt.kernels.layout import BF16_BITS, BITS_PER_BYTE, PAGE_TOKENS

DEFAULT_MEMORY_FRACTION = 0.85
# SGLang server_args.py, the reserve that it derives mem_fraction_static from: 512 MiB for the runtime, 1.5 MiB for each
# token of a prefill chunk, 2 MiB for each request of the largest CUDA graph, 1 GiB for each 8 ranks.
RUNTIME_BYTES = 512 * MIB
ACTIVATION_BYTES_PER_CHUNK_TOKEN = 3 * MIB // 2
GRAPH_BYTES_PER_REQUEST = 2 * MIB
COMMUNICATION_BYTES_PER_RANK = GIB // 8
# vLLM v1/attention/backends/mla/flashmla_sparse.py, get_prefill_workspace_size: BF16 keys of 5 times the longest.
SCRATCH_LENGTHS = 5
# Without max_position_embeddings: the longest length that scratch is planned for.
UNKNOWN_MAX_TOKENS = 2**17


@dataclass(frozen=True)
class Reserves:
    """Bytes of a GPU that hold neither weights nor KV cache.

    `kv_scratch`: FP8 pages that attention expands to BF16 (vLLM #46985: uncounted, FP8 ran out before BF16 did).
    """

    activations: int
    graphs: int
    communication: int
    kv_scratch: int
    runtime: int = RUNTIME_BYTES

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class EngineSizes:
    """Tokens of a prefill chunk, and requests of the largest CUDA graph."""

    chunk_tokens: int
    graph_requests: int


_MANY_RANKS = 4
# SGLang server_args.py: (GPUs of less than so many GiB, chunk, graph requests below four ranks, from four ranks on).
_ENGINE_SIZES = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
)
_LARGEST_SIZES = EngineSizes(16384, 512)


def engine_sizes(memory_bytes: int | None, num_ranks: int) -> EngineSizes:
    """SGLang's default sizes for `num_ranks` GPUs of `memory_bytes` each (None: as for one of 80 GiB)."""
    memory_gib = (80 * GIB if memory_bytes is None else memory_bytes) / GIB
    for below_gib, chunk_tokens, few, many in _ENGINE_SIZES:
        if memory_gib < below_gib:
            return EngineSizes(chunk_tokens, few if num_ranks < _MANY_RANKS else many)
    return _LARGEST_SIZES


def default_reserves(
    shape: ModelShape, form: CacheFormat, gpu: Gpu, num_ranks: int, max_tokens: int | None = None
) -> Reserves:
    """Reserves by the engines' own rules. `max_tokens`: the longest request (None: the model's maximum)."""
    attention, sizes = shape.attention, engine_sizes(gpu.memory_bytes, num_ranks)
    scratch = 0
    if form is CacheFormat.FP8_DS_MLA and isinstance(attention, LatentAttention):
        longest = max_tokens or shape.max_tokens or UNKNOWN_MAX_TOKENS
        scratch = SCRATCH_LENGTHS * longest * attention.key * BF16_BITS // BITS_PER_BYTE
    return Reserves(
        activations=sizes.chunk_tokens * ACTIVATION_BYTES_PER_CHUNK_TOKEN,
        graphs=sizes.graph_requests * GRAPH_BYTES_PER_REQUEST,
        communication=num_ranks * COMMUNICATION_BYTES_PER_RANK,
        kv_scratch=scratch,
    )


def require_fraction(fraction: float) -> None:
    """UsageError unless 0 < `fraction` <= 1."""
    if not 0 < fraction <= 1:
        raise UsageError(f"memory fraction {fraction:g} is not above 0 and at most 1", remedy="use 0.85, for example")


@dataclass(frozen=True)
class MemoryPlan:
    """How one GPU's memory is divided; sizes in bytes. `weights_bytes`: all that is loaded on this rank."""

    gpu: Gpu
    fraction: float
    reserves: Reserves
    weights_bytes: int

    @property
    def fraction_bytes(self) -> int:
        """What the fraction leaves weights and KV pool, whatever the reserves."""
        return int(self.fraction * self.gpu.memory_bytes)

    @property
    def static_bytes(self) -> int:
        """What weights and KV pool may take together."""
        return min(self.fraction_bytes, self.gpu.memory_bytes - self.reserves.total_bytes)

    @property
    def is_limited_by_reserves(self) -> bool:
        """Whether the reserves, not the fraction, set `static_bytes`."""
        return self.static_bytes < self.fraction_bytes

    @property
    def pool_bytes(self) -> int:
        """What is left for KV pages; below zero if the weights alone are too large."""
        return self.static_bytes - self.weights_bytes


def tokens_in(pool_bytes: int, token: TokenBytes) -> int:
    """Tokens that `pool_bytes` hold, in whole pages of 64; 0 if not even a page fits."""
    return max(pool_bytes // (token.size_bytes * PAGE_TOKENS), 0) * PAGE_TOKENS


def whole_pages(tokens: int) -> int:
    """`tokens` rounded up to whole pages."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def requests_in(tokens: int, length: int) -> int:
    """Requests of `length` tokens (>= 1) that a pool of `tokens` holds, each in pages of its own."""
    return tokens // whole_pages(length)
