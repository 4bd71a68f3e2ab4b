"""Where a KV cache smaller than BF16 starts to pay: in speed (fewer bytes a step), and in room (longer requests)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt.compressor.capacity.gpus import Gpu
from memopt.compressor.capacity.kv_bytes import TokenBytes
from memopt.compressor.capacity.memory_plan import tokens_in
from memopt.compressor.capacity.throughput import RankModel, StepBound, decode_bound
from memopt.kernels.layout import PAGE_TOKENS

DEFAULT_SHARE = 0.05
MAX_SEARCHED_TOKENS = 2**20


@dataclass(frozen=True)
class KvCrossover:
    """Lengths in tokens, for a number of requests; None: at no length up to the model's maximum (or nothing to say).

    `kv_over_weights_length`: from here a step reads more BF16 cache than weights. `saves_length`: from here, and up to
    `saves_until_length`, the smaller format shortens the step by `share` or more (with a DSA indexer the saving stops
    growing at the top k, the step does not). `breaks_even_length`: from here it saves more than the overhead of
    expanding it. `longest_bf16`, `longest`: the longest length at which all requests fit, in BF16 and in the format.
    """

    share: float
    kv_over_weights_length: int | None
    saves_length: int | None
    saves_until_length: int | None
    breaks_even_length: int | None
    longest_bf16: int | None
    longest: int | None


def _searched_lengths(max_tokens: int | None) -> range:
    longest = min(max_tokens or MAX_SEARCHED_TOKENS, MAX_SEARCHED_TOKENS)
    return range(PAGE_TOKENS, longest + 1, PAGE_TOKENS)


def shortest_length(holds: Callable[[int], bool], max_tokens: int | None) -> int | None:
    """The shortest length in whole pages, up to `max_tokens` (None: 2**20), at which `holds`; None if there is none."""
    return next((length for length in _searched_lengths(max_tokens) if holds(length)), None)


def last_length(holds: Callable[[int], bool], max_tokens: int | None) -> int | None:
    """The longest such length at which `holds`; None if there is none."""
    return next((length for length in reversed(_searched_lengths(max_tokens)) if holds(length)), None)


def longest_length(pool_bytes: int, token: TokenBytes, requests: int, max_tokens: int | None) -> int:
    """The longest length, at most `max_tokens`, at which `requests` requests fit into the pool; 0 if none does."""
    tokens = tokens_in(pool_bytes, token) // (requests * PAGE_TOKENS) * PAGE_TOKENS
    return min(tokens, max_tokens) if max_tokens is not None else tokens


def _seconds(bound: StepBound) -> float:
    return bound.seconds or 0.0


def kv_crossover(
    in_bf16: RankModel,
    model: RankModel,
    gpu: Gpu,
    requests: int,
    *,
    bf16_pool_bytes: int | None,
    pool_bytes: int | None,
    share: float = DEFAULT_SHARE,
    overhead_seconds: float | None = None,
) -> KvCrossover:
    """Compare `model`'s KV format with BF16 for `requests` requests. `overhead_seconds`: what expanding costs a step.

    Speed needs the GPU's bandwidth, room the bytes of the pool in each format (their scratch differs); else None.
    """
    max_tokens = model.shape.max_tokens
    before, after = decode_bound(in_bf16, gpu, requests), decode_bound(model, gpu, requests)

    def saved(length: int) -> float:
        return _seconds(before(length)) - _seconds(after(length))

    def saves(length: int) -> bool:
        seconds = _seconds(before(length))
        return seconds - _seconds(after(length)) >= share * seconds

    def reads_more_cache(length: int) -> bool:
        step = before(length)
        return step.kv_bytes > step.weight_bytes

    is_timed = gpu.bandwidth_bytes_per_second is not None
    breaks_even = None
    if is_timed and overhead_seconds is not None:
        breaks_even = shortest_length(lambda length: saved(length) >= overhead_seconds, max_tokens)
    return KvCrossover(
        share=share,
        kv_over_weights_length=shortest_length(reads_more_cache, max_tokens),
        saves_length=shortest_length(saves, max_tokens) if is_timed else None,
        saves_until_length=last_length(saves, max_tokens) if is_timed else None,
        breaks_even_length=breaks_even,
        longest_bf16=_longest(bf16_pool_bytes, in_bf16.token, requests, max_tokens),
        longest=_longest(pool_bytes, model.token, requests, max_tokens),
    )


def _longest(pool_bytes: int | None, token: TokenBytes, requests: int, max_tokens: int | None) -> int | None:
    return None if pool_bytes is None else longest_length(pool_bytes, token, requests, max_tokens)
