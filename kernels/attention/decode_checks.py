"""What the decode wrappers demand of block tables, selections, splits and results."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.layout import PAGE_TOKENS

# Partial results are num_splits times the output; more splits than this are past any use.
MAX_SPLITS = 256


def require_block_table(block_table: Tensor, num_tokens: Tensor, query: Tensor) -> None:
    """ShapeError unless int32 `block_table` [B, max_pages] and `num_tokens` [B] fit `query` [B, heads, .]."""
    require_tensor("block_table", block_table, (query.shape[0], None), torch.int32, like=query)
    require_tensor("num_tokens", num_tokens, (query.shape[0],), torch.int32, like=query)


def require_positions(positions: Tensor, block_table: Tensor, query: Tensor, num_pages: int) -> None:
    """ShapeError unless int32 `positions` [B, k] and `block_table` [B, max_pages] fit `query` [B, heads, .].

    On the CPU also UsageError for a position past the block table, or on a page that is not one of `num_pages`.
    """
    require_tensor("block_table", block_table, (query.shape[0], None), torch.int32, like=query)
    require_tensor("positions", positions, (query.shape[0], None), torch.int32, like=query)
    if positions.is_cuda:
        return
    capacity = block_table.shape[1] * PAGE_TOKENS
    is_past = positions >= capacity
    if bool(is_past.any()):
        request = int(is_past.any(dim=1).to(torch.uint8).argmax())
        raise UsageError(
            f"request {request} selects position {int(positions[request].max())}, but its block table of "
            f"{block_table.shape[1]} pages ends at {capacity}",
            remedy="select among the request's own tokens",
        )
    is_used = torch.zeros((block_table.shape[0], block_table.shape[1] + 1), dtype=torch.bool)
    # Where nothing is selected, the column behind the table.
    pages = torch.where(positions < 0, block_table.shape[1], positions // PAGE_TOKENS)
    is_used.scatter_(1, pages.to(torch.int64), True)
    _refuse_pages(block_table, is_used[:, :-1], num_pages)


def require_pages(block_table: Tensor, num_tokens: Tensor, num_pages: int) -> None:
    """Refuses, on the CPU, what a kernel must not follow.

    UsageError when a request has more tokens than its row of `block_table` [B, max_pages] holds, or a page that its
    tokens need is not one of the pool's `num_pages`.
    """
    capacity = block_table.shape[1] * PAGE_TOKENS
    for request, count in enumerate(num_tokens.tolist()):
        if not 0 <= count <= capacity:
            raise UsageError(
                f"request {request} has {count} tokens, but its block table holds 0 to {capacity}",
                remedy=f"give the table a page for every {PAGE_TOKENS} tokens",
            )
    first_tokens = torch.arange(0, capacity, PAGE_TOKENS, dtype=num_tokens.dtype)
    _refuse_pages(block_table, first_tokens < num_tokens[:, None], num_pages)


def _refuse_pages(block_table: Tensor, is_used: Tensor, num_pages: int) -> None:
    """UsageError when a page of `block_table` [B, max_pages] that is used, bool [B, max_pages], is not in the pool."""
    is_bad = is_used & ((block_table < 0) | (block_table >= num_pages))
    if bool(is_bad.any()):
        request, place = is_bad.nonzero()[0].tolist()
        raise UsageError(
            f"page {place} of request {request} is {int(block_table[request, place])}, but the pool has {num_pages} "
            "pages",
            remedy="run verify_page_tags on the table before attention reads it",
        )


def require_splits(num_splits: int) -> None:
    """UsageError unless `num_splits` is 1 to MAX_SPLITS."""
    if not 1 <= num_splits <= MAX_SPLITS:
        raise UsageError(f"num_splits is {num_splits}, but 1 to {MAX_SPLITS} are possible")


def require_output(out: AttentionOutput | None, query: Tensor, value_size: int) -> None:
    """ShapeError unless `out`, when given, fits `query` [B, heads, .] and values of `value_size`."""
    if out is None:
        return
    require_tensor("out.output", out.output, (*query.shape[:2], value_size), query.dtype, like=query)
    require_tensor("out.log_sum_exp", out.log_sum_exp, tuple(query.shape[:2]), torch.float32, like=query)
