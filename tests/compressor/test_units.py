"""Output files: layer-aligned, no tensor in two, every tensor aligned to its items, sizes exact."""

from __future__ import annotations

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_plans import plan_of, published_plan, tiny

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.source_tensor import SourceFormat, SourceTensor
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.ranks.layout import Layouts
from memopt.compressor.tensor_plan import Fate, OutputTensor, TensorPlan
from memopt.compressor.units import DEFAULT_MAX_FILE_BYTES, Unit, build_units, output_size_bytes
from memopt.manifests.dtypes import ITEM_SIZE_BYTES, tensor_size_bytes
from memopt.manifests.rank_folders import parse_layout
from memopt.manifests.safetensors_header import LENGTH_SIZE_BYTES, parse_header

DTYPES = ["U8", "F8_E4M3", "BF16", "F32", "I64"]


def copied(name: str, layer: int | None, parts: list[tuple[str, tuple[int, ...]]]) -> TensorPlan:
    """A plan that copies `parts` (dtype, shape) of one logical tensor."""
    outputs = tuple(OutputTensor(f"{name}.{n}", dtype, shape) for n, (dtype, shape) in enumerate(parts))
    dtype, shape = parts[0]
    stored = StoredTensor(f"{name}.0", "x", dtype, shape, 0, tensor_size_bytes(dtype, shape))
    spec = TensorSpec(name, shape, Role.NORM, layer=layer)
    return TensorPlan(SourceTensor(spec, SourceFormat.PLAIN, stored), Fate.COPIED, outputs)


@st.composite
def plan_lists(draw: st.DrawFn) -> tuple[TensorPlan, ...]:
    """Tensors of odd shapes and types in a few layers, some files' worth."""
    part = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple))
    layers = draw(st.lists(st.lists(st.lists(part, min_size=1, max_size=3), max_size=6), min_size=1, max_size=5))
    return tuple(
        copied(f"layers.{layer}.t{number}", layer or None, parts)
        for layer, tensors in enumerate(layers)
        for number, parts in enumerate(tensors)
    )


def contents(unit: Unit) -> bytes:
    return unit.hub_file.header + bytes(unit.data_size_bytes)


@given(plans=plan_lists(), max_file_bytes=st.integers(8, 3000))
@settings(max_examples=150, deadline=None)
def test_files_hold_every_output_once_aligned_and_parse(plans: tuple[TensorPlan, ...], max_file_bytes: int) -> None:
    units = build_units(plans, max_file_bytes)
    assert [plan for unit in units for plan in unit.tensors] == list(plans)
    for number, unit in enumerate(units, start=1):
        assert unit.number == number
        assert unit.file_name == f"model-{number:05d}-of-{len(units):05d}.safetensors"
        assert unit.tensors
        raw = contents(unit)
        assert unit.hub_file.size_bytes == len(raw)
        header = parse_header(unit.hub_file.header[LENGTH_SIZE_BYTES:], len(raw), unit.file_name)
        assert header.metadata == {"format": "pt"}
        assert {t.name: (t.dtype, t.shape) for t in header.tensors} == {
            output.name: (output.dtype, output.shape) for plan in unit.tensors for output in plan.outputs
        }
        for tensor in unit.layout:
            assert (header.data_start + tensor.start) % ITEM_SIZE_BYTES[tensor.dtype] == 0, tensor
        assert len(safetensors.deserialize(raw)) == len(unit.layout)


@given(plans=plan_lists(), max_file_bytes=st.integers(8, 3000))
@settings(max_examples=150, deadline=None)
def test_a_layer_shares_a_file_whole_or_is_cut_alone(plans: tuple[TensorPlan, ...], max_file_bytes: int) -> None:
    units = build_units(plans, max_file_bytes)
    layers = [{plan.source.spec.layer for plan in unit.tensors} for unit in units]
    sizes: dict[int | None, int] = {}
    for plan in plans:
        sizes[plan.source.spec.layer] = sizes.get(plan.source.spec.layer, 0) + output_size_bytes(plan)
    for layer, size in sizes.items():
        files = [held for held in layers if layer in held]
        if size > max_file_bytes:
            assert all(held == {layer} for held in files)
            assert len(files) <= -(-size // max_file_bytes)
        else:
            assert len(files) == 1
    for unit, held in zip(units, layers, strict=True):
        largest = max(output_size_bytes(plan) for plan in unit.tensors)
        is_cut = any(sizes[layer] > max_file_bytes for layer in held)
        assert unit.data_size_bytes <= max_file_bytes + (largest if is_cut else 0)


@given(plans=plan_lists(), ranks=st.sampled_from(["tp1", "tp2", "ep2", "tp101"]))
@settings(max_examples=50, deadline=None)
def test_sizes_are_those_of_the_rendered_files(plans: tuple[TensorPlan, ...], ranks: str) -> None:
    """Ranks' headers are not rendered for their sizes: rank 9 and rank 10 differ by a digit, and by its padding."""
    for unit in build_units(plans, 3000, Layouts(parse_layout(ranks))):
        for file in unit.files:
            assert file.size_bytes == len(file.header) + file.data_size_bytes
        assert len({id(file.placed) for file in unit.rank_files}) == 1


def test_golden_order_of_odd_tensors() -> None:
    # Multiples of 8 bytes keep their order; then what is ragged, widest type first.
    plans = (
        copied("a", 0, [("U8", (3,))]),
        copied("b", 0, [("BF16", (3,))]),
        copied("c", 0, [("U8", (8,))]),
        copied("d", 0, [("F32", (1,))]),
        copied("e", 0, [("I64", (1,))]),
    )
    (unit,) = build_units(plans)
    assert [(t.name, t.start, t.end) for t in unit.layout] == [
        ("c.0", 0, 8),
        ("e.0", 8, 16),
        ("d.0", 16, 20),
        ("b.0", 20, 26),
        ("a.0", 26, 29),
    ]


def test_dropped_tensors_are_in_no_file() -> None:
    plan = copied("a", 0, [("U8", (3,))])
    dropped = TensorPlan(plan.source, Fate.DROPPED, (), reason="a buffer")
    (unit,) = build_units((dropped, plan))
    assert unit.tensors == (plan,)
    assert build_units((dropped,)) == ()


def test_a_smaller_limit_gives_a_layer_a_file_and_then_cuts_layers() -> None:
    def layers(max_file_bytes: int) -> list[list[int | None]]:
        plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", max_file_bytes=max_file_bytes)
        held = [{tensor.source.spec.layer for tensor in unit.tensors} for unit in plan.units]
        return [sorted(numbers, key=str) for numbers in held]

    assert layers(10_000_000) == [[0, 1, 2, 3, None]]
    assert layers(1_700_000) == [[None], [0], [1], [2], [3]]
    assert layers(1_000_000) == [[None], [0], [0], [1], [1], [2], [2], [3], [3]]


def test_glm_5_2_is_cut_into_files_of_two_to_four_gigabytes() -> None:
    units = published_plan("glm-5.2-fp8", "glm-5.2-int4").units
    assert len(units) == 154
    assert max(unit.hub_file.size_bytes for unit in units) < DEFAULT_MAX_FILE_BYTES
    assert min(unit.hub_file.size_bytes for unit in units) > 2e9
    assert sum(unit.data_size_bytes for unit in units) == 450_904_205_312
