"""INT4 GEMM on the CPU from the checkpoint's own words: numba expands a tile of rows, torch multiplies it.

Float32 throughout. The tile stays in the second-level cache, so memory sees the packed words only. On the calling
thread, but for the product, which uses torch's own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.kernels import cpu_number, layout
from memopt.kernels.compile_cache import compiled, source_digest
from memopt.kernels.gemm import int4_expand_cpu
from memopt.kernels.gemm.int4_expand_cpu import expand_rows
from memopt.kernels.gemm.int4_weight import Int4Weight

# float32 weights expanded at once, 2 MiB: measured best of 0.25 to 4 MiB at K = 4096.
TILE_WEIGHTS = 1 << 19
_SOURCES = (layout, cpu_number, int4_expand_cpu)


@cache
def _expand_entry() -> Callable[..., None]:
    """`expand_rows`, compiled on first use; cpu_entry.py says why it closes over a digest of its sources."""
    key = source_digest(*(str(module.__file__) for module in _SOURCES), __file__)

    @compiled
    def expand(*arguments: Any) -> Any:
        key  # noqa: B018 - makes it a closure variable
        return expand_rows(*arguments)

    return expand


def int4_gemm_cpu(x: Tensor, weight: Int4Weight, out: Tensor) -> Tensor:
    """out [M, N] = x [M, K] @ weight.T with float32 sums, x and out both BF16 or both float32.

    Checked by `int4_gemm`, which documents it.
    """
    values = x.to(torch.float32)
    split = torch.cat((values[:, 0::2], values[:, 1::2]), dim=1)
    packed = weight.packed.numpy().view(np.uint8)
    scale_bits = weight.scale_bits.view(torch.int16).numpy().view(np.uint16)
    tile_rows = max(1, min(weight.num_rows, TILE_WEIGHTS // weight.num_columns))
    tile = np.empty((tile_rows, weight.num_columns), np.float32)
    product = torch.empty(weight.num_rows, x.shape[0])
    expand = _expand_entry()
    for first in range(0, weight.num_rows, tile_rows):
        rows = slice(first, min(first + tile_rows, weight.num_rows))
        weights = tile[: rows.stop - first]
        expand(packed[rows], scale_bits[rows], weights)
        torch.mm(torch.from_numpy(weights), split.T, out=product[rows])
    return out.copy_(product.T)
