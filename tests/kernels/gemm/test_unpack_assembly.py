"""The PTX that unpacks two planar words, run by a small interpreter of its five instructions."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
import torch

from memopt.kernels.gemm.planar_triton import unpack_assembly

U32 = npt.NDArray[np.uint32]


def prmt(a: U32, b: U32, selector: int) -> U32:
    """PTX ISA, prmt.b32 in its default mode: each nibble of the selector picks a byte of {b, a}."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros_like(a)
    for place in range(4):
        pick = (selector >> (4 * place)) & 0xF
        assert pick < 8, "the sign mode is not used"
        byte = (both >> np.uint64(8 * pick)) & np.uint64(0xFF)
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def lop3(a: U32, b: U32, c: U32, table: int) -> U32:
    """PTX ISA, lop3.b32: bit (a << 2 | b << 1 | c) of the table, for every bit."""
    result = np.zeros_like(a)
    for index in range(8):
        if (table >> index) & 1:
            terms = [value if (index >> (2 - n)) & 1 else ~value for n, value in enumerate((a, b, c))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def sub_bf16x2(a: U32, b: U32) -> U32:
    """PTX ISA, sub.bf16x2: BF16 subtraction of both halves."""
    pairs = [torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16) for value in (a, b)]
    return (pairs[0] - pairs[1]).view(torch.int16).numpy().view(np.uint32)


def run_assembly(text: str, first: U32, second: U32) -> U32:
    """$0 after the PTX of `text`, with $1 and $2 given."""
    registers: dict[str, U32] = {"$1": first, "$2": second}

    def value(operand: str) -> U32:
        if operand in registers:
            return registers[operand]
        return np.full_like(first, int(operand, 0))

    statements = [line.strip(" {}") for line in text.replace("}", "").split(";")]
    for statement in filter(None, statements):
        if statement.startswith(".reg"):
            continue
        name, rest = statement.split(maxsplit=1)
        target, *operands = re.split(r",\s*", rest.strip())
        if name == "prmt.b32":
            registers[target] = prmt(value(operands[0]), value(operands[1]), int(operands[2], 0))
        elif name == "shr.b32":
            registers[target] = value(operands[0]) >> np.uint32(int(operands[1], 0))
        elif name == "lop3.b32":
            registers[target] = lop3(*(value(operand) for operand in operands[:3]), int(operands[3], 0))
        elif name == "mov.b32":
            registers[target] = value(operands[0])
        elif name == "sub.bf16x2":
            registers[target] = sub_bf16x2(value(operands[0]), value(operands[1]))
        else:
            raise AssertionError(f"{name} is not one of the five instructions")
    return registers["$0"]


@pytest.mark.parametrize("plane", range(8))
def test_both_words_give_their_codes(plane: int) -> None:
    rng = np.random.default_rng(plane)
    first, second = rng.integers(0, 1 << 32, (2, 4096), dtype=np.uint32)
    # Every pair of nibbles of this plane comes up.
    nibbles = np.arange(256, dtype=np.uint32)
    clear = np.uint32(~(0xF << (4 * plane)) & 0xFFFFFFFF)
    first[:256] = (first[:256] & clear) | ((nibbles & 15) << np.uint32(4 * plane))
    second[:256] = (second[:256] & clear) | ((nibbles >> 4) << np.uint32(4 * plane))
    result = run_assembly(unpack_assembly(plane), first, second)
    values = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16).to(torch.float32).view(-1, 2)
    expected = [((word >> np.uint32(4 * plane)) & np.uint32(15)).astype(np.float32) - 8 for word in (first, second)]
    assert torch.equal(values, torch.from_numpy(np.stack(expected, axis=1)))


def test_the_interpreter_knows_the_instructions() -> None:
    a, b = np.array([0x03020100], np.uint32), np.array([0x07060504], np.uint32)
    assert prmt(a, b, 0x5410).tolist() == [0x05040100]
    assert prmt(a, b, 0x7632).tolist() == [0x07060302]
    c = np.array([0xFF00FF00], np.uint32)
    assert lop3(a, b, c, 0xEA).tolist() == ((a & b) | c).tolist()
    assert lop3(a, b, c, 0x96).tolist() == (a ^ b ^ c).tolist()
