"""Deterministic top-k of indexer scores: checks, then the kernel of the device that holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import UnsupportedError, UsageError
from memopt.kernels.attention import top_k_cpu
from memopt.kernels.device.tensor_checks import require_tensor

# One program writes a row's padding as one tile, of which Triton allows this many elements.
MAX_SELECTED = 1 << 20


def top_k(scores: Tensor, num_tokens: Tensor, k: int, out: Tensor | None = None) -> Tensor:
    """int32 [B, k]: positions of the k largest of each request's first num_tokens scores, ascending, then -1.

    `scores` float32 [B, max_tokens], `num_tokens` int32 [B]. Of equal scores the lower position wins; -0 equals 0; NaN
    ranks below everything. The result is exact: the same on every device and whatever the batch. `out`: where to
    write, else it is allocated. Raises ShapeError for tensors that do not fit, UsageError for k below 1 and
    UnsupportedError for one above 2**20, and on the CPU UsageError for a number of tokens outside 0 to max_tokens,
    which on a GPU is brought into that range.
    """
    require_tensor("scores", scores, (None, None), torch.float32)
    require_tensor("num_tokens", num_tokens, (scores.shape[0],), torch.int32, like=scores)
    if k < 1:
        raise UsageError(f"k is {k}, but at least 1 position must be selected")
    if k > MAX_SELECTED:
        raise UnsupportedError(f"k is {k}, but at most {MAX_SELECTED} positions can be selected")
    if out is not None:
        require_tensor("out", out, (scores.shape[0], k), torch.int32, like=scores)
    if scores.is_cuda:
        from memopt.kernels.attention import top_k_triton

        return top_k_triton.top_k(scores, num_tokens, k, out)
    if bool(((num_tokens < 0) | (num_tokens > scores.shape[1])).any()):
        raise UsageError(f"num_tokens is {num_tokens.tolist()}, but scores are given for 0 to {scores.shape[1]} tokens")
    return top_k_cpu.top_k(scores, num_tokens, k, out)
