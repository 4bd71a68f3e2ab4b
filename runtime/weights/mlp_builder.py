"""Dense MLPs and mixture-of-experts blocks from their stored tensors."""

from __future__ import annotations

import torch

from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.weights.expert_builder import build_experts
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linear_builder import build_linear
from memopt.runtime.weights.linears import DenseLinear, RowParallelLinear, StackedLinear
from memopt.runtime.weights.load_options import LoadOptions


def build_mlp(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> GatedMlp | MoeBlock:
    """The MLP of layer number `layer`: one, summed over ranks, in the first layers, experts in the others."""
    if layer < config.num_dense_layers:
        mlp = build_gated_mlp(tensors, "mlp", options)
        return GatedMlp(mlp.gate_up, RowParallelLinear(mlp.down, options.communicator))
    router = tensors.take("mlp.gate.weight"), tensors.take("mlp.gate.e_score_correction_bias")
    weight, bias = (tensor.to(options.device, torch.float32) for tensor in router)
    has_shared = config.moe.num_shared_experts > 0
    return MoeBlock(
        router_weight=weight,
        router_bias=bias,
        config=config.moe,
        experts=build_experts(tensors.take_experts(), options),
        shared=build_gated_mlp(tensors, "mlp.shared_experts", options) if has_shared else None,
        communicator=options.communicator,
    )


def build_gated_mlp(tensors: LayerTensors, module_name: str, options: LoadOptions) -> GatedMlp:
    """gate, up and down of `module_name`, not summed over ranks."""
    gate, up, down = (build_linear(tensors, f"{module_name}.{part}_proj", options) for part in ("gate", "up", "down"))
    return GatedMlp(joined_linear(gate, up), down)


def joined_linear(first: Linear, second: Linear) -> Linear:
    """Both projections of one x, the first's rows before the second's: one weight where both are plain."""
    if isinstance(first, DenseLinear) and isinstance(second, DenseLinear) and first.bias is None is second.bias:
        return DenseLinear(torch.cat((first.weight, second.weight)))
    return StackedLinear((first, second))
