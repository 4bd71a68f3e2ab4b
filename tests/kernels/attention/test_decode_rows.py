"""On the CPU a request's decode result has the same bits whatever else is in the batch, and however it is selected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import GqaCase, MlaCase, Paging, difference, gqa_case, mla_case
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.kernels.attention import gqa_decode, mla_decode, mla_decode_reference
from memopt.kernels.attention.attention_output import AttentionOutput
from memopt.kernels.attention.softmax_cpu import TAIL_TOKENS, TILE_TOKENS
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3

# About the ends of pages, of the padded tiles, and of the whole ones.
LENGTHS = (1, 0, 63, TAIL_TOKENS, TAIL_TOKENS + 1, 300, TILE_TOKENS - 1, TILE_TOKENS, TILE_TOKENS + 5, 2)
MLA = mla_case(LENGTHS, num_heads=2, kv_format=FP8_DS_MLA, dtype=torch.float32)
GQA = gqa_case(LENGTHS, num_heads=4, num_kv_heads=2, head_dim=64, kv_format=FP8_E4M3, dtype=torch.float32)


def part_of(case: Any, requests: list[int], spare_pages: int) -> Any:
    """Some requests of a case, in this order, with so many columns fewer or more in their table."""
    width = max([-(-LENGTHS[request] // 64) for request in requests] + [1])
    table = torch.zeros((len(requests), width + spare_pages), dtype=torch.int32)
    known = case.paging.block_table[requests][:, : width + spare_pages]
    table[:, : known.shape[1]] = known
    paging = Paging(table, case.paging.num_tokens[requests], case.paging.num_pages)
    if isinstance(case, MlaCase):
        queries = [q[requests].contiguous() for q in (case.query_latent, case.query_rope)]
        return replace(case, query_latent=queries[0], query_rope=queries[1], paging=paging)
    return replace(case, query=case.query[requests].contiguous(), paging=paging)


def run(case: MlaCase | GqaCase) -> AttentionOutput:
    return case.run(mla_decode if isinstance(case, MlaCase) else gqa_decode)


WHOLE = {"mla": run(MLA), "gqa": run(GQA)}


@pytest.mark.parametrize("name", ["mla", "gqa"])
@settings(max_examples=15, deadline=None)
@given(
    requests=st.lists(st.sampled_from(range(len(LENGTHS))), min_size=1, max_size=8),
    spare_pages=st.integers(0, 3),
)
def test_bits_do_not_depend_on_the_batch(name: str, requests: list[int], spare_pages: int) -> None:
    found = run(part_of({"mla": MLA, "gqa": GQA}[name], requests, spare_pages))
    assert torch.equal(found.output, WHOLE[name].output[requests])
    assert torch.equal(found.log_sum_exp, WHOLE[name].log_sum_exp[requests])


def test_lengths_about_the_tiles_equal_the_reference() -> None:
    case = mla_case(LENGTHS, num_heads=2, kv_format=BF16, dtype=torch.float32, seed=3)
    assert difference(run(case), case.run(mla_decode_reference, dtype=torch.float64)) < 2e-5


def test_selecting_all_tokens_has_the_bits_of_no_selection() -> None:
    k = max(LENGTHS) + 3
    positions = torch.arange(k, dtype=torch.int32).repeat(len(LENGTHS), 1)
    positions = positions.masked_fill(positions >= MLA.paging.num_tokens[:, None], -1)
    found = MLA.run_selected(mla_decode, positions)
    assert torch.equal(found.output, WHOLE["mla"].output)
    # Padding may stand anywhere: the order of what is selected is what counts.
    found = MLA.run_selected(mla_decode, torch.cat((torch.full((len(LENGTHS), 5), -1).int(), positions), dim=1))
    assert torch.equal(found.output, WHOLE["mla"].output)
