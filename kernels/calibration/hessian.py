"""Adds tokens to the Hessians of GPTQ: the checks, and the choice of an implementation."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.calibration.hessian_cpu import accumulate_hessian_cpu
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.layout import HESSIAN_CHUNK_TOKENS


def accumulate_hessian(
    hessian: Tensor,
    tokens: Tensor,
    expert_offsets: Tensor | None = None,
    *,
    chunk_tokens: int = HESSIAN_CHUNK_TOKENS,
) -> None:
    """hessian[e] += X_e^T X_e in place, where X_e are the rows of `tokens` that went to expert e.

    `hessian` float32 [E, K, K], symmetric, or [K, K] for one matrix without `expert_offsets`; `tokens` bfloat16 [T, K],
    sorted by expert; `expert_offsets` int64 [E + 1] on the same device: expert e has rows offsets[e] to offsets[e + 1]
    (none is fine). No factor is applied: GPTQ's 2 / n, or none, is the caller's, and `gptq_solve` needs neither.

    Sums are float32 of exact BF16 products, in a fixed order: an expert's rows in chunks of `chunk_tokens`, each chunk
    summed by itself from zero, then added to the Hessian. So the bits are the same from run to run, and the same for
    one call as for several if every call but the last gives an expert a multiple of `chunk_tokens` rows. The result is
    symmetric to the bit. Reads offsets back to check them: one synchronisation on a GPU.
    Raises ShapeError for shapes, dtypes, strides and devices, UsageError for offsets that do not cover the tokens.
    """
    batched, offsets = as_experts(hessian, tokens, expert_offsets)
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens is {chunk_tokens}", remedy="use 1 or more")
    if tokens.is_cuda:
        from memopt.kernels.calibration.hessian_triton import accumulate_hessian_triton

        accumulate_hessian_triton(batched, tokens, offsets, chunk_tokens=chunk_tokens)
    else:
        accumulate_hessian_cpu(batched, tokens, offsets, chunk_tokens=chunk_tokens)


def as_experts(hessian: Tensor, tokens: Tensor, expert_offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """The Hessians as [E, K, K] (a view) and the offsets [E + 1], checked; errors as for `accumulate_hessian`."""
    require_tensor("tokens", tokens, (None, None), torch.bfloat16)
    num_tokens, size = tokens.shape
    if expert_offsets is None:
        require_tensor("hessian", hessian, (size, size), torch.float32, like=tokens)
        return hessian[None], torch.tensor([0, num_tokens], dtype=torch.int64, device=tokens.device)
    require_tensor("expert_offsets", expert_offsets, (None,), torch.int64, like=tokens)
    num_experts = expert_offsets.shape[0] - 1
    if num_experts < 0:
        raise ShapeError("expert_offsets is empty, but E + 1 numbers are needed", remedy="pass [0] for no experts")
    require_tensor("hessian", hessian, (num_experts, size, size), torch.float32, like=tokens)
    checked_ends(expert_offsets, num_tokens, num_experts)
    return hessian, expert_offsets


def checked_ends(expert_offsets: Tensor, num_tokens: int, num_experts: int) -> list[int]:
    """`expert_offsets`, int64 [E + 1], as numbers. ShapeError for another shape, UsageError unless they cover all."""
    require_tensor("expert_offsets", expert_offsets, (num_experts + 1,), torch.int64)
    ends: list[int] = expert_offsets.tolist()
    if ends[0] != 0 or ends[-1] != num_tokens or any(a > b for a, b in itertools.pairwise(ends)):
        raise UsageError(
            f"expert_offsets go from {ends[0]} to {ends[-1]} for {num_tokens} tokens"
            + ("" if ends == sorted(ends) else ", and not upwards"),
            remedy="they must rise from 0 to the number of tokens: torch.cumsum of the counts, with 0 in front",
        )
    return ends
