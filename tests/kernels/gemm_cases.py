"""INT4 weights and products that the tests of the GEMM kernels share."""

from __future__ import annotations

from dataclasses import replace

import torch
from guarded_memory import guarded
from hypothesis import strategies as st
from torch import Tensor

from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import PlanarWeight, planar_weight

# Half a unit in the last place of BF16, relative to the value, and what float32 sums add.
BF16_TOLERANCE = 2.0**-8 * 1.02


def random_weight(
    num_rows: int, num_columns: int, group_size: int | None, num_experts: int | None = None
) -> Int4Weight:
    """Any words under normal scales of both signs; a stack if `num_experts` is given."""
    stack = () if num_experts is None else (num_experts,)
    words = torch.randint(-(1 << 31), 1 << 31, (*stack, num_rows, num_columns // 8), dtype=torch.int64)
    scales = torch.randn(*stack, num_rows, num_columns // (group_size or num_columns)) / 32
    return Int4Weight(words.to(torch.int32), scales.to(torch.bfloat16), group_size)


def guarded_planar(weight: Int4Weight) -> PlanarWeight:
    """The planar form, words and scales in memory that ends where they end (guarded_memory.py)."""
    planar = planar_weight(weight)
    return replace(planar, words=guarded(planar.words), scales=guarded(planar.scales))


def exact_values(weight: Int4Weight) -> Tensor:
    """float64 [.., N, K], by arithmetic of its own: a word's nibbles from the low end, less 8, times the scale."""
    nibbles = torch.stack([(weight.packed >> (4 * j)) & 15 for j in range(8)], dim=-1).flatten(-2)
    scale = weight.scale_bits.view(torch.bfloat16).double()
    return (nibbles.double() - 8) * scale.repeat_interleave(nibbles.shape[-1] // scale.shape[-1], dim=-1)


def largest_error(result: Tensor, expected: Tensor, floor: float = 0.01) -> float:
    """Largest difference, relative to the value or to `floor` times the largest one; infinite for a NaN."""
    if not expected.numel():
        return 0.0
    smallest = float(expected.abs().max()) * floor + 1e-30
    error = ((result.double() - expected).abs() / expected.abs().clamp(min=smallest)).max()
    return float(torch.nan_to_num(error, nan=torch.inf))


def random_choices(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids int32 [T, top_k] of different experts a token, and positive weights float32 that sum to one."""
    scores = torch.rand(num_tokens, num_experts)
    weights, ids = torch.topk(torch.softmax(scores, dim=1), top_k)
    return ids.to(torch.int32), weights / weights.sum(dim=1, keepdim=True)


def exact_moe(x: Tensor, gate_up: Int4Weight, down: Int4Weight, ids: Tensor, weights: Tensor) -> Tensor:
    """float64 [T, H], token by token, without rounding the hidden values; ids of no expert add nothing."""
    up_values, down_values = exact_values(gate_up), exact_values(down)
    result = torch.zeros(x.shape[0], down.num_rows, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[token, choice])
            if 0 <= expert < up_values.shape[0]:
                gate, up = (up_values[expert] @ x[token].double()).chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
                result[token] += weights[token, choice].double() * (down_values[expert] @ hidden)
    return result


@st.composite
def weights(draw: st.DrawFn, *, planar: bool = True) -> Int4Weight:
    """A small weight of a legal shape: any group size, whole blocks of 256 codes and tails. Without `planar` K may be
    any multiple of 8 under a channel scale."""
    group = draw(st.sampled_from([32, 64, 128, None]))
    unit = group or draw(st.sampled_from([8, 32]))
    columns = unit * draw(st.integers(1, 640 // unit))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    return random_weight(
        draw(st.integers(1, 9)), columns, group, draw(st.sampled_from([None, 1, 3])) if planar else None
    )
