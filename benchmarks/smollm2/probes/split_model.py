"""SmolLM2 as glm4_moe, whole in memory, its routed experts side by side as one wide MLP.

The proof model's router gives every expert weight 1 (benchmarks.smollm2.as_glm4_moe), so that all routed experts of a
layer are one gated MLP of E x I neurons: three products instead of 3 E.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from memopt.compressor.checkpoint.checkpoint import open_checkpoint
from memopt.errors import UnsupportedError
from memopt.kernels.float8_reference import weight_values
from memopt.kernels.layout import FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import ModelConfig

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """`gate`, `up` [N, H] and `down` [H, N] of N neurons: float32 of routed experts, else bfloat16."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """Norms float32 [H]; `qkv` [.., H] and `output` [H, ..] bfloat16; `routed` float32, as the FP8 source has it."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    output: Tensor
    shared: GatedWeights
    routed: GatedWeights


@dataclass(frozen=True, slots=True)
class SplitModel:
    """`embedding` and `head` bfloat16 [V, H], `norm` float32 [H]."""

    config: ModelConfig
    embedding: Tensor
    norm: Tensor
    head: Tensor
    layers: tuple[SplitLayer, ...]

    @property
    def routed(self) -> tuple[GatedWeights, ...]:
        """The source's routed experts, layer by layer."""
        return tuple(layer.routed for layer in self.layers)


def read_split_model(folder: Path) -> SplitModel:
    """Read the checkpoint that `benchmarks.smollm2.prepare` wrote; UnsupportedError for a router that weighs."""
    checkpoint = open_checkpoint(folder)
    config = parse_model_config(checkpoint.config.raw)
    moe = config.moe
    if moe.experts_per_token != moe.num_experts or moe.routed_scaling_factor != moe.num_experts:
        raise UnsupportedError(
            f"{moe.experts_per_token} of {moe.num_experts} experts, factor {moe.routed_scaling_factor:g}: the router "
            "chooses or weighs",
            remedy="use the proof model of benchmarks.smollm2.prepare",
        )
    stored: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        stored |= load_file(folder / file)

    def values(name: str) -> Tensor:
        """float32, exactly what is stored."""
        scale = stored.get(name + SCALE_SUFFIX)
        if scale is None:
            return stored[name].to(torch.float32)
        return weight_values(stored[name], scale, (FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS))

    def layer(number: int) -> SplitLayer:
        prefix = f"model.layers.{number}"

        def projections(place: str, *names: str) -> list[Tensor]:
            return [values(f"{prefix}.{place}.{name}_proj.weight") for name in names]

        experts = [projections(f"mlp.experts.{e}", "gate", "up", "down") for e in range(moe.num_experts)]
        gates, ups, downs = zip(*experts, strict=True)
        return SplitLayer(
            input_norm=values(f"{prefix}.input_layernorm.weight"),
            post_norm=values(f"{prefix}.post_attention_layernorm.weight"),
            qkv=torch.cat(projections("self_attn", "q", "k", "v")).to(torch.bfloat16),
            output=projections("self_attn", "o")[0].to(torch.bfloat16),
            shared=as_bfloat16(GatedWeights(*projections("mlp.shared_experts", "gate", "up", "down"))),
            routed=GatedWeights(torch.cat(gates), torch.cat(ups), torch.cat(downs, dim=1)),
        )

    return SplitModel(
        config=config,
        embedding=values("model.embed_tokens.weight").to(torch.bfloat16),
        norm=values("model.norm.weight"),
        head=values("lm_head.weight").to(torch.bfloat16),
        layers=tuple(layer(number) for number in range(config.num_layers)),
    )


def as_bfloat16(weights: GatedWeights) -> GatedWeights:
    """What products take."""
    return GatedWeights(*(tensor.to(torch.bfloat16) for tensor in (weights.gate, weights.up, weights.down)))
