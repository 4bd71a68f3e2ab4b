"""Slots of the tokens that an indexer selected."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.layout import PAGE_TOKENS


def selected_slots(pages: Tensor, positions: Tensor) -> Tensor:
    """Slots int64 [N], in order, of those of one request's positions int32 [k] that are not negative.

    `pages` int32 [max_pages]: the request's row of the block table.
    """
    chosen = positions[positions >= 0].to(torch.int64)
    return pages.to(torch.int64)[chosen // PAGE_TOKENS] * PAGE_TOKENS + chosen % PAGE_TOKENS
