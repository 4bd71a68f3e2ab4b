"""The Triton Hessian kernel in the interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibration_problems import make_offsets, make_symmetric, make_tokens
from guarded_memory import guarded

from memopt.errors import UsageError
from memopt.kernels.calibration.hessian_reference import accumulate_hessian_reference
from memopt.kernels.calibration.hessian_triton import HessianTiles, accumulate_hessian_triton

SMALL = HessianTiles(rows=32, columns=64, tokens=32, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    ("counts", "size", "chunk"),
    [
        ((70, 0, 1, 33), 128, 64),  # ragged experts, a tail in a block of tokens, two chunks
        ((40,), 100, 32),  # a tail in the tiles
        ((32, 64), 65, 4096),  # a tile of one column
        ((), 64, 64),
        ((0, 0), 64, 64),
    ],
)
def test_against_the_reference(counts: tuple[int, ...], size: int, chunk: int) -> None:
    tokens, ends = make_tokens(sum(counts), size), make_offsets(*counts)
    found, expected, magnitude = (make_symmetric(len(counts), size) for _ in range(3))
    if tokens.numel():
        tokens, ends, found = guarded(tokens), guarded(ends), guarded(found)
    accumulate_hessian_triton(found, tokens, ends, chunk_tokens=chunk, tiles=SMALL)
    accumulate_hessian_reference(expected, tokens, ends, chunk_tokens=chunk)
    magnitude = magnitude.abs()
    accumulate_hessian_reference(magnitude, tokens.abs(), ends)
    assert bool(((found - expected).abs() <= magnitude * 64 * 2.0**-24).all())
    assert torch.equal(found, found.mT)


def test_tokens_of_other_experts_are_not_read() -> None:
    tokens = make_tokens(96, 64)
    tokens[:30] = float("nan")
    tokens[63:] = float("nan")
    found, alone = torch.zeros(3, 64, 64), torch.zeros(1, 64, 64)
    accumulate_hessian_triton(found, tokens, make_offsets(30, 33, 33), chunk_tokens=64, tiles=SMALL)
    accumulate_hessian_triton(alone, tokens[30:63].contiguous(), make_offsets(33), chunk_tokens=64, tiles=SMALL)
    assert torch.equal(found[1], alone[0])


def test_several_calls_in_whole_chunks_give_the_same_bits() -> None:
    tokens = make_tokens(100, 64)
    at_once, in_parts = torch.zeros(1, 64, 64), torch.zeros(1, 64, 64)
    accumulate_hessian_triton(at_once, tokens, make_offsets(100), chunk_tokens=32, tiles=SMALL)
    for first, end in ((0, 64), (64, 100)):
        part = tokens[first:end]
        accumulate_hessian_triton(in_parts, part, make_offsets(len(part)), chunk_tokens=32, tiles=SMALL)
    assert torch.equal(at_once, in_parts)


def test_the_tiles_that_a_gpu_uses() -> None:
    tokens, ends = make_tokens(64, 512), make_offsets(64)
    found, expected = torch.zeros(1, 512, 512), torch.zeros(1, 512, 512)
    accumulate_hessian_triton(found, tokens, ends)
    accumulate_hessian_reference(expected, tokens, ends)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


def test_chunks_that_blocks_do_not_fill() -> None:
    with pytest.raises(UsageError, match="chunks of 48 tokens"):
        accumulate_hessian_triton(
            torch.zeros(1, 64, 64), make_tokens(3, 64), make_offsets(3), chunk_tokens=48, tiles=SMALL
        )


def test_tokens_past_two_billion_elements() -> None:
    # 4.3 GB of address space, of which only the rows of the last tokens take memory.
    size, first = 64, 2**31 // 64 + 5
    tokens = torch.from_numpy(np.empty((first + 9, size), np.int16)).view(torch.bfloat16)
    tokens[first:] = make_tokens(9, size)
    found, expected = torch.zeros(1, size, size), torch.zeros(1, size, size)
    accumulate_hessian_triton(found, tokens, torch.tensor([first, first + 9]), chunk_tokens=32, tiles=SMALL)
    accumulate_hessian_reference(expected, tokens[first:], make_offsets(9))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
