"""Slots: places, the slots of a sequence, and what a store must not get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt.errors import ShapeError, UsageError
from memopt.kernels.kv_cache.kv_slots import check_slots, places, slots_of_pages


@given(st.integers(0, 2**40))
def test_a_place_is_a_page_and_a_position(slot: int) -> None:
    page, position = places(torch.tensor([slot]))
    assert (int(page), int(position)) == divmod(slot, 64)


def test_slots_of_a_sequence() -> None:
    slots = slots_of_pages(torch.tensor([5, 2], dtype=torch.int32), 66)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [*range(320, 384), 128, 129]
    assert slots_of_pages(torch.tensor([7]), 0).tolist() == []
    with pytest.raises(ShapeError, match="1 pages of 64 tokens cannot hold 65 tokens"):
        slots_of_pages(torch.tensor([7]), 65)
    big = slots_of_pages(torch.tensor([2**31 - 1], dtype=torch.int32), 1)
    assert big.tolist() == [(2**31 - 1) * 64]


def test_padding_may_repeat() -> None:
    check_slots(torch.tensor([-1, 3, -1, 0, -(2**63)]), 1)
    check_slots(torch.tensor([], dtype=torch.int64), 1)


def test_slots_past_the_pool_and_shared_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="slot 128 of token 2 is past the pool: 2 pages have 128 slots"):
        check_slots(torch.tensor([0, -1, 128]), 2)
    with pytest.raises(UsageError, match="tokens 1 and 3 share slot 9"):
        check_slots(torch.tensor([4, 9, -1, 9]), 2)
    with pytest.raises(UsageError, match="tokens 0 and 1 share slot 0"):
        check_slots(torch.tensor([0, 0]), 2)
