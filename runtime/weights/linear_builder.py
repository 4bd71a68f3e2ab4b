"""A projection from its stored tensors: which form it has follows from the tensors that are there."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from memopt.errors import ShapeError, UnsupportedError
from memopt.kernels.dequantize import dequantize_float8, dequantize_int4
from memopt.kernels.float8_reference import decode_ue8m0
from memopt.kernels.gemm.int4_gemm import AnyInt4Weight
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import planar_weight
from memopt.kernels.gemm.torch_int4_weight import torch_int4_weight
from memopt.kernels.layout import CODES_PER_WORD, FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS
from memopt.runtime.model.linear import Linear
from memopt.runtime.weights.layer_tensors import FP8_SCALES, LayerTensors
from memopt.runtime.weights.linears import DenseLinear, Fp8BlockLinear, Int4Linear
from memopt.runtime.weights.load_options import LoadOptions


def build_linear(tensors: LayerTensors, module_name: str, options: LoadOptions, *, has_bias: bool = False) -> Linear:
    """The projection `module_name` ("self_attn.o_proj"), whose tensors are taken; a bias only where the model has one.

    INT4 (weight_packed, weight_scale, weight_shape), FP8 (weight and a scale a block, row or tensor), or plain. Raises
    MissingTensorError, ShapeError for parts that do not fit each other, UnsupportedError for another type.
    """
    bias = tensors.take(f"{module_name}.bias").to(options.device, options.dtype) if has_bias else None
    linear = _weight(tensors, module_name, options, bias)
    if bias is not None and tuple(bias.shape) != (linear.num_rows,):
        raise ShapeError(
            f"the bias is {list(bias.shape)}, but the weight has {linear.num_rows} rows",
            tensor=f"{tensors.prefix}{module_name}.bias",
        )
    return linear


def _weight(tensors: LayerTensors, module_name: str, options: LoadOptions, bias: Tensor | None) -> Linear:
    if tensors.has(f"{module_name}.weight_packed"):
        return _int4_linear(tensors, module_name, options, bias)
    weight = tensors.take(f"{module_name}.weight")
    if weight.dtype != torch.float8_e4m3fn:
        return DenseLinear(plain_weight(weight, options, tensors.prefix + module_name), bias)
    scale = next((tensors.take(name) for part in FP8_SCALES if tensors.has(name := f"{module_name}.{part}")), None)
    if scale is None:
        scale = tensors.take(f"{module_name}.{FP8_SCALES[0]}")
    scale, block = fp8_scale(weight, scale, tensors.prefix + module_name)
    weight, scale = weight.to(options.device), scale.to(options.device)
    if options.weights == "bf16":
        return DenseLinear(dequantize_float8(weight, scale, block, torch.bfloat16).to(options.dtype), bias)
    return Fp8BlockLinear(weight, scale, block, bias)


def build_dense(tensors: LayerTensors, module_name: str, options: LoadOptions) -> Tensor:
    """The weight [N, K] of a projection, expanded whatever its form, in the type of activations; for `kv_b_proj`."""
    linear = build_linear(tensors, module_name, LoadOptions(options.compute, "bf16", options.device))
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"{module_name} was not expanded")
    return linear.weight


def plain_weight(weight: Tensor, options: LoadOptions, name: str) -> Tensor:
    """A BF16 or F32 weight in the type of activations, on the device. Raises UnsupportedError for another type."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f"weights of type {weight.dtype} are not multiplied",
            tensor=name,
            remedy="compress the checkpoint with a recipe that stores BF16, FP8 or INT4",
        )
    return weight.to(options.device, options.dtype)


def fp8_scale(weight: Tensor, scale: Tensor, name: str) -> tuple[Tensor, tuple[int, int]]:
    """The scale as float32 [block rows, block columns], and the block (rows, columns), told from its shape.

    [] or [1]: one scale; [N] or [N, 1]: one a row; else blocks of 128 x 128. Raises ShapeError for another shape.
    """
    rows, columns = weight.shape
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = decode_ue8m0(scale.view(torch.uint8))
    values = scale.to(torch.float32)
    if values.numel() == 1:
        return values.reshape(1, 1).expand(rows, 1).contiguous(), (1, columns)
    if tuple(values.shape) in ((rows,), (rows, 1)):
        return values.reshape(rows, 1).contiguous(), (1, columns)
    block = (FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS)
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(values.shape) != wanted:
        raise ShapeError(
            f"the FP8 weight {[rows, columns]} has scales {list(scale.shape)}, but one for the tensor, one a row or "
            f"{list(wanted)} for blocks of {list(block)} are needed",
            tensor=name,
            remedy="expand it with `memopt dequantize`, which reads blocks of any size, or compress it to INT4",
        )
    return values.contiguous(), block


def int4_form(weight: Int4Weight, options: LoadOptions) -> AnyInt4Weight:
    """The form of a weight or stack that the device multiplies fastest, or exactly where activations are float32."""
    if torch.device(options.device).type != "cpu":
        moved = Int4Weight(weight.packed.to(options.device), weight.scale_bits.to(options.device), weight.group_size)
        return planar_weight(moved)
    if options.compute == "bfloat16":
        with suppress(UnsupportedError):
            return torch_int4_weight(weight)
    return weight


def int4_weight(packed: Tensor, scale: Tensor, name: str) -> Int4Weight:
    """Codes int32 [.., N, K / 8] and BF16 scales [.., N, G] as one weight or stack; the group follows from G."""
    if scale.dtype != torch.bfloat16 or not scale.shape[-1]:
        raise ShapeError(f"INT4 scales are {scale.dtype} {list(scale.shape)}, but bfloat16 are needed", tensor=name)
    columns, groups = packed.shape[-1] * CODES_PER_WORD, scale.shape[-1]
    return Int4Weight(packed.contiguous(), scale.contiguous(), None if groups == 1 else columns // groups)


def _int4_linear(tensors: LayerTensors, module_name: str, options: LoadOptions, bias: Tensor | None) -> Linear:
    name = tensors.prefix + module_name
    packed, scale = tensors.take(f"{module_name}.weight_packed"), tensors.take(f"{module_name}.weight_scale")
    check_weight_shape(packed, tensors.take(f"{module_name}.weight_shape"), name)
    weight = int4_weight(packed, scale, name)
    if options.weights == "bf16":
        expanded = dequantize_int4(weight.packed, weight.scale_bits, weight.group_size, torch.bfloat16)
        return DenseLinear(expanded.to(options.device, options.dtype), bias)
    return Int4Linear(int4_form(weight, options), bias)


def check_weight_shape(packed: Tensor, shape: Tensor, name: str) -> None:
    """ShapeError unless `weight_shape` says what the packed words hold."""
    held = [packed.shape[0], packed.shape[1] * CODES_PER_WORD]
    if shape.tolist() != held:
        raise ShapeError(f"weight_shape is {shape.tolist()}, but the packed words hold {held}", tensor=name)
