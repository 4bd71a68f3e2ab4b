"""INT4 GEMM and grouped MoE at decode, eight-way tensor parallelism: bytes of packed weights against the bandwidth.

Weights are random words and scales in planar order. A batch of random routing touches most experts once or twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.gpu.case import GpuCase, Prepared
from memopt.kernels.gemm.int4_gemm import int4_gemm
from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.moe_gemm import moe_gemm
from memopt.kernels.gemm.moe_gemm_reference import moe_gemm_reference
from memopt.kernels.gemm.planar import PlanarWeight, checkpoint_weight, num_planar_blocks, num_scale_words
from memopt.kernels.layout import BF16_BITS, BITS_PER_BYTE, INT4_BITS, PLANAR_BLOCK_WORDS

GEMM_GOAL, MOE_GOAL = 0.60, 0.50
GROUP_SIZE = 32
BF16_BYTES = BF16_BITS // BITS_PER_BYTE
# Of the largest value. BF16 keeps 2**-9; a hidden value may round to either neighbour.
GEMM_TOLERANCE, MOE_TOLERANCE = 2.0**-8, 2.0**-7
SCALE_EXPONENTS = (118, 124)


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model; `hidden_size` is one rank's share of an expert."""

    name: str
    width: int
    hidden_size: int
    num_experts: int
    top_k: int = 8


GLM_5_2 = Experts("glm-5.2-tp8", 6144, 256, 256)
KIMI_K2_6 = Experts("kimi-k2.6-tp8", 7168, 256, 384)
# Rows and columns on one of eight ranks: an output projection, a dense gate and up, and one that no rank shares.
MATRICES = {
    "glm-5.2-o_proj-tp8": (6144, 2048),
    "kimi-k2.6-dense_gate_up-tp8": (4608, 7168),
    "glm-5.2-dense_gate_up-tp1": (24576, 6144),
}


def cases() -> Iterator[GpuCase]:
    """Every matrix at 1 and 16 tokens, both models' experts at 64 tokens as well."""
    for name, (num_rows, num_columns) in MATRICES.items():
        for num_tokens in (1, 16):
            yield GpuCase(
                f"int4_gemm/{name}-{num_tokens}-tokens",
                _gemm(num_rows, num_columns, num_tokens),
                GEMM_GOAL,
                "bandwidth",
            )
    for model in (GLM_5_2, KIMI_K2_6):
        for num_tokens in (1, 16, 64):
            yield GpuCase(f"moe_gemm/{model.name}-{num_tokens}-tokens", _moe(model, num_tokens), MOE_GOAL, "bandwidth")


def _gemm(num_rows: int, num_columns: int, num_tokens: int) -> Callable[[torch.Generator], Prepared]:
    def prepare(generator: torch.Generator) -> Prepared:
        weight = _planar((), num_rows, num_columns, generator)
        x = _values((num_tokens, num_columns), generator)
        out = torch.empty(num_tokens, num_rows, dtype=torch.bfloat16, device=generator.device)
        wide = weight_values(weight).to(torch.bfloat16)
        product = torch.empty_like(out)
        return Prepared(
            run=lambda: _run(lambda: int4_gemm(x, weight, out)),
            outputs=(out,),
            check=lambda: _error(out, x.double() @ weight_values(weight).double().T),
            tolerance=GEMM_TOLERANCE,
            bytes_moved=_needed_bytes(weight) + (x.numel() + out.numel()) * BF16_BYTES,
            flops=2 * num_tokens * num_rows * num_columns,
            peers={"torch bf16": lambda: _run(lambda: torch.matmul(x, wide.T, out=product))},
        )

    return prepare


def _moe(model: Experts, num_tokens: int) -> Callable[[torch.Generator], Prepared]:
    def prepare(generator: torch.Generator) -> Prepared:
        gate_up = _planar((model.num_experts,), 2 * model.hidden_size, model.width, generator)
        down = _planar((model.num_experts,), model.width, model.hidden_size, generator)
        x = _values((num_tokens, model.width), generator)
        scores = torch.rand(num_tokens, model.num_experts, generator=generator, device=generator.device)
        weights, chosen = torch.topk(torch.softmax(scores, dim=1), model.top_k)
        ids = chosen.to(torch.int32)
        out = torch.empty_like(x)
        touched = int(torch.unique(ids).numel())
        expert_bytes = _needed_bytes(gate_up) + _needed_bytes(down)

        def check() -> float:
            expected = torch.empty(x.shape, device=x.device)
            moe_gemm_reference(x, gate_up, down, ids, weights, expected)
            return _error(out, expected)

        return Prepared(
            run=lambda: _run(lambda: moe_gemm(x, gate_up, down, ids, weights, out)),
            outputs=(out,),
            check=check,
            tolerance=MOE_TOLERANCE,
            bytes_moved=touched * expert_bytes + 2 * x.numel() * BF16_BYTES,
            flops=6 * num_tokens * model.top_k * model.width * model.hidden_size,
            peers=_vllm_moe(x, gate_up, down, ids, weights),
        )

    return prepare


def _planar(stack: tuple[int, ...], num_rows: int, num_columns: int, generator: torch.Generator) -> PlanarWeight:
    """Any words under positive scales of 2**-9 to 2**-3."""
    device = generator.device
    words = torch.randint(
        -(1 << 31),
        1 << 31,
        (*stack, num_planar_blocks(num_columns), num_rows, PLANAR_BLOCK_WORDS),
        generator=generator,
        device=device,
        dtype=torch.int32,
    )
    low, high = (exponent << (BF16_BITS - 9) for exponent in SCALE_EXPONENTS)
    shape = (2, *stack, num_scale_words(num_columns, GROUP_SIZE), num_rows)
    halves = torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)
    return PlanarWeight(words, halves[0] | (halves[1] << BF16_BITS), num_rows, num_columns, GROUP_SIZE)


def _needed_bytes(weight: PlanarWeight) -> int:
    """Bytes of one weight's codes and scales, without padding."""
    num_weights = weight.num_rows * weight.num_columns
    return (num_weights * INT4_BITS + num_weights // GROUP_SIZE * BF16_BITS) // BITS_PER_BYTE


def _values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16)


def _run(launch: Callable[[], Tensor]) -> None:
    launch()


def _error(out: Tensor, expected: Tensor) -> float:
    """Largest difference in parts of the largest value; infinite for a NaN."""
    error = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(torch.nan_to_num(error, nan=torch.inf))


def _vllm_moe(
    x: Tensor, gate_up: PlanarWeight, down: PlanarWeight, ids: Tensor, weights: Tensor
) -> Mapping[str, Callable[[], None]]:
    """vLLM's Triton experts on the same weights in the checkpoint's order, if it is installed."""
    if find_spec("vllm") is None:
        return {}
    first, second = (checkpoint_weight(weight) for weight in (gate_up, down))

    def scales(weight: Int4Weight) -> Tensor:
        return weight.scale_bits.view(torch.bfloat16)

    def experts() -> None:
        from vllm.model_executor.layers.fused_moe import fused_experts
        from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config

        config = int4_w4a16_moe_quant_config(
            w1_scale=scales(first), w2_scale=scales(second), w1_zp=None, w2_zp=None, block_shape=[0, GROUP_SIZE]
        )
        fused_experts(
            x, first.packed.view(torch.uint8), second.packed.view(torch.uint8), weights, ids, quant_config=config
        )

    return {"vllm fused_experts": experts}
