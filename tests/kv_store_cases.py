"""Every store of tokens into KV pages, as cases that the CPU and the interpreter tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.kv_cache.kv_format import new_gqa_pool, new_indexer_pool, new_mla_pool
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import INDEXER_KEY_SIZE, MLA_LATENT_SIZE, MLA_ROPE_SIZE

NUM_KV_HEADS, HEAD_DIM = 2, 48
# Numbers that take every branch of a rounding: signed zeros, subnormals of BF16 and of e4m3, ties, saturation.
SPECIAL = (0.0, -0.0, 1e-40, 2.0**-10, 3 * 2.0**-10, -17.0, 18.0, 464.0, -1e9, 3e38)
NON_FINITE = (float("nan"), -float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class StoreCase:
    """One store: `sizes` of a token's inputs, how to make its pools, and how to call it on a module's functions."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    new_pools: Callable[[int], tuple[Tensor, ...]]
    store: Callable[[Any, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor | None], None]

    def inputs(self, num_tokens: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
        """Random inputs of very different sizes, special numbers in some tokens."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(_random((num_tokens, *size), dtype, generator) for size in self.sizes)


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    spread = torch.randn(shape[0], *([1] * (len(shape) - 1)), generator=generator).mul_(4).exp2_()
    values = (torch.randn(shape, generator=generator) * spread).flatten(1)
    for token in range(shape[0]):
        kind = int(torch.randint(6, (), generator=generator))
        at = torch.randperm(values.shape[1], generator=generator)[: len(SPECIAL)]
        if kind == 0:
            values[token, at] = torch.tensor(SPECIAL)
        elif kind == 1:
            values[token, at[: len(NON_FINITE)]] = torch.tensor(NON_FINITE)
        elif kind == 2:
            values[token] = 0.0
    return values.view(shape).to(dtype)


def _mla(kv_format: KvFormat, scale: float | None) -> StoreCase:
    def store(
        module: Any, pools: tuple[Tensor, ...], inputs: tuple[Tensor, ...], slots: Tensor, bad_slot: Tensor | None
    ) -> None:
        layer_scale = None if scale is None else torch.tensor(scale)
        module.mla_store(*inputs, *pools, slots, kv_format, layer_scale, bad_slot)

    sizes = ((MLA_LATENT_SIZE,), (MLA_ROPE_SIZE,))
    return StoreCase(f"mla-{kv_format.name}", sizes, lambda pages: (new_mla_pool(kv_format, pages),), store)


def _gqa(kv_format: KvFormat, scales: tuple[list[float], list[float]] | None) -> StoreCase:
    def store(
        module: Any, pools: tuple[Tensor, ...], inputs: tuple[Tensor, ...], slots: Tensor, bad_slot: Tensor | None
    ) -> None:
        k_scale, v_scale = (None, None) if scales is None else (torch.tensor(scale) for scale in scales)
        module.gqa_store(*inputs, *pools, slots, kv_format, k_scale, v_scale, bad_slot)

    def new_pools(pages: int) -> tuple[Tensor, ...]:
        return tuple(new_gqa_pool(kv_format, pages, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))

    return StoreCase(f"gqa-{kv_format.name}", ((NUM_KV_HEADS, HEAD_DIM),) * 2, new_pools, store)


def _indexer() -> StoreCase:
    def store(
        module: Any, pools: tuple[Tensor, ...], inputs: tuple[Tensor, ...], slots: Tensor, bad_slot: Tensor | None
    ) -> None:
        module.indexer_store(*inputs, *pools, slots, bad_slot)

    return StoreCase("indexer", ((INDEXER_KEY_SIZE,),), lambda pages: (new_indexer_pool(pages),), store)


STORES = (
    _mla(BF16, None),
    _mla(FP8_E4M3, 0.037),
    _mla(FP8_DS_MLA, None),
    _gqa(BF16, None),
    _gqa(FP8_E4M3, ([0.037, 1.0], [0.5, 2.0**-9])),
    _indexer(),
)


def rounding_cases() -> Tensor:
    """float32 numbers at which rounding to e4m3 is decided: every BF16 pattern, and each midpoint with its neighbours.

    A NaN is among them with both signs and several payloads.
    """
    patterns = (torch.arange(1 << 16) << 16).to(torch.int32)
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    edges = torch.cat((values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0, 2.0**-10])))
    near = torch.cat((edges.view(torch.int32), edges.view(torch.int32) + 1, _below(edges)))
    return torch.cat((patterns, near, near | -(1 << 31))).view(torch.float32)


def _below(values: Tensor) -> Tensor:
    """Bits of the next smaller float32 of positive values."""
    return values[values > 0].view(torch.int32) - 1


def same_bytes(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether two sets of pools hold the same bytes."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def poison(pools: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The pools, every byte of them set to 0xA5."""
    for pool in pools:
        pool.view(torch.uint8).fill_(0xA5)
    return pools
