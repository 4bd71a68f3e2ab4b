"""FP8 blocks and packed INT4 to BF16 or FP16: plain torch, written to be read. It defines what dequantize.py gives."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import NonFiniteError
from memopt.kernels import float8_reference, int4_reference
from memopt.kernels.checks import check_packed
from memopt.kernels.number_reference import bf16_value


def dequantize_float8(weight: Tensor, block_scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Weights [R, C] of `dtype` (bfloat16 or float16): float32(e4m3) * float32(scale), rounded once more, half to even.

    `weight` uint8 or float8_e4m3fn [R, C]; `block_scale` float32 [ceil(R / rows), ceil(C / columns)] of `block` (rows,
    columns). Raises ShapeError or UsageError for input that does not fit, NonFiniteWeightError for the first result
    that is NaN or infinite: one that only `dtype` cannot hold is refused as well.
    """
    if dtype == torch.bfloat16:
        return float8_reference.dequantize_float8_bf16(weight, block_scale, block)
    rounded = float8_reference.weight_values(weight, block_scale, block).to(dtype)
    error = float8_reference.first_non_finite(rounded, weight, block_scale, block)
    if error is not None:
        raise error
    return rounded


def dequantize_int4(packed: Tensor, scale_bits: Tensor, group_size: int | None, dtype: torch.dtype) -> Tensor:
    """Weights [R, C] of `dtype` (bfloat16 or float16): code * scale, rounded once, half to even.

    `packed` int32 [R, C / 8]; `scale_bits` int16 (or bfloat16) [R, G]; `group_size` weights a scale, None: the row.
    Raises ShapeError when they do not fit, NonFiniteError when a weight is NaN or too large for `dtype`.
    """
    group = check_packed(tuple(packed.shape), tuple(scale_bits.shape), group_size)
    codes = int4_reference.unpack_int4(packed).to(torch.float32).view(packed.shape[0], scale_bits.shape[1], group)
    values = codes * bf16_value(scale_bits.view(torch.int16))[..., None]
    rounded = values.to(dtype).flatten(1)
    if not bool(torch.isfinite(rounded).all()):
        raise non_finite_int4(rounded, scale_bits, group)
    return rounded


def non_finite_int4(weights: Tensor, scale_bits: Tensor, group: int) -> NonFiniteError:
    """The error for the first of `weights` [R, C] that is NaN or infinite; one must be."""
    place = int((~torch.isfinite(weights)).reshape(-1).to(torch.uint8).argmax())
    row, column = divmod(place, weights.shape[1])
    scale = float(scale_bits[row, column // group].reshape(1).view(torch.bfloat16))
    name = str(weights.dtype).removeprefix("torch.")
    return NonFiniteError(
        f"the weight at row {row}, column {column} is not a finite {name} (its group's scale is {scale!r})",
        remedy="dequantize to bfloat16, which holds every scale of a release" if name == "float16" else "",
    )
