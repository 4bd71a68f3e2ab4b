"""What the compile gate measures is what a launch compiles: no size makes another variant of an attention kernel."""

from __future__ import annotations

import pytest
from compiled import cases_attention, cases_attention_mla
from compiled.case import CompileCase

CASES = {case.kernel.__name__: case for case in (*cases_attention.CASES, *cases_attention_mla.CASES)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sizes_are_not_specialized(case: CompileCase) -> None:
    # Triton compiles anew for 1, for multiples of 16 and for addresses that are: seconds in the middle of serving.
    sizes = {name for name, kind in case.signature.items() if kind == "i32" and name not in case.aligned}
    open_sizes = {parameter.name for parameter in case.kernel.params if parameter.do_not_specialize}
    assert sizes <= open_sizes


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tables_counts_and_scales_may_lie_anywhere(case: CompileCase) -> None:
    names = {"block_table", "num_tokens", "layer_scale", "k_scale", "v_scale"}
    for parameter in case.kernel.params:
        if parameter.name in names:
            assert parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
