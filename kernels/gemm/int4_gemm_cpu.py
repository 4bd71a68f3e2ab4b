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
from memopt.kernels.gemm.row_tiles import ROW_TILE, is_tiled, padded_rows

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
    """out [M, N] = x [M, K] @ weight.T with float32 sums; x BF16 or float32, out of any floating type.

    Tokens with float32 x are multiplied ROW_TILE at a time, so that one's result does not depend on the others.
    Checked by `int4_gemm`, which documents it.
    """
    values = padded_rows(x) if is_tiled(x) else x.to(torch.float32)
    split = torch.cat((values[:, 0::2], values[:, 1::2]), dim=1)
    token_step = ROW_TILE if is_tiled(x) else max(1, x.shape[0])
    packed = weight.packed.numpy().view(np.uint8)
    scale_bits = weight.scale_bits.view(torch.int16).numpy().view(np.uint16)
    tile_rows = max(1, min(weight.num_rows, TILE_WEIGHTS // weight.num_columns))
    tile = torch.empty(tile_rows, weight.num_columns)
    product = torch.empty(split.shape[0], weight.num_rows)
    expand = _expand_entry()
    for first in range(0, weight.num_rows, tile_rows):
        rows = slice(first, min(first + tile_rows, weight.num_rows))
        weights = tile[: rows.stop - first]
        expand(packed[rows], scale_bits[rows], weights.numpy())
        for token in range(0, split.shape[0], token_step):
            tokens = slice(token, token + token_step)
            torch.mm(split[tokens], weights.T, out=product[tokens, rows])
    return out.copy_(product[: x.shape[0]])
