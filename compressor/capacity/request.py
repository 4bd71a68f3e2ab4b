"""What a user asks of a capacity plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from memopt.compressor.capacity.gpus import Gpu, require_gpu
from memopt.compressor.capacity.kv_bytes import CacheFormat, IndexerCache
from memopt.compressor.capacity.kv_crossover import DEFAULT_SHARE
from memopt.compressor.capacity.memory_plan import DEFAULT_MEMORY_FRACTION, require_fraction
from memopt.errors import UsageError

# Sanity bounds, far above any GPU and any batch.
MAX_SIZE_BYTES = 10**15
MAX_COUNT = 2**40

StageChoice = Literal["decode", "prefill", "both"]


@dataclass(frozen=True)
class ReserveChoice:
    """Reserves in bytes; None: the default of memory_plan.py."""

    activations: int | None = None
    graphs: int | None = None
    communication: int | None = None
    kv_scratch: int | None = None
    runtime: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value <= MAX_SIZE_BYTES:
                raise UsageError(f"reserve for {field.name} of {value:g} bytes is not within 0 and {MAX_SIZE_BYTES:g}")


@dataclass(frozen=True)
class CapacityRequest:
    """What is planned for.

    `gpu`: what each rank runs on; without one, `kv_pool_bytes` says how much a rank has for KV cache. `stage` None:
    what the plan's weights are meant for, decode with INT4, else prefill. `kv_format`: of decode (None: FP8),
    `prefill_kv_format`: of prefill (None: BF16). `prefill_recipe`: a shipped recipe for the prefill stage's weights
    (None: the plan's own, or the source's as they are if the plan makes INT4). `context`: tokens of a request, prompt
    and answer; `requests`: how many together (None: as many as fit). `weights_per_gpu_bytes` replaces the planned bytes
    of a rank. `share`: of a decode step, what a smaller cache must save to pay; `overhead_seconds`: what expanding it
    costs a decode step, if known.
    """

    gpu: Gpu | None = None
    kv_pool_bytes: int | None = None
    stage: StageChoice | None = None
    kv_format: CacheFormat | None = None
    prefill_kv_format: CacheFormat | None = None
    prefill_recipe: str | None = None
    context: int | None = None
    requests: int | None = None
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    reserves: ReserveChoice = ReserveChoice()
    is_mtp_on: bool = False
    has_absorbed_copies: bool = True
    indexer_cache: IndexerCache = "all"
    weights_per_gpu_bytes: int | None = None
    share: float = DEFAULT_SHARE
    overhead_seconds: float | None = None

    def __post_init__(self) -> None:
        require_fraction(self.memory_fraction)
        for name in ("context", "requests"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_COUNT:
                raise UsageError(f"{name} {value} is not within 1 and {MAX_COUNT:,}")
        if self.requests is not None and self.context is None:
            raise UsageError("requests of what length?", remedy="give --context TOKENS as well")
        for name, value in (("KV pool", self.kv_pool_bytes), ("weights a GPU", self.weights_per_gpu_bytes)):
            if value is not None and not 0 <= value <= MAX_SIZE_BYTES:
                raise UsageError(f"{name} of {value:g} bytes is not within 0 and {MAX_SIZE_BYTES:g}")
        if self.gpu is not None:
            require_gpu(self.gpu)
        if self.overhead_seconds is not None and not 0 <= self.overhead_seconds < float("inf"):
            raise UsageError(f"overhead of {self.overhead_seconds:g} s is not 0 or more")
        if not 0 < self.share < 1:
            raise UsageError(f"a saving of {self.share:g} of a step is not between 0 and 1", remedy="use 0.05, for 5 %")
