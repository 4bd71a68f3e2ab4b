"""Hands tokens over from the BF16 pages of the prefill stage to the decode stage's pages, in any format."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.kv_cache.kv_format import require_gqa_pool, require_mla_pool
from memopt.kernels.kv_cache.kv_slots import places
from memopt.kernels.kv_cache.kv_store import gqa_store, mla_store
from memopt.kernels.kv_formats import BF16, KvFormat
from memopt.kernels.layout import MLA_LATENT_SIZE, PAGE_TOKENS


def convert_mla_tokens(
    source: Tensor,
    source_slots: Tensor,
    pool: Tensor,
    slots: Tensor,
    kv_format: KvFormat,
    scale: Tensor | None = None,
    bad_slot: Tensor | None = None,
) -> None:
    """Reads T tokens from the BF16 MLA pool `source` and writes them into `pool`, as `mla_store` would have.

    `source` bfloat16 [P, 64, 576]; `source_slots` int64 [T]: where each token lies, inside the source; padding there is
    allowed only where `slots` has padding too. The rest and the errors: `kv_store.mla_store`. Slots of a sequence's
    pages: `kv_slots.slots_of_pages`. Works on one copy of the tokens, 1152 bytes each.
    """
    require_mla_pool(source, BF16, like=pool)
    tokens = _gather(source, source_slots, slots)
    mla_store(tokens[:, :MLA_LATENT_SIZE], tokens[:, MLA_LATENT_SIZE:], pool, slots, kv_format, scale, bad_slot)


def convert_gqa_tokens(
    source_key: Tensor,
    source_value: Tensor,
    source_slots: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    kv_format: KvFormat,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    bad_slot: Tensor | None = None,
) -> None:
    """Reads T tokens from the BF16 pools of K and V and writes them into other pools, as `gqa_store` would have.

    `source_key`, `source_value` bfloat16 [P, 64, kv_heads, head_dim]; `source_slots` as for `convert_mla_tokens`. The
    rest and the errors: `kv_store.gqa_store`.
    """
    require_tensor("the K pool", key_pool, (None, PAGE_TOKENS, None, None), contiguous=False)
    for name, source in (("the source's K pool", source_key), ("the source's V pool", source_value)):
        require_gqa_pool(name, source, BF16, *key_pool.shape[2:], like=key_pool)
    key, value = (_gather(source, source_slots, slots) for source in (source_key, source_value))
    gqa_store(key, value, key_pool, value_pool, slots, kv_format, k_scale, v_scale, bad_slot)


def _gather(source: Tensor, source_slots: Tensor, slots: Tensor) -> Tensor:
    """The tokens [T, ...] at `source_slots`, bit for bit."""
    require_tensor("slots", slots, (None,), torch.int64, like=source)
    require_tensor("source_slots", source_slots, (slots.shape[0],), torch.int64, like=source)
    if not source.is_cuda:
        num_slots = source.shape[0] * PAGE_TOKENS
        wrong = (source_slots >= num_slots) | ((source_slots < 0) & (slots >= 0))
        if bool(wrong.any()):
            token = int(wrong.to(torch.uint8).argmax())
            raise UsageError(
                f"token {token} would go from slot {int(source_slots[token])} to slot {int(slots[token])}, but the "
                f"source's {source.shape[0]} pages have slots 0 to {num_slots - 1}",
                remedy="check the source's block table",
            )
    return source[places(source_slots.clamp(min=0))]
