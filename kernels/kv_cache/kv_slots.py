"""Slots: where a token lies in a pool. slot = page * 64 + position in the page; a negative slot is padding."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.device.tensor_checks import require_tensor
from memopt.kernels.layout import PAGE_TOKENS


def slots_of_pages(pages: Tensor, num_tokens: int) -> Tensor:
    """Slots int64 [num_tokens] of a sequence's tokens, whose pages (int32 or int64 [N]) are given in order.

    Raises ShapeError when `pages` cannot hold that many tokens.
    """
    require_tensor("pages", pages, (None,), torch.int32, torch.int64)
    if not 0 <= num_tokens <= pages.shape[0] * PAGE_TOKENS:
        raise ShapeError(f"{pages.shape[0]} pages of {PAGE_TOKENS} tokens cannot hold {num_tokens} tokens")
    tokens = torch.arange(num_tokens, device=pages.device)
    return pages.to(torch.int64)[tokens // PAGE_TOKENS] * PAGE_TOKENS + tokens % PAGE_TOKENS


def check_slots(slots: Tensor, num_pages: int) -> None:
    """Refuses slots int64 [T] on the CPU that a store must not get.

    Raises UsageError for a slot past the pool of `num_pages` pages, and for a slot that two tokens share: which of the
    two would stay is not defined.
    """
    num_slots = num_pages * PAGE_TOKENS
    # numpy: a step has few slots, and torch takes twice as long to begin each of these operations.
    numbers = slots.numpy()
    past = numbers >= num_slots
    if past.any():
        token = int(past.argmax())
        raise UsageError(
            f"slot {numbers[token]} of token {token} is past the pool: {num_pages} pages have {num_slots} slots",
            remedy="check the block table against the pool's number of pages",
        )
    order = numbers.argsort(kind="stable")
    written = numbers[order]
    twice = (written[1:] == written[:-1]) & (written[1:] >= 0)
    if twice.any():
        at = int(twice.argmax())
        raise UsageError(
            f"tokens {order[at]} and {order[at + 1]} share slot {written[at]}",
            remedy="give each token a slot of its own; padding is a negative slot",
        )


def places(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Page and position in the page, int64 each, of slots int64 of any shape that are not negative."""
    return slots // PAGE_TOKENS, slots % PAGE_TOKENS
