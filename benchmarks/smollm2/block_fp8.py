"""Block FP8 as DeepSeek and GLM publish it: e4m3 codes and one float32 scale for every 128 x 128 block."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import NonFiniteError
from memopt.kernels.layout import E4M3_MAX, FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS


def quantize_block_fp8(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [R, C] and `weight_scale_inv` float32 [ceil(R / 128), ceil(C / 128)] of `weight` [R, C].

    scale = amax / 448 (deepseek-ai/DeepSeek-V3 inference/kernel.py, act_quant's rule on blocks), 1 for a block of
    zeros; codes are weight / scale rounded half to even. Ragged last blocks are blocks of their own. NonFiniteError
    naming `name` for NaN or infinity.
    """
    weight = weight.to(torch.float32)
    if not torch.isfinite(weight).all():
        raise NonFiniteError("holds NaN or infinity", tensor=name)
    rows, columns = weight.shape
    block_rows, block_columns = -(-rows // FP8_BLOCK_ROWS), -(-columns // FP8_BLOCK_COLUMNS)
    padded = weight.new_zeros(block_rows * FP8_BLOCK_ROWS, block_columns * FP8_BLOCK_COLUMNS)
    padded[:rows, :columns] = weight
    blocks = padded.view(block_rows, FP8_BLOCK_ROWS, block_columns, FP8_BLOCK_COLUMNS)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    # amax / scale may be a hair above 448, which e4m3 has no code for.
    scaled = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.view_as(padded)[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
    return codes, scale
