"""Stored tensors of one projection with random contents, as a release has them."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.layout import CODES_PER_WORD
from memopt.runtime.weights.layer_names import LayerNames
from memopt.runtime.weights.layer_tensors import LayerTensors


def float8_weight(rows: int, columns: int, block: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes [rows, columns] and their float32 scales, one a block."""
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, columns, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) * 1e-2 + 1e-3
    return codes, scales


def int4_tensors(rows: int, columns: int, group: int) -> dict[str, Tensor]:
    """The three parts of an INT4 weight."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(-(2**31), 2**31 - 1, (rows, columns // CODES_PER_WORD), generator=generator)
    scales = (torch.randn(rows, columns // group, generator=generator) * 0.05).to(torch.bfloat16)
    return {
        "weight_packed": packed.to(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }


def tensors_of(**modules: dict[str, Tensor]) -> LayerTensors:
    """Modules by name, each with its stored parts, as one layer's tensors."""
    tensors = LayerTensors("", LayerNames((), ()))
    for module, parts in modules.items():
        for part, tensor in parts.items():
            tensors.add(f"{module}.{part}", tensor)
    return tensors
