"""The planar repack: golden words, there and back, and the meaning of every nibble."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_cases import random_weight, weights
from hypothesis import given, settings

from memopt.errors import ShapeError
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.planar import PlanarWeight, checkpoint_weight, planar_weight
from memopt.kernels.int4_reference import pack_int4, unpack_int4


def planar_codes(planar: PlanarWeight) -> torch.Tensor:
    """Codes [N, B * 256] read as the layout says: code 32 * j + i of block b is nibble j of words[b, :, i]."""
    planes = torch.stack([((planar.words >> (4 * j)) & 15) - 8 for j in range(8)], dim=2)
    return planes.permute(1, 0, 2, 3).flatten(1)


def test_golden_words() -> None:
    # One row of 256 codes: -8, -7, .. 7 and again. Nibble j of word i is (32 * j + i) % 16 = i % 16.
    codes = (torch.arange(256) % 16 - 8)[None]
    scales = torch.tensor([[1.0, 2.0, -1.0, 0.5, 1.0, 1.0, 1.0, -2.0]], dtype=torch.bfloat16)
    planar = planar_weight(Int4Weight(pack_int4(codes), scales, 32))
    assert planar.words.shape == (1, 1, 32)
    words = [word & 0xFFFFFFFF for word in planar.words[0, 0].tolist()]
    assert words == [0x11111111 * (i % 16) for i in range(32)]
    scale_words = [word & 0xFFFFFFFF for word in planar.scales[:, 0].tolist()]
    assert scale_words == [0x40003F80, 0x3F00BF80, 0x3F803F80, 0xC0003F80]


def test_golden_words_of_rising_nibbles() -> None:
    # Code 32 * j + i is j - 8: nibble j holds j, in every word.
    codes = (torch.arange(256) // 32 - 8)[None]
    planar = planar_weight(Int4Weight(pack_int4(codes), torch.ones(1, 1, dtype=torch.bfloat16), None))
    assert planar.words[0, 0].tolist() == [0x76543210] * 32
    assert planar.scales.tolist() == [[0x3F80]]


def test_padding_is_code_0_under_scale_0() -> None:
    planar = planar_weight(random_weight(3, 192, 64))
    assert planar.words.shape == (1, 3, 32)
    assert bool((planar_codes(planar)[:, 192:] == 0).all())
    assert (planar.scales[1] >> 16).tolist() == [0, 0, 0]  # the fourth group of 64
    assert planar.size_bytes == 4 * (3 * 32 + 2 * 3)


@settings(max_examples=80, deadline=None)
@given(weight=weights())
def test_there_and_back(weight: Int4Weight) -> None:
    planar = planar_weight(weight)
    back = checkpoint_weight(planar)
    assert torch.equal(back.packed, weight.packed)
    assert torch.equal(back.scale_bits, weight.scale_bits.view(torch.int16))
    assert back.group_size == weight.group_size
    assert planar.words.is_contiguous()
    assert planar.scales.is_contiguous()


@settings(max_examples=80, deadline=None)
@given(weight=weights())
def test_the_codes_are_those_of_the_checkpoint(weight: Int4Weight) -> None:
    planar = planar_weight(weight)
    assert planar.num_experts == weight.num_experts
    for index in range(weight.num_experts or 1):
        one = weight if weight.num_experts is None else weight.expert(index)
        part = planar if weight.num_experts is None else planar.expert(index)
        codes = planar_codes(part)
        assert torch.equal(codes[:, : weight.num_columns], unpack_int4(one.packed).to(torch.int32))
        assert not codes[:, weight.num_columns :].any()


def test_a_stack_is_repacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(4, 64, 32, num_experts=5)
    whole = planar_weight(weight)
    monkeypatch.setattr("memopt.kernels.gemm.planar._PART_WORDS", 2 * weight.packed[0].numel())
    parts = planar_weight(weight)
    assert torch.equal(whole.words, parts.words)
    assert torch.equal(whole.scales, parts.scales)


def test_groups_without_a_planar_form_are_refused() -> None:
    with pytest.raises(ShapeError, match="groups of 48"):
        planar_weight(random_weight(2, 96, 48))
    with pytest.raises(ShapeError, match="groups of 256"):
        planar_weight(random_weight(2, 256, 256))


def test_parts_that_do_not_fit_are_refused() -> None:
    packed, scales = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="int64"):
        Int4Weight(packed.to(torch.int64), scales, 32)
    with pytest.raises(ShapeError, match="float32"):
        Int4Weight(packed, scales.to(torch.float32), 32)
    with pytest.raises(ShapeError, match=r"\[2, 3\]"):
        Int4Weight(packed, torch.zeros(2, 3, dtype=torch.bfloat16), 32)
    with pytest.raises(ShapeError, match=r"\[1, 2, 2\]"):
        Int4Weight(packed, scales[None], 32)
    for empty in (torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, 2, 8, dtype=torch.int32)):
        with pytest.raises(ShapeError, match="hold no weights"):
            Int4Weight(empty, torch.zeros(*empty.shape[:-1], 2, dtype=torch.bfloat16), 32)
    with pytest.raises(ShapeError, match="contiguous"):
        Int4Weight(torch.zeros(8, 2, dtype=torch.int32).T, scales, 32)
    with pytest.raises(ShapeError, match="meta"):
        Int4Weight(packed, scales.to("meta"), 32)


def test_planar_parts_that_do_not_fit_are_refused() -> None:
    planar = planar_weight(random_weight(4, 288, 32, num_experts=2))
    with pytest.raises(ShapeError, match=r"needs \[2, 2, 4, 32\] and \[2, 8, 4\]"):
        replace(planar, scales=planar.scales[:, :4])
    with pytest.raises(ShapeError, match=r"\[4, 600\] in groups of 32"):
        replace(planar, num_columns=600)
    with pytest.raises(ShapeError, match="in groups of a row"):
        replace(planar, group_size=None)
    # The kernels multiply nothing for a group that is longer than half a block.
    with pytest.raises(ShapeError, match="groups of 256"):
        replace(planar, scales=planar.scales[:, :1], group_size=256)
    with pytest.raises(ShapeError, match=r"words are torch\.int64"):
        replace(planar, words=planar.words.to(torch.int64))
    with pytest.raises(ShapeError, match=r"scales are torch\.int32 with strides"):
        replace(planar, scales=planar.scales.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ShapeError, match=r"scales are .* on meta"):
        replace(planar, scales=planar.scales.to("meta"))
    with pytest.raises(ShapeError, match=r"words are \[1, 2, 2, 4, 32\]"):
        replace(planar, words=planar.words[None], scales=planar.scales[None])
