"""The cut of every stored tensor: by rows, by columns, whole, or on one rank; and back, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from cut_cases import FORMATS, NAME, CutCase, as_array, cut_cases, random_contents, tensor_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.families.roles import BY_COLUMNS, BY_ROWS, REPLICATED, Role, TensorSpec, TpRule
from memopt.compressor.ranks.cut import CutKind, cut_of, cuts_of, owner_of, rank_size_bytes
from memopt.compressor.ranks.merge_job import MergeWorker
from memopt.compressor.ranks.shard_job import stored_tensors
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.ranks.unit_writer import UnitWriter
from memopt.compressor.units import Unit, hub_layout
from memopt.errors import AlignmentError, ContentError
from memopt.manifests.rank_folders import RankLayout
from memopt.manifests.safetensors_header import read_header

FILE = "model-00001-of-00001.safetensors"
TP4, EP4 = RankLayout("tp", 4), RankLayout("ep", 4)


def spec_of(shape: tuple[int, ...], tp: TpRule, expert: int | None = None) -> TensorSpec:
    return TensorSpec(NAME, shape, Role.ROUTED_EXPERT, tp, expert=expert, num_experts=0 if expert is None else 8)


# Format, shape, rule -> (kind, rank shape) of every output on four ranks.
CUTS = [
    ("bf16", (512, 384), BY_ROWS, [("rows", (128, 384))]),
    ("bf16", (512, 384), BY_COLUMNS, [("columns", (512, 96))]),
    ("bf16", (512, 384), REPLICATED, [("replicated", (512, 384))]),
    ("vector", (512,), BY_ROWS, [("rows", (128,))]),
    ("fp8-block", (1024, 384), BY_ROWS, [("rows", (256, 384)), ("rows", (2, 3))]),
    ("fp8-block", (384, 1024), BY_COLUMNS, [("columns", (384, 256)), ("columns", (3, 2))]),
    # One row of blocks is above all rows: every rank needs it.
    ("fp8-block", (128, 384), BY_ROWS, [("rows", (32, 384)), ("replicated", (1, 3))]),
    ("fp8-block", (576, 384), REPLICATED, [("replicated", (576, 384)), ("replicated", (5, 3))]),
    ("fp8-channel", (512, 384), BY_ROWS, [("rows", (128, 384)), ("rows", (128, 1))]),
    ("fp8-channel", (512, 384), BY_COLUMNS, [("columns", (512, 96)), ("replicated", (512, 1))]),
    ("fp8-channel-vector", (512, 384), BY_ROWS, [("rows", (128, 384)), ("rows", (128,))]),
    ("fp8-channel-vector", (512, 384), BY_COLUMNS, [("columns", (512, 96)), ("replicated", (512,))]),
    ("fp8-tensor", (512, 384), BY_ROWS, [("rows", (128, 384)), ("replicated", ())]),
    ("int4-32", (512, 384), BY_ROWS, [("rows", (128, 48)), ("rows", (128, 12)), ("shape", (2,))]),
    ("int4-32", (512, 384), BY_COLUMNS, [("columns", (512, 12)), ("columns", (512, 3)), ("shape", (2,))]),
    ("int4-channel", (512, 384), BY_COLUMNS, [("columns", (512, 12)), ("replicated", (512, 1)), ("shape", (2,))]),
    ("int4-128", (512, 384), REPLICATED, [("replicated", (512, 48)), ("replicated", (512, 3)), ("replicated", (2,))]),
]


@pytest.mark.parametrize(("form", "shape", "tp", "expected"), CUTS)
def test_words_and_scales_are_cut_together(
    form: str, shape: tuple[int, ...], tp: TpRule, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    plan = tensor_plan(form, spec_of(shape, tp))
    assert [(str(cut.kind), cut.rank_shape) for cut in cuts_of(plan, TP4)] == expected
    assert all(cut.holders == (0, 1, 2, 3) and cut.owner is None for cut in cuts_of(plan, TP4))


def test_a_rank_stores_the_shape_of_its_own_slice() -> None:
    for tp, shape in ((BY_ROWS, (128, 384)), (BY_COLUMNS, (512, 96))):
        (*_, cut) = cuts_of(tensor_plan("int4-32", spec_of((512, 384), tp)), TP4)
        assert (cut.kind, cut.slice_shape, cut.num_digests) == (CutKind.SHAPE, shape, 4)


def test_whole_experts_stay_with_contiguous_owners() -> None:
    assert [owner_of(spec_of((8, 8), BY_ROWS, expert), EP4) for expert in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert owner_of(spec_of((8, 8), BY_ROWS, 5), TP4) is None
    plan = tensor_plan("int4-32", spec_of((512, 384), BY_COLUMNS, 5))
    for output, cut in zip(plan.outputs, cuts_of(plan, EP4), strict=True):
        assert (cut.kind, cut.rank_shape, cut.holders, cut.num_digests) == (CutKind.EXPERT, output.shape, (2,), 1)
        assert [rank_size_bytes(output, cut, rank) for rank in range(4)] == [0, 0, output.size_bytes, 0]
    # Every other tensor is cut as by tensor-parallel ranks.
    plan = tensor_plan("int4-32", spec_of((512, 384), BY_COLUMNS))
    assert cuts_of(plan, EP4) == cuts_of(plan, TP4)


def test_what_cannot_be_cut_is_refused_by_its_name() -> None:
    plan = tensor_plan("int4-128", spec_of((512, 384), BY_COLUMNS))
    scale = plan.outputs[1]
    with refusal(AlignmentError, scale.name, "(512, 3)", "2 ranks", "memopt plan"):
        cut_of(scale, plan, RankLayout("tp", 2))


class FileReads:
    """Positional reads below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_into(self, tensor: StoredTensor, offset: int, buffer: memoryview) -> None:
        with open(self._folder / tensor.file, "rb") as file:
            file.seek(tensor.start + offset)
            assert file.readinto(buffer) == buffer.nbytes


