"""Attention of a batch's single queries on the CPU, tile by tile: float32 matmul, softmax, matmul.

A request's own number of tokens says how it is cut: into whole tiles of TILE_TOKENS, computed alone, and behind them
tiles of TAIL_TOKENS, padded at the end, which are computed for all requests together. A product has one shape whatever
else is in the batch, so a request's result is the same bit for bit (tests/kernels/attention/test_decode_rows.py).
torch's scaled_dot_product_attention on BF16 rows is 20 to 100 times slower: docs/kernels/attention.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.layout import PADDING_SLOT

# 2.4 MB of float32 for MLA, so that a tile is still in a cache for the second product: measured best of 512 to 2048
# for lengths that it does not divide, within a tenth of it for those that it does.
TILE_TOKENS = 1024
# Short enough that padding is little work, long enough that few tiles make a tail.
TAIL_TOKENS = 128

# slots int64 [N], padding negative -> keys [N, G, D] and values [N, G, V], float32, zeros for padding.
ReadSlots = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RowSlots:
    """Where each request's tokens lie: `slots` int64 [B, S], PADDING_SLOT behind the first `counts[b]` of a row."""

    slots: Tensor
    counts: list[int]


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """The online softmax of some requests so far: maximum and total [B, G, H], sums [B, G, H, V]."""

    maximum: Tensor
    total: Tensor
    sums: Tensor

    def first(self, num_requests: int) -> SoftmaxState:
        """The first requests' part, as a view."""
        return SoftmaxState(*(part[:num_requests] for part in (self.maximum, self.total, self.sums)))

    def only(self, request: int) -> SoftmaxState:
        """One request's part, as a view."""
        return SoftmaxState(*(part[request : request + 1] for part in (self.maximum, self.total, self.sums)))

    def add(self, query: Tensor, keys: Tensor, values: Tensor, is_padding: Tensor | None) -> None:
        """One tile: scaled query [B, G, H, D], keys [B, G, T, D], values [B, G, T, V], `is_padding` bool [B, T].

        Every request has at least one token in its first tile. Strides but for the first are the same whatever B is.
        """
        scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).mT).view(*query.shape[:3], -1)
        if is_padding is not None:
            scores.masked_fill_(is_padding[:, None, None], -torch.inf)
        maximum = torch.maximum(self.maximum, scores.amax(dim=-1))
        keep = torch.exp(self.maximum - maximum)
        probability = scores.sub_(maximum[..., None]).exp_()
        self.total.mul_(keep).add_(probability.sum(dim=-1))
        product = torch.bmm(probability.flatten(0, 1), values.flatten(0, 1))
        self.sums.mul_(keep[..., None]).add_(product.view_as(self.sums))
        self.maximum.copy_(maximum)


def attend_rows(
    query: Tensor, rows: RowSlots, read_slots: ReadSlots, value_size: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, G, H, V] and log-sum-exp [B, G, H], float32, of one query a request, float32 [B, G, H, D].

    G: heads of keys and values, each for H of the query's. A request without tokens has zeros and -inf.
    """
    tails = [count % TILE_TOKENS for count in rows.counts]
    # The longest tails first, so that requests that still have tokens are a prefix.
    order = sorted(range(len(tails)), key=lambda request: -tails[request])
    is_ordered = order == list(range(len(order)))
    index = torch.tensor(order, dtype=torch.int64)
    scaled = (query if is_ordered else query[index]) * softmax_scale
    slots = rows.slots if is_ordered else rows.slots[index]
    shape = query.shape[:3]
    state = SoftmaxState(
        query.new_full(shape, -torch.inf), query.new_zeros(shape), query.new_zeros((*shape, value_size))
    )
    for place, request in enumerate(order):
        for first in range(0, rows.counts[request] - tails[request], TILE_TOKENS):
            tile = slots[place : place + 1, first : first + TILE_TOKENS]
            state.only(place).add(scaled[place : place + 1], *_read(tile, read_slots), None)
    _add_tails(scaled, slots, [rows.counts[request] for request in order], read_slots, state)
    if not is_ordered:
        state = SoftmaxState(*(_unsorted(part, index) for part in (state.maximum, state.total, state.sums)))
    is_empty = state.total == 0
    output = torch.where(is_empty[..., None], 0.0, state.sums / state.total[..., None])
    return output, torch.where(is_empty, -torch.inf, state.maximum + state.total.log())


def _add_tails(query: Tensor, slots: Tensor, counts: list[int], read_slots: ReadSlots, state: SoftmaxState) -> None:
    """What is behind the whole tiles, for requests in the order of their tails, the longest first."""
    starts = torch.tensor([count - count % TILE_TOKENS for count in counts], dtype=torch.int64)
    columns = torch.arange(TAIL_TOKENS)
    for first in range(0, max((count % TILE_TOKENS for count in counts), default=0), TAIL_TOKENS):
        num_left = sum(count % TILE_TOKENS > first for count in counts)
        at = starts[:num_left, None] + first + columns
        tile = slots[:num_left].gather(1, at.clamp(max=slots.shape[1] - 1))
        tile = tile.masked_fill_(at >= slots.shape[1], PADDING_SLOT)
        keys, values = _read(tile, read_slots)
        state.first(num_left).add(query[:num_left], keys, values, tile < 0)


def _read(tile: Tensor, read_slots: ReadSlots) -> tuple[Tensor, Tensor]:
    """Keys [B, G, T, D] and values [B, G, T, V] of slots int64 [B, T]."""
    keys, values = (_head_major(part.view(*tile.shape, *part.shape[1:])) for part in read_slots(tile.flatten()))
    return keys, values


def _head_major(part: Tensor) -> Tensor:
    """[B, G, T, D] of [B, T, G, D]; a copy unless there is one head."""
    return part.transpose(1, 2) if part.shape[2] == 1 else part.transpose(1, 2).contiguous()


def _unsorted(part: Tensor, index: Tensor) -> Tensor:
    """`part` [B, ...] with row i moved to row index[i]."""
    return torch.empty_like(part).index_copy_(0, index, part)
