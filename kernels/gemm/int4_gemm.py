"""The INT4 x BF16 GEMM of decode: checks, and the choice of an implementation by the weight's form."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.gemm.int4_gemm_cpu import int4_gemm_cpu
from memopt.kernels.gemm.int4_gemm_reference import int4_gemm_reference
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import PlanarWeight
from memopt.kernels.gemm.torch_int4_weight import TorchInt4Weight, torch_int4_gemm, torch_int4_product

# The three forms of one weight: of the release, for the GPU kernels, for torch's CPU kernel.
AnyInt4Weight = Int4Weight | PlanarWeight | TorchInt4Weight


def check_form(x: Tensor, weight: AnyInt4Weight, *, num_experts: int | None) -> None:
    """UsageError for a weight whose form x's device cannot multiply, ShapeError for one that is (not) a stack."""
    if weight.num_experts != num_experts:
        found = "one weight" if weight.num_experts is None else f"a stack of {weight.num_experts}"
        wanted = "one weight" if num_experts is None else f"a stack of {num_experts}"
        raise ShapeError(f"the INT4 weight is {found}, but {wanted} is needed")
    if x.device != weight.device:
        raise ShapeError(f"x is on {x.device}, the INT4 weight on {weight.device}")
    if x.device.type != "cpu" and not isinstance(weight, PlanarWeight):
        raise UsageError(
            f"an INT4 weight on {x.device} is a {type(weight).__name__}, but the GPU kernel reads planar words",
            remedy="repack it once at load time with planar_weight",
        )


def float_types(x: Tensor) -> tuple[torch.dtype, ...]:
    """The types that x may have: BF16, on the CPU float32 as well."""
    return (torch.bfloat16, torch.float32) if x.device.type == "cpu" else (torch.bfloat16,)


def int4_gemm(x: Tensor, weight: AnyInt4Weight, out: Tensor | None = None) -> Tensor:
    """[M, N] = x [M, K] @ weight.T with float32 sums, in x's type: BF16, or float32 on the CPU.

    Made for decode, M up to 16. More tokens are multiplied 16 at a time, each time over all the weight: right, but
    prefill is better served by a BF16 GEMM on dequantized weights. A weight on a GPU must be a PlanarWeight; on the
    CPU any form will do, TorchInt4Weight is the fastest and PlanarWeight is multiplied by the reference. `out` [M, N]
    is filled and returned if given. On a GPU, and for float32 x unless the form is TorchInt4Weight, a token's result
    does not depend on the other tokens.
    Raises ShapeError for shapes, types, strides or devices that do not fit, UsageError for a form without a kernel.
    """
    check_form(x, weight, num_experts=None)
    require_tensor("x", x, (None, weight.num_columns), *float_types(x))
    if out is None and isinstance(weight, TorchInt4Weight) and x.dtype == torch.bfloat16 and x.shape[0]:
        return torch_int4_product(x, weight)
    if out is None:
        out = torch.empty(x.shape[0], weight.num_rows, dtype=x.dtype, device=x.device)
    require_tensor("out", out, (x.shape[0], weight.num_rows), x.dtype, like=x)
    if not out.numel():
        return out
    if isinstance(weight, TorchInt4Weight):
        return torch_int4_gemm(x, weight, out)
    if isinstance(weight, Int4Weight):
        return int4_gemm_cpu(x, weight, out)
    if x.device.type == "cpu":
        return int4_gemm_reference(x, weight, out)
    from memopt.kernels.gemm.int4_gemm_triton import int4_gemm_triton

    return int4_gemm_triton(x, weight, out)