class Collected:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def append(self, name: str, chunk: bytes | bytearray | memoryview, /) -> None:
        self.contents[name] = self.contents.get(name, b"") + bytes(memoryview(chunk).cast("B"))


def write_unit(unit: Unit, contents: Mapping[str, bytes], rows_a_chunk: int, folder: Path) -> UnitDigests:
    """Write `contents` as a worker does, whole rows at a time."""
    for file in unit.files:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
    with UnitWriter(unit, lambda name: folder / name) as out:
        for tensor in unit.layout:
            raw = contents[tensor.name]
            step = max(1, len(raw) // (tensor.shape[0] if tensor.shape else 1)) * rows_a_chunk
            if tensor.name.endswith("_shape"):
                step = len(raw)
            for start in range(0, len(raw), step):
                out.append(tensor.name, raw[start : start + step])
        return out.finish()


@given(case=cut_cases(), seed=st.integers(0, 2**32), rows_a_chunk=st.integers(1, 5), writes_hub=st.booleans())
@settings(max_examples=150, deadline=None)
def test_hub_to_ranks_and_back_gives_every_bit(
    case: CutCase, seed: int, rows_a_chunk: int, writes_hub: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("unit")
    plan, layout = case.plan, case.layout
    contents = random_contents(plan, seed)
    unit = Unit(1, FILE, (plan,), hub_layout((plan,)), layout, writes_hub)
    digests = write_unit(unit, contents, rows_a_chunk, folder)
    assert digests.whole == {name: hashlib.sha256(raw).hexdigest() for name, raw in contents.items()}
    held: dict[str, dict[int, bytes]] = {}
    for file in unit.files:
        assert (folder / file.name).stat().st_size == file.size_bytes
        header = read_header(folder / file.name)
        assert (header.tensors, header.metadata) == (file.layout, file.metadata)
        raw = (folder / file.name).read_bytes()
        for tensor in header.tensors:
            content = raw[header.data_start + tensor.start : header.data_start + tensor.end]
            if file.rank is None:
                assert content == contents[tensor.name]
            else:
                held.setdefault(tensor.name, {})[file.rank] = content
    for output in plan.outputs:
        cut, slices = cut_of(output, plan, layout), held[output.name]
        assert tuple(slices) == cut.holders
        for rank, content in slices.items():
            digest = digests.ranks[output.name][cut.digest_index(rank)]
            assert digest == hashlib.sha256(content).hexdigest()
        assert len(digests.ranks[output.name]) == cut.num_digests
        if cut.kind in {CutKind.ROWS, CutKind.COLUMNS}:
            # numpy's own concatenation, not the code under test.
            parts = [as_array(content, output.dtype, cut.rank_shape) for content in slices.values()]
            whole = np.concatenate(parts, axis=0 if cut.kind is CutKind.ROWS else 1)
            assert (whole.shape, whole.tobytes()) == (output.shape, contents[output.name])
        elif cut.kind is CutKind.SHAPE:
            kind = np.int32 if output.dtype == "I32" else np.int64
            assert {tuple(np.frombuffer(raw, kind).tolist()) for raw in slices.values()} == {cut.slice_shape}
        else:
            assert set(slices.values()) == {contents[output.name]}
    merged = Collected()
    parts_of = {file.rank: stored_tensors(file) for file in unit.rank_files if file.rank is not None}
    MergeWorker(FileReads(folder), layout, parts_of, digests.ranks, lambda _: None).run(plan, merged)
    assert merged.contents == {name: raw for name, raw in contents.items() if raw}


@pytest.mark.parametrize(
    ("form", "tp"),
    # A vector has no columns.
    [(f, tp) for f in FORMATS for tp in (BY_ROWS, BY_COLUMNS, REPLICATED) if (f, tp) != ("vector", BY_COLUMNS)],
)
def test_a_slice_with_another_bit_is_named(form: str, tp: TpRule, tmp_path: Path) -> None:
    shape = (512,) if form == "vector" else (512, 1024)
    plan = tensor_plan(form, spec_of(shape, tp))
    layout = RankLayout("tp", 2)
    unit = Unit(1, FILE, (plan,), hub_layout((plan,)), layout)
    digests = write_unit(unit, random_contents(plan, 1), 100, tmp_path)
    (_, file) = unit.rank_files
    parts = {rank: stored_tensors(f) for rank, f in enumerate(unit.rank_files)}
    for tensor in parts[1].values():
        raw = bytearray((tmp_path / file.name).read_bytes())
        raw[tensor.start] ^= 1
        (tmp_path / file.name).write_bytes(raw)
        worker = MergeWorker(FileReads(tmp_path), layout, parts, digests.ranks, lambda _: None)
        with refusal(ContentError, tensor.name, "tp2/rank-1", "the slice of rank 1", "ledger.jsonl"):
            worker.run(plan, Collected())
        raw[tensor.start] ^= 1
        (tmp_path / file.name).write_bytes(raw)
