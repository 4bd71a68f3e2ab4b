"""The load-time repack of INT4 weights to planar words, which the GEMM kernels read. Never written into a release.

Along K, a block of 256 codes is 32 words; word i holds code 32 * j + i of the block in nibble j. So one nibble of 32
neighbouring words is 32 neighbouring codes: a kernel unpacks a tile with shifts and masks alone and multiplies it at
once, where the checkpoint's words (eight neighbouring codes each) would need a transpose in registers. Blocks of all
rows lie together, [K / 256, N, 32], so that a kernel's tile is one contiguous piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.layout import (
    BF16_BITS,
    BITS_PER_BYTE,
    CODES_PER_WORD,
    INT4_BITS,
    INT4_CODE_MASK,
    PLANAR_BLOCK_CODES,
    PLANAR_BLOCK_WORDS,
    PLANAR_PADDING_WORD,
    PLANAR_SCALES_PER_WORD,
    WORD_BITS,
)

# Checkpoint words that hold the codes of one nibble of a block's planar words.
_WORDS_PER_PLANE = PLANAR_BLOCK_WORDS // CODES_PER_WORD
_LOW_HALF = (1 << BF16_BITS) - 1
# Words of a stack that are repacked at once: the temporary copies are a few times 64 MiB.
_PART_WORDS = 1 << 24


def _signed(word: int) -> int:
    return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word


@dataclass(frozen=True)
class PlanarWeight:
    """A weight [N, K], or a stack [E, N, K] with a leading E, repacked by `planar_weight`.

    `words`: int32 [B, N, 32], B = ceil(K / 256) blocks; codes past K are 0. `scales`: int32 [P, N], two BF16 scales a
    word (the even group in the low half), P = 128 * B / group_size; groups past K have scale 0. `group_size` None: one
    scale a row, P = 1, in the low half. Raises ShapeError when these do not hold.
    """

    words: Tensor
    scales: Tensor
    num_rows: int
    num_columns: int
    group_size: int | None

    def __post_init__(self) -> None:
        check_planar_group(self.group_size)
        stack = tuple(self.words.shape[:-3])
        blocks, pairs = num_planar_blocks(self.num_columns), num_scale_words(self.num_columns, self.group_size)
        wanted = ((*stack, blocks, self.num_rows, PLANAR_BLOCK_WORDS), (*stack, pairs, self.num_rows))
        if (tuple(self.words.shape), tuple(self.scales.shape)) != wanted or len(stack) > 1:
            raise ShapeError(
                f"planar words are {list(self.words.shape)} and scales {list(self.scales.shape)}, but a weight "
                f"[{self.num_rows}, {self.num_columns}] in groups of {self.group_size or 'a row'} needs "
                f"{list(wanted[0])} and {list(wanted[1])}"
            )
        for name, tensor in (("words", self.words), ("scales", self.scales)):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device != self.words.device:
                raise ShapeError(
                    f"planar {name} are {tensor.dtype} with strides {list(tensor.stride())} on {tensor.device}, but "
                    f"contiguous int32 on one device is needed"
                )

    @property
    def num_experts(self) -> int | None:
        """E of a stack of weights, None for a single one."""
        return self.words.shape[0] if self.words.ndim == 4 else None

    @property
    def num_blocks(self) -> int:
        """Blocks of 256 codes along K, the last one padded."""
        return self.words.shape[-3]

    @property
    def size_bytes(self) -> int:
        """Bytes of words and scales together, padding included."""
        return (self.words.numel() + self.scales.numel()) * (WORD_BITS // BITS_PER_BYTE)

    @property
    def device(self) -> torch.device:
        """Where the words lie."""
        return self.words.device

    def expert(self, index: int) -> PlanarWeight:
        """One weight of a stack, as a view."""
        return PlanarWeight(self.words[index], self.scales[index], self.num_rows, self.num_columns, self.group_size)


def check_planar_group(group_size: int | None) -> None:
    """ShapeError for groups that kernels cannot multiply: neither 32, 64 or 128 nor a whole row (None)."""
    if group_size is None:
        return
    if group_size <= 0 or group_size % PLANAR_BLOCK_WORDS or PLANAR_BLOCK_CODES % (group_size * PLANAR_SCALES_PER_WORD):
        raise ShapeError(
            f"groups of {group_size} weights have no planar form",
            remedy=f"use groups of {PLANAR_BLOCK_WORDS} to {PLANAR_BLOCK_CODES // PLANAR_SCALES_PER_WORD}, or None",
        )


def num_planar_blocks(num_columns: int) -> int:
    """Blocks of 256 codes that rows of `num_columns` need."""
    return -(-num_columns // PLANAR_BLOCK_CODES)


def num_scale_words(num_columns: int, group_size: int | None) -> int:
    """Scale words a row: two groups each over the padded row, or one for a channel scale."""
    if group_size is None:
        return 1
    return num_planar_blocks(num_columns) * PLANAR_BLOCK_CODES // (group_size * PLANAR_SCALES_PER_WORD)


def planar_weight(weight: Int4Weight) -> PlanarWeight:
    """The same codes and scales in planar order, on the same device; a stack is repacked one weight at a time.

    Raises ShapeError for groups that are no power of two from 32 to 128 (a kernel multiplies 32 codes at a time).
    """
    group = weight.group_size
    check_planar_group(group)
    blocks, pairs = num_planar_blocks(weight.num_columns), num_scale_words(weight.num_columns, group)
    shape = weight.packed.shape[:-1]
    stack = shape[:-1]
    words = torch.empty(*stack, blocks, shape[-1], PLANAR_BLOCK_WORDS, dtype=torch.int32, device=weight.device)
    scales = torch.empty(*stack, pairs, shape[-1], dtype=torch.int32, device=weight.device)
    scale_bits = weight.scale_bits.view(torch.int16)
    for part in _parts(weight):
        words[part] = _planar_words(weight.packed[part], blocks)
        scales[part] = _planar_scales(scale_bits[part], pairs)
    return PlanarWeight(words, scales, weight.num_rows, weight.num_columns, group)


def checkpoint_weight(planar: PlanarWeight) -> Int4Weight:
    """The inverse of `planar_weight`: the checkpoint's words and scale bits (int16) again, padding dropped."""
    groups = 1 if planar.group_size is None else planar.num_columns // planar.group_size
    packed = _checkpoint_words(planar.words)[..., : planar.num_columns // CODES_PER_WORD]
    scales = _checkpoint_scales(planar.scales)[..., :groups]
    return Int4Weight(packed.contiguous(), scales.contiguous(), planar.group_size)


def _parts(weight: Int4Weight) -> Iterator[EllipsisType | slice]:
    """Runs of experts of a stack whose temporary copies stay small; all of a single weight."""
    if weight.num_experts is None:
        yield ...
        return
    step = max(1, _PART_WORDS // weight.packed[0].numel())
    for first in range(0, weight.num_experts, step):
        yield slice(first, first + step)


def _planar_words(packed: Tensor, blocks: int) -> Tensor:
    """Planar words [.., B, N, 32] of checkpoint words [.., N, K / 8]."""
    missing = blocks * PLANAR_BLOCK_WORDS - packed.shape[-1]
    padded = torch.nn.functional.pad(packed, (0, missing), value=_signed(PLANAR_PADDING_WORD))
    planes = padded.view(*packed.shape[:-1], blocks, CODES_PER_WORD, _WORDS_PER_PLANE, 1)
    shifts = INT4_BITS * torch.arange(CODES_PER_WORD, dtype=torch.int32, device=packed.device)
    result = torch.zeros(1, dtype=torch.int32, device=packed.device)
    for plane in range(CODES_PER_WORD):
        codes = (planes[..., plane, :, :] >> shifts) & INT4_CODE_MASK
        result = result | (codes << (INT4_BITS * plane))
    return result.flatten(-2).transpose(-3, -2)


def _checkpoint_words(words: Tensor) -> Tensor:
    """Checkpoint words [.., N, B * 32] of planar words [.., B, N, 32]."""
    planar = words.transpose(-3, -2)
    planar = planar.reshape(*planar.shape[:-1], _WORDS_PER_PLANE, CODES_PER_WORD)
    shifts = INT4_BITS * torch.arange(CODES_PER_WORD, dtype=torch.int32, device=words.device)
    planes = []
    for plane in range(CODES_PER_WORD):
        codes = (planar >> (INT4_BITS * plane)) & INT4_CODE_MASK
        # The fields do not overlap: their sum, cut to 32 bits, is their union.
        planes.append((codes << shifts).sum(-1, dtype=torch.int32))
    return torch.stack(planes, dim=-2).flatten(-3)


def _planar_scales(bits: Tensor, pairs: int) -> Tensor:
    """Scale words [.., P, N] of scale bits int16 [.., N, G]."""
    padded = torch.nn.functional.pad(bits, (0, pairs * PLANAR_SCALES_PER_WORD - bits.shape[-1])).to(torch.int32)
    even, odd = padded.view(*bits.shape[:-1], pairs, PLANAR_SCALES_PER_WORD).unbind(-1)
    return ((even & _LOW_HALF) | (odd << BF16_BITS)).transpose(-2, -1)


def _checkpoint_scales(scales: Tensor) -> Tensor:
    """Scale bits int16 [.., N, 2 * P] of scale words [.., P, N]."""
    halves = torch.stack((scales, scales >> BF16_BITS), dim=-1).to(torch.int16)
    return halves.transpose(-3, -2).flatten(-2)
