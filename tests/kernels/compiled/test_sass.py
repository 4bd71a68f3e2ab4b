"""The reader of SASS on excerpts of what ptxas 12.9 writes, and the budget rules on figures made up for each rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from compiled import budget
from compiled.build import Figures, parse_amdgcn
from compiled.sass import Resources, inner_loop, parse_instructions, parse_resources

# A software pipeline on sm_100: the wait's retry stands behind the kernel, at 0100, and branches back into the loop.
PIPELINE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                  /* 0x00000a00ff017b82 */
                                                                                           /* 0x000e220000000800 */
        /*0010*/              @!P0 EXIT ;                                                  /* 0x000000000000894d */
        /*0020*/                   LDGSTS.E.BYPASS.128 [R29+0x2000], desc[UR18][R20.64] ;  /* 0x02000000141d7fae */
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR23], R28 ;        /* 0x0000001cff0075a7 */
        /*0040*/              @!P3 BRA 0x100 ;                                             /* 0x0000001000c8b947 */
        /*0050*/                   UTCHMMA gdesc[UR4], gdesc[UR10], tmem[UR8], !UPT ;      /* 0x00ff120a040075ea */
        /*0060*/                   NOP ;                                                   /* 0x0000000000007918 */
        /*0070*/              @!P2 BRA 0x20 ;                                              /* 0xfffffff80084b947 */
        /*0080*/                   LDG.E.U16 R8, desc[UR18][R4.64] ;                       /* 0x0000001204087981 */
        /*0090*/                   EXIT ;                                                  /* 0x000000000000794d */
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR23], R28 ;        /* 0x0000001cff0075a7 */
        /*0110*/              @!P3 BRA 0x100 ;                                             /* 0xfffffffc00f8b947 */
        /*0120*/                   BRA 0x50 ;                                              /* 0xffffffec002c7947 */
        /*0130*/                   BRA 0x130;                                              /* 0xfffffffc00fc7947 */
        /*0140*/                   NOP;                                                    /* 0x0000000000007918 */
"""

NESTED = """
        /*0000*/                   MOV R1, RZ ;            /* 0x0 */
        /*0010*/                   LDL R2, [R1] ;          /* 0x0 */
        /*0020*/                   LDG.E.128 R4, [R2] ;    /* 0x0 */
        /*0030*/                   BSSY B0, 0x70 ;         /* 0x0 */
        /*0040*/               @P1 BRA 0x60 ;              /* 0x0 */
        /*0050*/                   FADD R5, R5, R6 ;       /* 0x0 */
        /*0060*/                   BSYNC B0 ;              /* 0x0 */
        /*0070*/                   BRA.U UP0, 0x20 ;       /* 0x0 */
        /*0080*/               @P0 BRA 0x10 ;              /* 0x0 */
        /*0090*/                   EXIT ;                  /* 0x0 */
"""

STRAIGHT = """
        /*0000*/                   LDG.E.U8 R4, [R2] ;     /* 0x0 */
        /*0010*/              @!P0 BRA 0x30 ;              /* 0x0 */
        /*0020*/                   CALL.REL.NOINC 0x60 ;   /* 0x0 */
        /*0030*/                   STG.E [R2], R4 ;        /* 0x0 */
        /*0040*/                   EXIT ;                  /* 0x0 */
        /*0050*/                   BRA 0x50;               /* 0x0 */
        /*0060*/                   MUFU.RCP R4, R4 ;       /* 0x0 */
        /*0070*/                   RET.REL.NODEC R2 0x0 ;  /* 0x0 */
"""


def test_a_retry_behind_the_kernel_is_not_a_loop_over_it() -> None:
    loop = inner_loop(parse_instructions(PIPELINE))
    addresses = [instruction.address for instruction in loop.instructions]
    assert addresses == [0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x120]
    assert not loop.is_whole_kernel
    assert loop.count == 6  # without the NOP
    assert loop.widest_load_bits == 128


def test_the_inner_of_two_loops_is_taken() -> None:
    loop = inner_loop(parse_instructions(NESTED))
    assert [instruction.address for instruction in loop.instructions] == list(range(0x20, 0x80, 0x10))
    assert loop.num_local_accesses == 0  # the spill stands in the outer loop
    assert loop.widest_load_bits == 128


def test_without_a_loop_the_whole_kernel_counts_but_no_subroutine() -> None:
    loop = inner_loop(parse_instructions(STRAIGHT))
    assert loop.is_whole_kernel
    assert [instruction.address for instruction in loop.instructions] == list(range(0, 0x50, 0x10))
    assert loop.widest_load_bits == 8


def test_accesses_to_local_memory_are_counted() -> None:
    loop = inner_loop(parse_instructions(NESTED.replace("FADD R5, R5, R6", "STL [R1], R6")))
    assert loop.num_local_accesses == 1


