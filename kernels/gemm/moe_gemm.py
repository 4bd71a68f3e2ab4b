"""The routed experts of a mixture-of-experts layer: checks, and the choice of an implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.gemm.int4_gemm import AnyInt4Weight, check_form, float_types
from memopt.kernels.gemm.moe_gemm_cpu import moe_gemm_cpu
from memopt.kernels.gemm.moe_gemm_reference import moe_gemm_reference
from memopt.kernels.gemm.planar import PlanarWeight


def moe_gemm(
    x: Tensor,
    gate_up: AnyInt4Weight,
    down: AnyInt4Weight,
    expert_ids: Tensor,
    expert_weights: Tensor,
    out: Tensor | None = None,
    *,
    is_checked: bool = False,
) -> Tensor:
    """[T, H] = sum over a token's choices j of weight[j] * down[id[j]] @ (silu(gate) * up), in x's type.

    x [T, H] BF16 (on the CPU float32 as well). `gate_up` is a stack of [2 * I, H] (gate's rows first), `down` one of
    [H, I]: PlanarWeight on a GPU, any form on the CPU. `expert_ids` int32 or int64 [T, top_k]: an id outside
    0..E - 1 is an expert of another rank and adds nothing. `expert_weights` float32 [T, top_k]. Sums are float32, the
    hidden values are rounded to x's type, and choices are added in their order: equal input gives equal bytes. For
    float32 x a token's result does not depend on the other tokens, unless the form is TorchInt4Weight.
    Shared experts and the sum over ranks are the caller's. `out` [T, H] is filled and returned if given. `is_checked`:
    the caller vouches for forms, types and shapes.
    Raises ShapeError for shapes, types, strides or devices that do not fit, UsageError for a form without a kernel.
    """
    if not is_checked:
        _check(x, gate_up, down, expert_ids, expert_weights)
    if out is None:
        out = torch.empty(x.shape[0], down.num_rows, dtype=x.dtype, device=x.device)
    elif not is_checked:
        require_tensor("out", out, (x.shape[0], down.num_rows), x.dtype, like=x)
    if isinstance(gate_up, PlanarWeight) and isinstance(down, PlanarWeight):
        if x.device.type == "cpu":
            return moe_gemm_reference(x, gate_up, down, expert_ids, expert_weights, out)
        from memopt.kernels.gemm.moe_gemm_triton import moe_gemm_triton

        return moe_gemm_triton(x, gate_up, down, expert_ids, expert_weights, out)
    if isinstance(gate_up, PlanarWeight) or isinstance(down, PlanarWeight):
        raise UsageError("of gate_up and down one is planar and the other not", remedy="give both the same form")
    return moe_gemm_cpu(x, gate_up, down, expert_ids, expert_weights, out)


def _check(x: Tensor, gate_up: AnyInt4Weight, down: AnyInt4Weight, expert_ids: Tensor, expert_weights: Tensor) -> None:
    num_experts = down.num_experts
    if num_experts is None:
        raise ShapeError(f"down is one weight [{down.num_rows}, {down.num_columns}], but a stack of experts is needed")
    for weight in (gate_up, down):
        check_form(x, weight, num_experts=num_experts)
    if gate_up.num_rows != 2 * down.num_columns or gate_up.num_columns != down.num_rows:
        raise ShapeError(
            f"gate and up are [{gate_up.num_rows}, {gate_up.num_columns}] an expert, but down [{down.num_rows}, "
            f"{down.num_columns}] needs [{2 * down.num_columns}, {down.num_rows}]"
        )
    require_tensor("x", x, (None, gate_up.num_columns), *float_types(x))
    require_tensor("expert_ids", expert_ids, (x.shape[0], None), torch.int32, torch.int64, like=x)
    require_tensor("expert_weights", expert_weights, tuple(expert_ids.shape), torch.float32, like=x)
