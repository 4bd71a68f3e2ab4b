"""Merging splits: halves of the tokens give the attention over all of them."""

from __future__ import annotations

import torch
from decode_cases import generator

from memopt.kernels.attention.attention_output import AttentionOutput, new_output
from memopt.kernels.attention.softmax_reference import attend
from memopt.kernels.attention.split_merge_reference import merge_splits


def test_parts_of_the_tokens_merge_to_the_whole() -> None:
    query = torch.randn((1, 4, 32), generator=generator(0), dtype=torch.float64)
    keys = torch.randn((90, 32), generator=generator(1), dtype=torch.float64)
    values = torch.randn((90, 16), generator=generator(2), dtype=torch.float64)
    parts = [slice(0, 50), slice(50, 50), slice(50, 90)]
    results = [attend(query[0], keys[part], values[part], 0.3) for part in parts]
    partial = torch.stack([result[0] for result in results])[None]
    log_sum_exps = torch.stack([result[1] for result in results])[None]
    partial[0, 1] = torch.nan  # what a split without tokens leaves must not matter
    found = merge_splits(partial, log_sum_exps, new_output(query, 16))
    whole, log_sum_exp = attend(query[0], keys, values, 0.3)
    assert torch.allclose(found.output[0], whole, rtol=1e-6)
    assert torch.allclose(found.log_sum_exp[0].double(), log_sum_exp, rtol=1e-6)


def test_no_tokens_at_all() -> None:
    out = AttentionOutput(torch.full((1, 2, 8), torch.nan), torch.full((1, 2), torch.nan))
    merge_splits(torch.full((1, 3, 2, 8), torch.nan), torch.full((1, 3, 2), -torch.inf), out)
    assert torch.equal(out.output, torch.zeros(1, 2, 8))
    assert torch.equal(out.log_sum_exp, torch.full((1, 2), -torch.inf))
