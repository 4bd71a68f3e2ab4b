"""The GPU benchmark's cases of calibration run, small and on the CPU: data, checks and peers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu.case import Prepared
from benchmarks.gpu.cases_calibration import cases, prepare_block, prepare_hessian, prepare_solve
from benchmarks.gpu.timing import poison


@pytest.mark.parametrize(
    "prepare",
    [
        lambda generator: prepare_hessian(3, 64, 50, generator),
        lambda generator: prepare_block(2, 70, generator),
        lambda generator: prepare_solve(2, 32, 256, generator),
    ],
)
def test_a_case_is_right(prepare: Callable[[torch.Generator], Prepared]) -> None:
    prepared = prepare(torch.Generator().manual_seed(1))
    for output in prepared.outputs:
        poison(output)
    prepared.run()
    assert prepared.check() <= prepared.tolerance
    assert prepared.bytes_moved > 0
    for peer in prepared.peers.values():
        peer()


def test_a_kernel_that_writes_nothing_is_found_out() -> None:
    prepared = prepare_block(1, 16, torch.Generator().manual_seed(1))
    for output in prepared.outputs:
        poison(output)
    assert not prepared.check() <= prepared.tolerance


def test_a_kernel_that_writes_no_codes_is_found_out() -> None:
    prepared = prepare_block(1, 16, torch.Generator().manual_seed(1))
    codes, _ = prepared.outputs
    prepared.run()
    poison(codes)
    assert not prepared.check() <= prepared.tolerance


def test_the_cases_have_names_of_their_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) == 3
