"""Pairs of 16-bit numbers: PTX (by an emulator) and plain operations give the same bits, and so does the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import Source, as_bytes, random_source
from ptx_emulator import emulated_assembly

from memopt.kernels import fp8_int4_triton, int4_reference
from memopt.kernels.device.half_pairs import add_clipped, clamp_codes, num_clipped, pack_codes, round_pair, widen
from memopt.kernels.int4_spec import Int4Spec
from memopt.kernels.layout import F16_SUBNORMAL_UNIT

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
LANES = 1024


@triton.jit
def _round_and_widen(low, high, pairs, back, LANES: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    lane = tl.arange(0, LANES)
    pair = round_pair(tl.load(low + lane), tl.load(high + lane), USE_ASSEMBLY)
    tl.store(pairs + lane, pair)
    first, second = widen(pair, USE_ASSEMBLY)
    tl.store(back + lane, first)
    tl.store(back + LANES + lane, second)


@triton.jit
def _pack(codes, words, clipped, LANES: tl.constexpr, BOTH_ENDS: tl.constexpr, USE_ASSEMBLY: tl.constexpr):
    lane = tl.arange(0, LANES)
    pairs, count = (), tl.zeros([LANES], tl.int32)
    for i in tl.static_range(4):
        pair = tl.load(codes + i * LANES + lane)
        within = clamp_codes(pair, BOTH_ENDS, USE_ASSEMBLY)
        count = add_clipped(count, pair, within, BOTH_ENDS, USE_ASSEMBLY)
        pairs = pairs + (within,)  # noqa: RUF005
    tl.store(words + lane, pack_codes(pairs[0], pairs[1], pairs[2], pairs[3], USE_ASSEMBLY))
    tl.store(clipped + lane, num_clipped(count, BOTH_ENDS))


@pytest.fixture(params=[False, True], ids=["plain", "ptx"])
def use_assembly(request: pytest.FixtureRequest) -> Iterator[bool]:
    with emulated_assembly() as ran:
        yield request.param
        assert bool(ran) == request.param


def test_halves_are_rounded_to_nearest_even(use_assembly: bool) -> None:
    quarters = torch.arange(-2 * LANES, 2 * LANES, dtype=torch.float32) / 4
    values = torch.cat((quarters * F16_SUBNORMAL_UNIT, torch.randn(LANES), torch.randn(LANES) * 1e-6)).view(
        -1, 2, LANES
    )
    for low, high in values:
        pairs, back = torch.empty(LANES, dtype=torch.int32), torch.empty(2, LANES)
        _round_and_widen[(1,)](low.contiguous(), high.contiguous(), pairs, back, LANES, use_assembly)
        expected = torch.stack((low, high), dim=1).to(torch.float16)
        assert torch.equal(pairs.view(torch.float16).view(LANES, 2), expected)
        assert torch.equal(back.T, expected.to(torch.float32))


@pytest.mark.parametrize("both_ends", [False, True])
def test_codes_are_clamped_counted_and_packed(use_assembly: bool, both_ends: bool) -> None:
    codes = torch.randint(-25 if both_ends else -8, 26 if both_ends else 9, (LANES, 8))
    places = torch.tensor([[0, 2], [1, 3], [4, 6], [5, 7]])
    pairs = (codes[:, places].to(torch.float32) * F16_SUBNORMAL_UNIT).to(torch.float16)
    pairs = pairs.transpose(0, 1).contiguous().view(torch.int32)
    words, clipped = torch.empty(LANES, dtype=torch.int32), torch.empty(LANES, dtype=torch.int32)
    _pack[(1,)](pairs, words, clipped, LANES, both_ends, use_assembly)
    clamped = codes.clamp(-8, 7)
    assert torch.equal(words[:, None], int4_reference.pack_int4(clamped))
    assert torch.equal(clipped, (codes != clamped).sum(dim=1).to(torch.int32))


def _bfloat16_source() -> Source:
    bits = np.random.default_rng(3).normal(size=(5, 128)).astype(np.float32).view(np.uint32) >> 16
    return Source(bits.astype(np.uint16), None, None)


def _tied_source() -> Source:
    """Block scales a / 7.5 of a few bits: many weights lie on ties under scales that are no powers of two."""
    weight = np.random.default_rng(4).integers(0, 0x7F, (8, 256), dtype=np.uint8)
    weight[:, ::32] = 0x76  # 1.75 * 2**7 is the largest of each group
    weight[weight > 0x76] = 0x2E
    weight[1::2] |= 0x80
    scale = np.array([[135 / 7, 150 / 7], [165 / 7, 15 / 7]], np.float32)
    return Source(weight, scale, (4, 128))


@pytest.mark.parametrize(
    ("source", "spec"),
    [
        (random_source(9, 128, (4, 64), seed=1), Int4Spec(32, "absmax")),
        (_tied_source(), Int4Spec(32, "absmax")),
        (_tied_source(), Int4Spec(64, "absmax")),
        (_bfloat16_source(), Int4Spec(32, "absmax")),
        (random_source(3, 32, (128, 128), seed=2), Int4Spec(32, "mse-signed")),
        (random_source(2, 72, (1, 24), seed=5), Int4Spec(None, "absmax")),
    ],
    ids=["random", "tied", "tied-64", "bfloat16", "searched", "whole-rows"],
)
def test_the_kernel_with_ptx_gives_the_references_bytes(
    source: Source, spec: Int4Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_int4_triton, "has_capability", lambda device, least: True)
    monkeypatch.delattr(fp8_int4_triton.int4_device, "quantize_int4")
    expected = as_bytes(int4_reference.quantize_int4(*source.tensors(), spec))
    with emulated_assembly() as ran:
        found = as_bytes(fp8_int4_triton.quantize_int4(*source.tensors(), spec))
    assert ran
    assert {name for name in expected if expected[name] != found[name]} == set()