@pytest.mark.parametrize(
    ("operation", "bits"),
    [
        ("LDG.E.128", 128),
        ("LDG.E.64.CONSTANT", 64),
        ("LDG.E", 32),
        ("LDG.E.U16", 16),
        ("LDG.E.S8.CONSTANT", 8),
        ("LDGSTS.E.BYPASS.LTC128B.128", 128),
        ("LDGSTS.E", 32),
        ("UBLKCP.S.G", 1024),
        ("LDS.128", 0),
        ("STG.E.128", 0),
    ],
)
def test_load_widths(operation: str, bits: int) -> None:
    (instruction,) = parse_instructions(f"        /*0000*/   {operation} R4, [R2] ;  /* 0x0 */")
    assert instruction.load_bits == bits


def test_resources() -> None:
    text = "Fatbin:\n Function _k:\n  REG:178 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0"
    assert parse_resources(text) == Resources(registers=178, spill_bytes=24)
    with pytest.raises(ValueError, match="no resource line"):
        parse_resources("nothing")
    with pytest.raises(ValueError, match="no instruction"):
        parse_instructions("nothing")


def test_amd_metadata() -> None:
    text = ".sgpr_spill_count: 0\n .vgpr_count:     126\n .vgpr_spill_count: 3\n .private_segment_fixed_size: 12\n"
    assert parse_amdgcn(text)["vgpr_count"] == 126
    assert parse_amdgcn(text)["vgpr_spill_count"] == 3
    with pytest.raises(ValueError, match="names no vgpr_count"):
        parse_amdgcn(".sgpr_spill_count: 0")


GOOD = Figures("gemm/case", "sm_90", 100, 0, 4096, 232448, 4.0, 128, 128, 0)
ALLOWED = {"registers": 100, "spill_bytes": 0, "shared_bytes": 4096, "instructions_per_item": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"registers": 64, "shared_bytes": 0}, None),
        ({"instructions_per_item": 3.9}, None),
        ({"instructions_per_item": 3.7}, "lower the budget of 4.0"),
        ({"instructions_per_item": 4.01}, "instructions_per_item 4.01 is above its budget of 4.0"),
        ({"instructions_per_item": None}, "instructions_per_item is None, but the budget says 4.0"),
        ({"registers": 101}, "registers 101 is above its budget of 100"),
        ({"spill_bytes": 8}, "spill_bytes 8 is above its budget of 0"),
        ({"shared_bytes": 300000}, "shared memory of 300000 bytes, but the target has 232448"),
        ({"num_local_accesses": 2}, "2 accesses to local memory in the inner loop"),
        ({"load_bits": 32}, "the widest load is 32 bits, but 128 are needed"),
    ],
)
def test_what_breaks_a_budget(change: dict[str, float | None], message: str | None) -> None:
    found = budget.findings([dataclasses.replace(GOOD, **change)], {"gemm/case": {"sm_90": ALLOWED}})  # type: ignore[arg-type]
    assert bool(found) == (message is not None)
    assert message is None or any(message in line for line in found)


def test_budgets_and_cases_belong_together() -> None:
    assert budget.findings([GOOD], {}) == ["gemm/case sm_90: there is no budget"]
    both = {"gemm/case": {"sm_90": ALLOWED, "sm_100": ALLOWED}}
    assert budget.findings([GOOD], both) == ["gemm/case sm_100: a budget without a case"]


def test_two_cases_of_one_name_are_refused() -> None:
    found = budget.findings([GOOD, GOOD], {"gemm/case": {"sm_90": ALLOWED}})
    assert found == ["gemm/case sm_90: two cases of this name"]


def test_a_spill_needs_a_reason() -> None:
    spilled, allowed = dataclasses.replace(GOOD, spill_bytes=8), {**ALLOWED, "spill_bytes": 8}
    assert budget.findings([spilled], {"gemm/case": {"sm_90": allowed}}) == [
        "gemm/case sm_90: a budget that allows spills needs a reason"
    ]
    assert budget.findings([spilled], {"gemm/case": {"sm_90": {**allowed, "reason": "…"}}}) == []


def test_rewriting_keeps_reasons_and_names_what_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FOLDER", tmp_path)
    assert len(budget.rewrite("gemm", [GOOD])) == 4
    kept = budget.read_budget("gemm")
    kept["gemm/case"]["sm_90"]["reason"] = "why"
    budget.path_of("gemm").write_text(str(kept).replace("'", '"'))
    changes = budget.rewrite("gemm", [dataclasses.replace(GOOD, registers=120, instructions_per_item=3.0)])
    assert changes == ["gemm/case sm_90 registers: 100 -> 120  UP", "gemm/case sm_90 instructions_per_item: 4.0 -> 3.0"]
    assert budget.read_budget("gemm")["gemm/case"]["sm_90"]["reason"] == "why"
