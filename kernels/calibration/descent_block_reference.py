"""One column block of coordinate descent on INT4 codes, plain torch: it defines the bits of descent_block_cpu.py.

Everything is IEEE float32, each operation rounded by itself. Matrices lie transposed, columns of the weight first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN


def descend_block_reference(gradient: Tensor, hessian: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Gives each of B columns in turn the code that serves its row best while the others stay.

    `gradient` float32 [E, B, R], read only: H (w - q) of the block's columns before any change. `hessian` float32
    [E, B, B]: the block's part of H, positive on its diagonal. `scale` float32 [E, R]: one for the whole block.
    `codes` int8 [E, B, R], changed in place.
    With the other columns fixed the loss is a parabola in a column's value, lowest at q + gradient / H_jj, so that the
    nearest value that a code has is the best: no step raises the loss (but for float32 rounding).
    """
    left = gradient.clone()
    for j in range(codes.shape[1]):
        diagonal = hessian[:, j, j, None]
        value = codes[:, j].to(torch.float32) * scale
        target = (value + left[:, j] / diagonal) / scale
        code = torch.round(target.clamp(INT4_CODE_MIN, INT4_CODE_MAX))
        change = code * scale - value
        codes[:, j] = code.to(torch.int8)
        left[:, j + 1 :] -= hessian[:, j, j + 1 :, None] * change[:, None]
