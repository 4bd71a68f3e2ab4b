"""The rows of one forward pass: one row a token, of any mix of requests.

Rows of prompts come first, request after request; they attend in MLA's expanded form, a chunk at a time. Behind them
stand the decode rows, each alone, which attend in the absorbed form: new tokens, drafts to verify, and generated tokens
that are computed again after a preemption, so that a token's bits do not depend on what else ran.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `first_row` to `first_row + num_rows` of a step: consecutive tokens of one prompt, from `first_position`.

    What stands before `first_position` is in the cache already. All numbers are on the host.
    """

    first_row: int
    num_rows: int
    first_position: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows. Tensors are on the model's device, `chunks` and `longest` on the host.

    `token_ids` int64 [R]; `positions` int64 [R]; `slots` int64 [R]: where each token's keys go, negative for nowhere.
    `block_table` int32 [R, max_pages]: each row's request's pages (rows of a request repeat it).
    `num_tokens` int32 [R]: tokens that a row attends to, itself included: position + 1.
    `longest`: an upper bound of num_tokens. `num_checked_pages`: of the pools that `slots` were checked against, once
    for all layers; 0 when each store is to check them itself.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    num_tokens: Tensor
    chunks: tuple[PrefillChunk, ...]
    longest: int
    num_checked_pages: int = 0

    @property
    def num_rows(self) -> int:
        """R."""
        return self.token_ids.shape[0]

    @property
    def num_prefill_rows(self) -> int:
        """Rows before the first decode row."""
        return sum(chunk.num_rows for chunk in self.chunks)
