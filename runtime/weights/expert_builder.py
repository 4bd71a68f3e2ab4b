"""Routed experts from their stacks, in the form that the device multiplies."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memopt.kernels.dequantize import dequantize_float8, dequantize_int4
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.runtime.model.experts import Experts, Int4Experts, MlpExperts
from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.weights.expert_tensors import ExpertTensors
from memopt.runtime.weights.linear_builder import fp8_scale, int4_form, int4_weight, plain_weight
from memopt.runtime.weights.linears import DenseLinear, Fp8BlockLinear, StackedLinear
from memopt.runtime.weights.load_options import LoadOptions
from memopt.runtime.weights.sized_weights import require_size, share_of_rank

# What expert_tensors.py keeps apart: gate's and up's rows in one stack, down's in another.
Half = Literal["gate_up", "down"]


def build_experts(config: ModelConfig, experts: ExpertTensors, options: LoadOptions) -> Experts:
    """This rank's experts. Raises ShapeError, UnknownTensorError, UnsupportedError for what does not fit."""
    experts.require_no_more()
    first = experts.names.first
    if experts.form == "int4":
        experts.check_shapes()
        stacks = _int4_stack(experts, "gate_up"), _int4_stack(experts, "down")
        _check_sizes(config, experts, options, *((stack.num_rows, stack.num_columns) for stack in stacks))
        if options.weights == "released":
            return Int4Experts(int4_form(stacks[0], options), int4_form(stacks[1], options), first)
        return MlpExperts(_mlps(_expanded(stacks[0], options), _expanded(stacks[1], options)), first)
    gate_up, down = experts.take("gate_up", "weight"), experts.take("down", "weight")
    _check_sizes(config, experts, options, tuple(gate_up.shape[1:]), tuple(down.shape[1:]))
    if experts.form == "fp8":
        gates = _fp8_parts(gate_up, experts.take("gate_up", "weight_scale"), 2, experts.name, options)
        downs = _fp8_parts(down, experts.take("down", "weight_scale"), 1, experts.name, options)
        return MlpExperts(tuple(GatedMlp(*pair) for pair in zip(gates, downs, strict=True)), first)
    return MlpExperts(
        _mlps(plain_weight(gate_up, options, experts.name), plain_weight(down, options, experts.name)), first
    )


def _check_sizes(
    config: ModelConfig,
    experts: ExpertTensors,
    options: LoadOptions,
    gate_up: tuple[int, ...],
    down: tuple[int, ...],
) -> None:
    """ShapeError unless an expert's two halves are what config.json asks for; whole ones where experts are parallel."""
    inner, hidden = config.moe.intermediate_size, config.hidden_size
    if not options.is_expert_parallel:
        inner = share_of_rank(inner, "rows of an expert", options)
    require_size(f"{experts.name}.{experts.names.first}.gate_proj and up_proj", gate_up, (2 * inner, hidden))
    require_size(f"{experts.name}.{experts.names.first}.down_proj", down, (hidden, inner))


def _int4_stack(experts: ExpertTensors, half: Half) -> Int4Weight:
    return int4_weight(experts.take(half, "weight_packed"), experts.take(half, "weight_scale"), experts.name)


def _expanded(stack: Int4Weight, options: LoadOptions) -> Tensor:
    """[E, N, K] of activations' type, rounded to BF16; an expert at a time."""
    num_experts = stack.packed.shape[0]
    expanded = torch.empty(num_experts, stack.num_rows, stack.num_columns, dtype=options.dtype, device=options.device)
    for index in range(num_experts):
        weight = stack.expert(index)
        expanded[index] = dequantize_int4(weight.packed, weight.scale_bits, weight.group_size, torch.bfloat16)
    return expanded


def _mlps(gate_up: Tensor, down: Tensor) -> tuple[GatedMlp, ...]:
    return tuple(GatedMlp(DenseLinear(first), DenseLinear(second)) for first, second in zip(gate_up, down, strict=True))


def _fp8_parts(codes: Tensor, scales: Tensor, num_parts: int, name: str, options: LoadOptions) -> list[Linear]:
    """A projection an expert; gate and up apart, since their scales' blocks may not meet at a block's end."""
    codes, scales = codes.to(options.device), scales.to(options.device)
    linears: list[Linear] = []
    for expert_codes, expert_scales in zip(codes, scales, strict=True):
        parts = [
            _fp8_linear(part, scale, name, options)
            for part, scale in zip(expert_codes.chunk(num_parts), expert_scales.chunk(num_parts), strict=True)
        ]
        linears.append(StackedLinear(tuple(parts)) if num_parts > 1 else parts[0])
    return linears


def _fp8_linear(codes: Tensor, scale: Tensor, name: str, options: LoadOptions) -> Linear:
    scale, block = fp8_scale(codes, scale, name)
    if options.weights == "bf16":
        return DenseLinear(dequantize_float8(codes, scale, block, torch.bfloat16).to(options.dtype))
    return Fp8BlockLinear(codes, scale, block)
