"""Rank files: aligned without padding, what all ranks have at one place in all, and a unit's files together."""

from __future__ import annotations

from pathlib import Path

import pytest
from cut_cases import NAME, CutCase, cut_cases, tensor_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from memopt.compressor.families.roles import BY_COLUMNS, REPLICATED, Role, TensorSpec
from memopt.compressor.ranks.cut import cut_of
from memopt.compressor.ranks.rank_tensors import rank_tensors
from memopt.compressor.ranks.row_steps import row_steps
from memopt.compressor.ranks.unit_writer import UnitWriter
from memopt.compressor.tensor_plan import TensorPlan
from memopt.compressor.units import Unit, hub_layout
from memopt.errors import AlignmentError, SizeMismatchError
from memopt.manifests.dtypes import ITEM_SIZE_BYTES, tensor_size_bytes
from memopt.manifests.rank_folders import RankLayout
from memopt.manifests.safetensors_header import TensorHeader

FILE = "model-00001-of-00001.safetensors"
SCALE = tensor_plan("fp8-tensor", TensorSpec("a.weight", (2, 4), Role.ATTENTION, REPLICATED))
EXPERTS = [
    tensor_plan("int4-32", TensorSpec(f"e.{n}.weight", (3, 32), Role.ROUTED_EXPERT, expert=n, num_experts=4))
    for n in range(4)
]


def renamed(case: CutCase, number: int) -> TensorPlan:
    """The case's tensor under a name of its own."""
    plan, parts = case.plan, []
    for output in plan.outputs:
        parts.append(type(output)(f"{number}.{output.name}", output.dtype, output.shape))
    return TensorPlan(plan.source, plan.fate, tuple(parts))


@given(cases=st.lists(cut_cases(num_ranks=(4,)), min_size=1, max_size=6), kind=st.sampled_from(["tp", "ep"]))
@settings(max_examples=100, deadline=None)
def test_every_rank_has_its_parts_aligned_and_common_ones_at_one_place(cases: list[CutCase], kind: str) -> None:
    plans = [renamed(case, number) for number, case in enumerate(cases)]
    layout = RankLayout(kind, 4)
    try:
        files = rank_tensors(plans, layout)
    except AlignmentError:
        # The last test tells when.
        assert kind == "ep"
        return
    places: dict[str, set[TensorHeader]] = {}
    expected = {
        rank: {(o.name, cut_of(o, p, layout).rank_shape) for p in plans for o in p.outputs
               if rank in cut_of(o, p, layout).holders}
        for rank in range(4)
    }  # fmt: skip
    for rank, tensors in enumerate(files):
        assert {(tensor.name, tensor.shape) for tensor in tensors} == expected[rank]
        end = 0
        for tensor in tensors:
            assert tensor.start == end
            assert tensor.start % ITEM_SIZE_BYTES[tensor.dtype] == 0
            assert tensor.size_bytes == tensor_size_bytes(tensor.dtype, tensor.shape)
            places.setdefault(tensor.name, set()).add(tensor)
            end = tensor.end
    assert all(len(found) == 1 for found in places.values())


def test_common_tensors_come_before_whole_experts() -> None:
    norm = tensor_plan("vector", TensorSpec("z.weight", (4,), Role.NORM, REPLICATED))
    files = rank_tensors([*EXPERTS, norm], RankLayout("ep", 2))
    assert [[tensor.name.partition(".weight")[0] for tensor in file] for file in files] == [
        ["z", "e.0", "e.0", "e.1", "e.1", "e.0", "e.1"], ["z", "e.2", "e.2", "e.3", "e.3", "e.2", "e.3"],
    ]  # fmt: skip


def test_a_rank_without_any_tensor_of_a_unit_has_no_file() -> None:
    plans = tuple(EXPERTS[:2])
    unit = Unit(1, FILE, plans, hub_layout(plans), RankLayout("ep", 2))
    assert [file.name for file in unit.files] == [FILE, f"ep2/rank-0/{FILE}"]


def test_experts_after_a_part_that_is_not_a_multiple_of_8_bytes_are_refused() -> None:
    # Four bytes of scale, and no padding in the format.
    with refusal(AlignmentError, "a.weight_scale", "has 4 bytes", "would not be aligned", "tensor-parallel"):
        rank_tensors([SCALE, *EXPERTS], RankLayout("ep", 4))
    assert len(rank_tensors([SCALE, *EXPERTS], RankLayout("tp", 1))) == 1


@pytest.mark.parametrize("writes_hub", [True, False])
@pytest.mark.parametrize(("count", "word"), [(7, "bytes fewer than planned"), (9, "bytes more than planned")])
def test_a_row_too_few_or_too_many_is_refused(writes_hub: bool, count: int, word: str, tmp_path: Path) -> None:
    plan = tensor_plan("bf16", TensorSpec(NAME, (8, 4), Role.ROUTED_EXPERT, BY_COLUMNS))
    unit = Unit(1, FILE, (plan,), hub_layout((plan,)), RankLayout("tp", 2), writes_hub)
    with (
        UnitWriter(unit, lambda name: tmp_path / name.replace("/", "+")) as out,
        refusal(SizeMismatchError, NAME, FILE, word),
    ):
        for _ in range(count):
            out.append(NAME, bytes(8))
        out.finish()


def test_a_chunk_that_ends_within_a_row_cannot_be_cut(tmp_path: Path) -> None:
    plan = tensor_plan("bf16", TensorSpec(NAME, (8, 4), Role.ROUTED_EXPERT, BY_COLUMNS))
    unit = Unit(1, FILE, (plan,), hub_layout((plan,)), RankLayout("tp", 2))
    with (
        UnitWriter(unit, lambda name: tmp_path / name.replace("/", "+")) as out,
        refusal(SizeMismatchError, NAME, "12 bytes are not whole rows of 8"),
    ):
        out.append(NAME, bytes(12))


@given(rows=st.integers(0, 50), row_bytes=st.integers(0, 40), step_size_bytes=st.integers(1, 200))
def test_steps_are_whole_rows_and_all_of_them(rows: int, row_bytes: int, step_size_bytes: int) -> None:
    steps = list(row_steps((rows, row_bytes), rows * row_bytes, step_size_bytes))
    assert sum(step.size_bytes for step in steps) == rows * row_bytes
    position = 0
    for step in steps:
        assert (step.start, step.first * row_bytes, step.count * row_bytes) == (position, position, step.size_bytes)
        assert step.size_bytes <= max(step_size_bytes, row_bytes)
        position += step.size_bytes
    assert [step.size_bytes for step in row_steps((), 4)] == [4]
