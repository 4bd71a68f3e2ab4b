"""One column block of GPTQ, plain torch: it defines the bits of gptq_block_triton.py and gptq_block_cpu.py.

Everything is IEEE float32, each operation rounded by itself. Matrices lie transposed, columns of the weight first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN


def gptq_block_reference(
    weights: Tensor, factor: Tensor, scales: Tensor, groups: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Rounds B columns one after another and corrects those behind; fills `codes` and `errors`.

    `weights` float32 [E, B, R], read only; `factor` float32 [E, B, B], the block's part of the upper Cholesky factor of
    the inverse Hessian; `scales` float32 [E, G, R]; `groups` int32 [E, B], each column's row of `scales`; `codes` int8
    [E, B, R] in -8..7; `errors` float32 [E, B, R]: (weight - code * scale) / diagonal, which the columns behind the
    block are corrected by.
    """
    left = weights.clone()
    rows_of = groups.to(torch.int64)[:, :, None].expand(weights.shape)
    column_scales = scales.gather(1, rows_of)
    for j in range(weights.shape[1]):
        scale = column_scales[:, j]
        code = torch.round((left[:, j] / scale).clamp(INT4_CODE_MIN, INT4_CODE_MAX))
        codes[:, j] = code.to(torch.int8)
        errors[:, j] = (left[:, j] - code * scale) / factor[:, j, j, None]
        left[:, j + 1 :] -= factor[:, j, j + 1 :, None] * errors[:, None, j]
