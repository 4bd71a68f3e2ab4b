"""Scales and plain codes of float32 weights that lie on any device: what a calibrated solve starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels import cpu, int4_device
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.int4_spec import Int4Spec
from memopt.kernels.layout import INT4_CODE_MAX, INT4_CODE_MIN


def search_scale(weight: Tensor, spec: Int4Spec, importance: Tensor | None = None) -> Tensor:
    """bfloat16 [R, G]: the scales that `quantize_int4` takes for the values `weight` float32 [R, K].

    `importance`: float32 [K], positive; weighs each column's squared error. Errors as for `cpu.search_int4_scale`.
    """
    require_tensor("weight", weight, (None, None), torch.float32)
    if weight.is_cuda:
        return int4_device.search_int4_scale(weight, spec, importance)
    bits = cpu.search_int4_scale(weight.numpy(), spec, None if importance is None else importance.numpy())
    return torch.from_numpy(bits.view("int16")).view(torch.bfloat16)


def expand_scale(scale: Tensor, num_columns: int) -> Tensor:
    """float32 [.., K]: the scale of each weight, of `scale` bfloat16 [.., G]."""
    return scale.to(torch.float32).repeat_interleave(num_columns // scale.shape[-1], dim=-1)


def round_to_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 codes [.., K], clamp(round_half_even(w / scale), -8, 7), of float32 `weight` under bfloat16 `scale`."""
    ratio = weight / expand_scale(scale, weight.shape[-1])
    return ratio.round_().clamp_(INT4_CODE_MIN, INT4_CODE_MAX).to(torch.int8)


def hessian_loss(weight: Tensor, codes: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """float64 [R]: (w - q) H (w - q)^T of each row, the product in float32, its sum in float64.

    `weight` float32 [R, K], `codes` int8 [R, K], `scale` bfloat16 [R, G], `hessian` float32 [K, K].
    """
    difference = weight - codes * expand_scale(scale, weight.shape[1])
    return ((difference @ hessian).to(torch.float64) * difference).sum(dim=1)


def diagonal_loss(weight: Tensor, codes: Tensor, scale: Tensor, diagonal: Tensor) -> Tensor:
    """float64 [R]: the loss under a diagonal Hessian, `diagonal` float32 [K]."""
    difference = weight - codes * expand_scale(scale, weight.shape[1])
    return difference.to(torch.float64).square() @ diagonal.to(torch.float64)
