"""From a loaded model and options to the engine core: limits, pools, tracker, drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from memopt.errors import CapacityError, UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.admission import EngineLimits
from memopt.runtime.engine.cache_size import choose_num_pages, memory_bytes_of, require_memory
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.speculative import NUM_DRAFTS, mtp_drafter
from memopt.runtime.engine.verified_model import VerifiedModel
from memopt.runtime.integrity.choose_tracker import choose_tracker
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.kv_pools import kv_token_bytes, new_kv_pools
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.kv.prefix_index import prefix_namespace
from memopt.runtime.model.model_config import GqaConfig, ModelConfig
from memopt.runtime.parallel.communicator import Communicator

LOGGER = logging.getLogger("memopt.engine")


# Gives pools like those that it gets, in other memory, and who tags their pages there.
PlacePools: TypeAlias = Callable[[KvPools], tuple[KvPools, PageTracker]]


def new_core(
    model: VerifiedModel, options: EngineOptions, communicator: Communicator, *, place: PlacePools | None = None
) -> EngineCore:
    """The core of an engine. Raises UsageError, CapacityError or UnsupportedError for options that cannot be met.

    `place`: where pools and tags are to lie, if not in memory of this process alone (stages/shared_region.py).
    """
    config = model.decoder.config
    drafter = mtp_drafter(model.decoder) if options.speculative else None
    limits = _limits(config, options)
    num_layers = len(model.decoder.layers) + (NUM_DRAFTS if drafter is not None else 0)
    num_kv_heads = config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1
    num_kv_heads_here = max(num_kv_heads // communicator.num_ranks, 1)
    token_bytes = kv_token_bytes(config, options.kv_format, num_layers=num_layers, num_kv_heads_here=num_kv_heads_here)
    num_pages = choose_num_pages(token_bytes, limits, num_pages=options.num_pages, kv_cache_gib=options.kv_cache_gib)
    require_memory(num_pages, token_bytes, memory_bytes_of(options.device))
    # A running request holds a page that is its own: no more can run, and tables need no more rows.
    limits = replace(limits, max_requests=min(limits.max_requests, num_pages - 1))
    try:
        pools = new_kv_pools(
            config,
            options.kv_format,
            num_pages,
            num_layers=num_layers,
            num_kv_heads_here=num_kv_heads_here,
            scales=model.scales,
            device=options.device,
            rank=communicator.rank,
        )
    except (RuntimeError, MemoryError) as problem:
        # Whatever torch's allocators raise: it has no class of its own on the CPU.
        raise CapacityError(
            f"{num_pages:,} pages of {token_bytes * PAGE_TOKENS:,} bytes do not fit into memory: {problem}",
            remedy="lower num_pages or kv_cache_gib",
        ) from problem
    if place is None:
        tracker = choose_tracker(options.integrity, num_pages, options.device)
    else:
        pools, tracker = place(pools)
    LOGGER.info(
        "KV cache: %s, %d pages of %d tokens, %d bytes a token, %d bytes",
        options.kv_format.name, num_pages - 1, PAGE_TOKENS, token_bytes, pools.size_bytes,
    )  # fmt: skip
    eos_token_ids = set(config.eos_token_ids)
    if model.tokenizer is not None:
        eos_token_ids |= set(model.tokenizer.eos_token_ids)
    return EngineCore(
        model.decoder,
        pools,
        limits,
        vocab_size=config.vocab_size,
        eos_token_ids=sorted(eos_token_ids),
        tracker=tracker,
        communicator=communicator,
        prefix_namespace=prefix_namespace(model.root_digest, options.kv_format.name) if options.prefix_cache else None,
        drafter=drafter,
    )


def _limits(config: ModelConfig, options: EngineOptions) -> EngineLimits:
    max_tokens = config.max_tokens if options.max_tokens is None else options.max_tokens
    if max_tokens > config.max_tokens:
        raise UsageError(
            f"max_tokens is {max_tokens:,}, but this model's positions end at {config.max_tokens:,}",
            remedy=f"use {config.max_tokens:,} or less",
        )
    num_drafts = NUM_DRAFTS if options.speculative else 0
    return EngineLimits(options.max_requests, options.max_step_tokens, max_tokens, num_drafts)
