"""Where a token's fields lie in a pool, counted from its first page: the CPU paths see a pool as one line of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.kernels.layout import (
    DS_MLA_SCALES_OFFSET_BYTES,
    INDEXER_KEY_SIZE,
    INDEXER_PAGE_SCALES_OFFSET_BYTES,
    INDEXER_SCALE_BYTES,
    PAGE_TOKENS,
)


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Places of tokens with scales of their own, numpy int64 [T] each; negative `codes` for padding.

    `codes`: first e4m3 byte, in bytes. `scales`: first scale, in float32 elements.
    """

    codes: Any
    scales: Any


def row_offsets(pool: Tensor, slots: Tensor) -> Any:
    """First byte numpy int64 [T] of each token's row in a uint8 pool; the slot itself, negative, for padding."""
    numbers = slots.numpy()
    pages, positions = np.divmod(numbers, PAGE_TOKENS)
    return np.where(numbers < 0, numbers, pages * pool.stride(0) + positions * pool.stride(1))


def ds_mla_offsets(pool: Tensor, slots: Tensor) -> GroupOffsets:
    """Places of tokens in an fp8_ds_mla pool."""
    codes = row_offsets(pool, slots)
    return GroupOffsets(codes, (codes + DS_MLA_SCALES_OFFSET_BYTES) // torch.float32.itemsize)


def indexer_offsets(pool: Tensor, slots: Tensor) -> GroupOffsets:
    """Places of keys in an indexer pool."""
    numbers = slots.numpy()
    pages, positions = np.divmod(numbers, PAGE_TOKENS)
    starts = pages * pool.stride(0)
    scale_bytes = starts + INDEXER_PAGE_SCALES_OFFSET_BYTES + positions * INDEXER_SCALE_BYTES
    codes = np.where(numbers < 0, numbers, starts + positions * INDEXER_KEY_SIZE)
    return GroupOffsets(codes, scale_bytes // torch.float32.itemsize)


def flat_bytes(pool: Tensor) -> Tensor:
    """A uint8 pool's bytes from its first page to its last, in one line, what lies between pages included."""
    return flat_elements(pool)


def flat_elements(pool: Tensor) -> Tensor:
    """A pool's elements from its first page to its last, in one line, what lies between pages included."""
    return pool.as_strided(((pool.shape[0] - 1) * pool.stride(0) + pool[0].numel(),), (1,))
