"""The few PTX instructions of kernels/device/half_pairs.py and int4_rounding_triton.py on numpy arrays, as PTX ISA 8.7
defines them; `emulated_assembly` lets Triton's interpreter run them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

U32 = npt.NDArray[np.uint32]


def _halves(x: U32) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    return (x & 0xFFFF).astype(np.uint16), (x >> 16).astype(np.uint16)


def _pair(low: npt.NDArray[np.uint16], high: npt.NDArray[np.uint16]) -> U32:
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def _each_half(function: Callable[..., npt.NDArray[Any]], dtype: torch.dtype) -> Callable[..., U32]:
    """`function` of float64 on both halves, its result rounded once to `dtype` (which float64 holds exactly)."""

    def apply(*operands: U32) -> U32:
        halves = []
        for side in range(2):
            bits = [torch.from_numpy(_halves(x)[side].view(np.int16).copy()).view(dtype) for x in operands]
            value = torch.from_numpy(np.asarray(function(*(b.to(torch.float64).numpy() for b in bits))))
            halves.append(value.to(dtype).view(torch.int16).numpy().view(np.uint16))
        return _pair(halves[0], halves[1])

    return apply


def _e4m3x2(x: U32) -> U32:
    """Two bytes to FP16, the lower to the lower half."""
    values = [torch.from_numpy(((x >> s) & 0xFF).astype(np.uint8)).view(torch.float8_e4m3fn) for s in (0, 8)]
    low, high = (v.to(torch.float16).view(torch.int16).numpy().view(np.uint16) for v in values)
    return _pair(low, high)


def _f32(x: U32) -> npt.NDArray[np.float32]:
    return x.view(np.float32)


def _round_f16x2(high: U32, low: U32) -> U32:
    """The first operand goes to the upper half."""
    return _pair(_f32(low).astype(np.float16).view(np.uint16), _f32(high).astype(np.float16).view(np.uint16))


def _not_equal(a: U32, b: U32) -> U32:
    differs = [x.view(np.float16) != y.view(np.float16) for x, y in zip(_halves(a), _halves(b), strict=True)]
    low, high = (np.where(d, 0xFFFF, 0).astype(np.uint16) for d in differs)
    return _pair(low, high)


def _prmt(a: U32, b: U32, selector: U32) -> U32:
    both, result = (b.astype(np.uint64) << np.uint64(32)) | a, np.zeros_like(a)
    for place in range(4):
        pick = (int(selector.flat[0]) >> (4 * place)) & 0xF
        assert pick < 8, "the sign mode is not used"
        result |= ((both >> np.uint64(8 * pick)) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * place)
    return result


def reciprocal_one_ulp_off(x: U32) -> U32:
    """rcp.approx.ftz.f32 may be one ulp off; here it always is."""
    return (np.float32(1.0) / _f32(x)).view(np.uint32) + np.uint32(1)


INSTRUCTIONS: dict[str, Callable[..., U32]] = {
    "mov.b32": lambda x: x,
    "cvt.rn.f16x2.e4m3x2": _e4m3x2,
    "cvt.f32.f16": lambda x: _halves(x)[0].view(np.float16).astype(np.float32).view(np.uint32),
    "cvt.rn.f16x2.f32": _round_f16x2,
    "abs.f16x2": lambda x: x & np.uint32(0x7FFF7FFF),
    "abs.bf16x2": lambda x: x & np.uint32(0x7FFF7FFF),
    # A NaN gives way to a number.
    "max.f16x2": _each_half(np.fmax, torch.float16),
    "max.bf16x2": _each_half(np.fmax, torch.bfloat16),
    "min.f16x2": _each_half(np.fmin, torch.float16),
    "fma.rn.f16x2": _each_half(lambda a, b, c: a * b + c, torch.float16),
    "add.f16x2": _each_half(np.add, torch.float16),
    "set.ne.u32.f16x2": _not_equal,
    "prmt.b32": _prmt,
    "rcp.approx.ftz.f32": reciprocal_one_ulp_off,
}


def run_ptx(text: str, inputs: Sequence[U32]) -> U32:
    """$0 after the PTX of `text`, with $1, $2 … given. KeyError for an instruction that is not in INSTRUCTIONS."""
    registers = {f"${index + 1}": value for index, value in enumerate(inputs)}

    def value(operand: str) -> U32:
        return registers[operand] if operand in registers else np.full_like(inputs[0], int(operand, 0))

    for statement in filter(
        None, (line.strip() for line in text.strip().removeprefix("{").removesuffix("}").split(";"))
    ):
        if statement.startswith(".reg"):
            continue
        name, rest = statement.split(maxsplit=1)
        if split := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest):
            registers[split[1]], registers[split[2]] = (half.astype(np.uint32) for half in _halves(value(split[3])))
            continue
        target, *operands = re.split(r",\s*", rest)
        registers[target] = INSTRUCTIONS[name](*(value(operand) for operand in operands))
    return registers["$0"]


@contextmanager
def emulated_assembly() -> Iterator[list[str]]:
    """Triton's interpreter runs inline assembly through `run_ptx`; gives the texts that it ran."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    seen: list[str] = []

    def create(builder: Any, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
        assert pack == 1, "which elements share a call is not said"
        seen.append(text)
        bits = [np.ascontiguousarray(value.data).view(np.uint32) for value in values]
        result = run_ptx(text, bits).view(np.float32 if constraints.startswith("=f") else np.int32)
        return _Call(TensorHandle(result, types[0].scalar if hasattr(types[0], "scalar") else types[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_inline_asm", create)
        yield seen


class _Call:
    """What the compiler's builder returns: results by number."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def get_result(self, index: int) -> Any:
        assert index == 0
        return self.handle
