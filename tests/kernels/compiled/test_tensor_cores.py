"""The products of the Hessian kernel are those of the tensor cores, in their widest form."""

from __future__ import annotations

import pytest

from compiled.build import TARGETS, compile_case, disassemble


@pytest.mark.gate
@pytest.mark.parametrize(
    ("target", "instruction"), [("sm_90", "HGMMA.64x256x16.F32.BF16"), ("sm_100", "UTCHMMA"), ("gfx942", "v_mfma_f32")]
)
def test_the_hessian_kernel(target: str, instruction: str) -> None:
    from compiled.cases_hessian import CASES

    case = next(case for case in CASES if target in case.targets)
    kernel = compile_case(case, TARGETS[target])
    text = kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else disassemble(kernel)[1]
    assert instruction in text
