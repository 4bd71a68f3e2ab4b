"""Attention of a prompt's chunk: the CPU path and torch's operator against the reference, and bits whatever the cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memopt.errors import ShapeError, UsageError
from memopt.kernels.attention import (
    prefill_attention,
    prefill_attention_cpu,
    prefill_attention_device,
    prefill_attention_reference,
)
from memopt.kernels.attention.prefill_attention_cpu import KEY_TILE

KV_HEADS, GROUP, KEY_SIZE, VALUE_SIZE = 2, 3, 24, 40
TOKENS = KEY_TILE + 150
SCALE = 0.3


def sequence(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one sequence of TOKENS."""
    generator = torch.Generator().manual_seed(5)
    sizes = (KV_HEADS * GROUP, KEY_SIZE), (KV_HEADS, KEY_SIZE), (KV_HEADS, VALUE_SIZE)
    query, key, value = (torch.randn(TOKENS, *size, generator=generator).to(dtype) for size in sizes)
    return query, key, value


QUERY, KEY, VALUE = sequence()


def run(module: Any, first: int, after: int, selected: Tensor | None = None, query: Tensor = QUERY) -> Tensor:
    """`module.prefill_attention` of tokens `first` to `after`; keys past the last query must not be asked for."""

    def read_tile(begin: int, end: int) -> tuple[Tensor, Tensor]:
        assert begin < end <= after
        return KEY[begin:end].to(query.dtype), VALUE[begin:end].to(query.dtype)

    chosen = None if selected is None else selected[first:after]
    return module.prefill_attention(
        query[first:after].contiguous(), read_tile, first,
        num_kv_heads=KV_HEADS, value_size=VALUE_SIZE, softmax_scale=SCALE, selected=chosen,
    )  # fmt: skip


def selections(k: int) -> Tensor:
    """Positions int32 [TOKENS, k] as top_k gives them: ascending, then -1."""
    found = torch.full((TOKENS, k), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(6)
    for position in range(TOKENS):
        count = min(k, position + 1)
        found[position, :count] = torch.randperm(position + 1, generator=generator)[:count].sort().values
    return found


@pytest.mark.parametrize("module", [prefill_attention_cpu, prefill_attention_device])
@pytest.mark.parametrize("selected", [None, selections(20)], ids=["all", "selected"])
@pytest.mark.parametrize(("first", "after"), [(0, 1), (0, 100), (70, 90), (KEY_TILE - 1, KEY_TILE + 1), (300, TOKENS)])
def test_paths_equal_the_reference(module: Any, selected: Tensor | None, first: int, after: int) -> None:
    wanted = run(prefill_attention_reference, first, after, selected, QUERY.double())
    found = run(module, first, after, selected)
    assert found.dtype == torch.float32
    assert float((found - wanted).abs().max()) < 2e-6


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(1, TOKENS - 1), max_size=4, unique=True),
    k=st.sampled_from([None, 1, 17, TOKENS]),
)
def test_bits_do_not_depend_on_the_cut(cuts: list[int], k: int | None) -> None:
    selected = None if k is None else selections(k)
    whole = run(prefill_attention, 0, TOKENS, selected)
    edges = [0, *sorted(cuts), TOKENS]
    parts = [run(prefill_attention, first, after, selected) for first, after in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


def test_selecting_everything_has_the_bits_of_no_selection() -> None:
    assert torch.equal(run(prefill_attention, 0, TOKENS, selections(TOKENS)), run(prefill_attention, 0, TOKENS))


def test_later_tokens_do_not_show() -> None:
    wanted = run(prefill_attention, 0, 70)
    assert torch.equal(run(prefill_attention, 0, TOKENS)[:70], wanted)


@pytest.mark.parametrize("module", [prefill_attention, prefill_attention_device, prefill_attention_reference])
def test_nothing_selected_is_zeros(module: Any) -> None:
    selected = torch.full((TOKENS, 2), -1, dtype=torch.int32)
    # Its own future does not count either.
    selected[11] = torch.tensor([12, TOKENS])
    found = run(module, 10, 20, selected)
    assert torch.equal(found, torch.zeros_like(found))


def test_bfloat16_is_computed_in_float32() -> None:
    query = QUERY.to(torch.bfloat16)
    found = run(prefill_attention, 0, TOKENS, None, query)
    wanted = run(prefill_attention_reference, 0, TOKENS, None, query)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted.float()).abs().max()) <= 2.0**-7


def test_no_rows() -> None:
    assert run(prefill_attention, 5, 5).shape == (0, KV_HEADS * GROUP, VALUE_SIZE)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="not a multiple of 4 KV heads"):
        prefill_attention.prefill_attention(
            QUERY, lambda first, after: (KEY, VALUE), 0, num_kv_heads=4, value_size=1, softmax_scale=1.0
        )
    with pytest.raises(UsageError, match="position -1"):
        run(prefill_attention, -1, 1)
    with pytest.raises(ShapeError, match=r"selected is \[10, 3\], but \[20"):
        prefill_attention.prefill_attention(
            QUERY[:20], lambda first, after: (KEY, VALUE), 0, num_kv_heads=2, value_size=1, softmax_scale=1.0,
            selected=torch.zeros((10, 3), dtype=torch.int32),
        )  # fmt: skip
