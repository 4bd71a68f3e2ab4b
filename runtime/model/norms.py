"""Normalisation over the last dimension, in float32, rounded where transformers rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.rows.layer_rows import has_row_kernels, rms_norm_on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension, x [.., H] and weight [H] of one type.

    The quotient is rounded to x's type before it is weighed (transformers, LlamaRMSNorm and its copies).
    """
    if has_row_kernels(x) and x.dtype == weight.dtype:
        return rms_norm_on_cpu(x, weight, eps)
    values = x.to(torch.float32)
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (values * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension with `weight` and `bias` [H] of x's type; float32 inside."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
