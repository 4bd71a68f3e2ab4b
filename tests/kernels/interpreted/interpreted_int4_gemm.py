"""The INT4 GEMM kernels in the interpreter against float64: ragged rows and columns, splits of K, tails of a block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gemm_cases import BF16_TOLERANCE, exact_values, guarded_planar, largest_error, random_weight
from guarded_memory import guarded

from memopt.kernels.gemm import int4_gemm_triton as launcher
from memopt.kernels.gemm.int4_gemm_triton import blocks_per_split, int4_gemm_kernel, int4_gemm_triton
from memopt.kernels.gemm.planar import planar_weight


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    """torch.empty gives NaN (torch.utils.deterministic.fill_uninitialized_memory), and unordered sums are refused."""
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(4).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


def check(num_tokens: int, num_rows: int, num_columns: int, group_size: int | None) -> None:
    weight = random_weight(num_rows, num_columns, group_size)
    x = torch.randn(num_tokens, num_columns).to(torch.bfloat16)
    # A row before and after, which must stay as they are.
    rows = torch.full((num_tokens + 2, num_rows), torch.nan, dtype=torch.bfloat16)
    out = rows[1 : num_tokens + 1]
    int4_gemm_triton(guarded(x) if num_tokens else x, guarded_planar(weight), out)
    assert largest_error(out, x.double() @ exact_values(weight).T) < BF16_TOLERANCE
    assert bool(rows[0].isnan().all() and rows[-1].isnan().all())


@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_one_block(group_size: int | None) -> None:
    check(1, 64, 256, group_size)
    check(16, 33, 256, group_size)


@pytest.mark.parametrize(("num_columns", "group_size"), [(32, 32), (192, 64), (384, 128), (40, None)])
def test_a_tail_of_a_block(num_columns: int, group_size: int | None) -> None:
    check(3, 65, num_columns, group_size)


@pytest.mark.parametrize(("num_columns", "group_size"), [(768, 32), (1056, 32), (1184, None)])
def test_k_is_split(num_columns: int, group_size: int | None) -> None:
    assert blocks_per_split(40, -(-num_columns // 256)) == 2
    check(2, 40, num_columns, group_size)


def test_more_tokens_than_a_tile() -> None:
    check(17, 16, 256, 32)


def test_more_tokens_than_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_TOKENS_A_LAUNCH", 4)
    check(9, 16, 256, 32)


def test_more_words_and_sums_than_32_bits_count() -> None:
    """Two blocks past 2**31 words, into a place past 2**31 sums; only the first rows of the two blocks are touched."""
    num_rows, num_tokens, num_columns, last = 1 << 22, 64, 18 * 256, 8
    weight = random_weight(64, num_columns, None)
    planar = planar_weight(weight)
    words = torch.from_numpy(np.zeros((18, num_rows, 32), np.int32))
    words[-2:, :64] = planar.words[-2:]
    sums = torch.from_numpy(np.empty((last + 1, num_tokens, num_rows), np.float32))
    assert min(2 * last * num_rows * 32, last * num_tokens * num_rows) == 1 << 31
    x = torch.randn(8, num_columns).to(torch.bfloat16)
    # The other splits have no rows of their own to read: their pages stay untouched, all zeros.
    int4_gemm_kernel[(1, last + 1, 1)](
        x, words, planar.scales, sums, num_tokens, num_rows, num_columns, 18, 2,
        TOKENS=8, ROWS=64, GROUP_SIZE=0, HAS_TAIL=False, IS_SPLIT=True, USE_ASSEMBLY=False, STAGES=1,
    )  # fmt: skip
    expected = x[:, -512:].double() @ exact_values(weight)[:, -512:].T
    assert largest_error(sums[last, :8, :64], expected) < 1e-4


def test_no_token() -> None:
    check(0, 16, 256, 32)


def test_nan_of_a_token_stays_with_it() -> None:
    weight = random_weight(64, 288, 32)
    x = torch.randn(3, 288).to(torch.bfloat16)
    x[1] = torch.nan
    out = int4_gemm_triton(x, planar_weight(weight), torch.zeros(3, 64, dtype=torch.bfloat16))
    assert bool(out[1].isnan().all())
    assert largest_error(out[::2], x[::2].double() @ exact_values(weight).T) < BF16_TOLERANCE
