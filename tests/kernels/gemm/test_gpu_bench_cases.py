"""The GPU benchmark's cases of this package at small sizes on the CPU: data that fit, checks that judge."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases_int4_gemm import Experts, _gemm, _moe, cases


def test_a_product_is_checked() -> None:
    prepared = _gemm(64, 512, 3)(torch.Generator().manual_seed(0))
    prepared.run()
    assert prepared.check() < prepared.tolerance
    assert prepared.bytes_moved == 64 * 512 // 2 + 64 * 16 * 2 + (3 * 512 + 3 * 64) * 2
    for peer in prepared.peers.values():
        peer()
    prepared.outputs[0][1, 2] += 100
    assert prepared.check() > prepared.tolerance
    prepared.outputs[0][1, 2] = torch.nan
    assert prepared.check() == torch.inf


def test_a_layer_of_experts_is_checked() -> None:
    prepared = _moe(Experts("small", 256, 64, num_experts=4, top_k=4), 2)(torch.Generator().manual_seed(0))
    prepared.run()
    assert prepared.check() < prepared.tolerance
    codes, scales = 3 * 256 * 64 // 2, 3 * 256 * 64 // 32 * 2
    assert prepared.bytes_moved == 4 * (codes + scales) + 2 * 2 * 256 * 2
    prepared.outputs[0][0, 0] = torch.nan
    assert prepared.check() == torch.inf


def test_names_are_different() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
