"""What MLA's reference and its CPU path share: which slots each request attends to, and the loop over requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.layout import MLA_LATENT_SIZE, PAGE_TOKENS

# (query [H, 576], slots int64 [N]) -> (output [H, 512], log-sum-exp [H])
AttendRequest = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def dense_slots(block_table: Tensor, num_tokens: Tensor) -> list[Tensor]:
    """Slots int64 of all tokens of each request; `block_table` int32 [B, max_pages], `num_tokens` int32 [B]."""
    return [slots_of_pages(pages, int(count)) for pages, count in zip(block_table, num_tokens, strict=True)]


def selected_slots(block_table: Tensor, positions: Tensor) -> list[Tensor]:
    """Slots int64, in order, of those of each request's positions int32 [B, k] that are not negative."""
    slots: list[Tensor] = []
    for pages, row in zip(block_table.to(torch.int64), positions, strict=True):
        chosen = row[row >= 0].to(torch.int64)
        slots.append(pages[chosen // PAGE_TOKENS] * PAGE_TOKENS + chosen % PAGE_TOKENS)
    return slots


def attend_requests(
    query_latent: Tensor,
    query_rope: Tensor,
    slots: Iterable[Tensor],
    attend: AttendRequest,
    dtype: torch.dtype,
    out: AttentionOutput | None,
) -> AttentionOutput:
    """`attend` for every request alone, whatever else is in the batch; queries are widened to `dtype` first."""
    result = new_output(query_latent, MLA_LATENT_SIZE) if out is None else out
    for request, places in enumerate(slots):
        query = torch.cat((query_latent[request], query_rope[request]), dim=1).to(dtype)
        result.output[request], result.log_sum_exp[request] = attend(query, places)
    return result
