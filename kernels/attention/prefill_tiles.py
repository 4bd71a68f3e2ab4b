"""What prompt attention reads: a sequence's keys and values, a run of positions at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# (first position, position after the last) -> keys [T, kv_heads, D] and values [T, kv_heads, V] of one float type.
# Called for ascending runs that begin at 0; never past the last query's position.
ReadTile = Callable[[int, int], tuple[Tensor, Tensor]]
