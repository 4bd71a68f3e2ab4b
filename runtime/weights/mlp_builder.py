"""Dense MLPs and mixture-of-experts blocks from their stored tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from memopt.runtime.model.linear import Linear
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.weights.expert_builder import build_experts
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linears import DenseLinear, RowParallelLinear, StackedLinear
from memopt.runtime.weights.load_options import LoadOptions
from memopt.runtime.weights.sized_weights import share_of_rank, sized_linear, sized_tensor


def build_mlp(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> GatedMlp | MoeBlock:
    """The MLP of layer number `layer`: one, summed over ranks, in the first layers, experts in the others.

    Raises MissingTensorError, ShapeError for a tensor that does not fit the config, UnsupportedError.
    """
    moe = config.moe
    if layer < config.num_dense_layers:
        mlp = build_gated_mlp(config, tensors, "mlp", config.intermediate_size, options)
        return GatedMlp(mlp.gate_up, RowParallelLinear(mlp.down, options.communicator))
    # float32 whatever activations are: a router's choice is not to hang on their rounding.
    exact = replace(options, compute="float32", device="cpu")
    weight = sized_tensor(tensors, "mlp.gate.weight", (moe.num_experts, config.hidden_size), exact)
    bias = sized_tensor(tensors, "mlp.gate.e_score_correction_bias", (moe.num_experts,), exact)
    shared = None
    if moe.num_shared_experts:
        size = moe.num_shared_experts * moe.intermediate_size
        shared = build_gated_mlp(config, tensors, "mlp.shared_experts", size, options)
    return MoeBlock(
        router_weight=weight.to(options.device),
        router_bias=bias.to(options.device),
        config=moe,
        experts=build_experts(config, tensors.take_experts(), options),
        shared=shared,
        communicator=options.communicator,
    )


def build_gated_mlp(
    config: ModelConfig, tensors: LayerTensors, module_name: str, intermediate_size: int, options: LoadOptions
) -> GatedMlp:
    """gate, up and down of `module_name`, not summed over ranks; `intermediate_size` counts all ranks' rows."""
    inner, hidden = share_of_rank(intermediate_size, "rows of an MLP", options), config.hidden_size
    gate, up = (sized_linear(tensors, f"{module_name}.{part}_proj", inner, hidden, options) for part in ("gate", "up"))
    return GatedMlp(joined_linear(gate, up), sized_linear(tensors, f"{module_name}.down_proj", hidden, inner, options))


def joined_linear(first: Linear, second: Linear) -> Linear:
    """Both projections of one x, the first's rows before the second's: one weight where both are plain."""
    if isinstance(first, DenseLinear) and isinstance(second, DenseLinear) and first.bias is None is second.bias:
        return DenseLinear(torch.cat((first.weight, second.weight)))
    return StackedLinear((first, second))
