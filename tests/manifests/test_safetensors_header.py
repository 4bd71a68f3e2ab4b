"""The strict safetensors header: what it accepts, and that it agrees with the safetensors library."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import within_seconds
from safetensors.torch import save, save_file

from memopt.errors import MemoptError
from memopt.manifests.dtypes import ITEM_SIZE_BYTES, tensor_size_bytes
from memopt.manifests.safetensors_header import (
    LENGTH_SIZE_BYTES,
    METADATA_KEY,
    FileHeader,
    TensorHeader,
    header_length,
    header_size_bytes,
    parse_header,
    read_header,
    render_header,
    tensor_members_size_bytes,
)

FILE = "model-00001-of-00002.safetensors"
NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != METADATA_KEY)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def parse_file(raw: bytes, file: str = FILE) -> FileHeader:
    """Parse a whole file's bytes as `read_header` does."""
    length = header_length(raw[:LENGTH_SIZE_BYTES], len(raw), file)
    return parse_header(raw[LENGTH_SIZE_BYTES : LENGTH_SIZE_BYTES + length], len(raw), file)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorHeader, ...]:
    """Tensors that fill a data section without a hole, in file order."""
    position = 0
    layout: list[TensorHeader] = []
    for name in draw(st.lists(NAMES, max_size=8, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(ITEM_SIZE_BYTES))), draw(SHAPES)
        end = position + tensor_size_bytes(dtype, shape)
        layout.append(TensorHeader(name, dtype, shape, position, end))
        position = end
    return tuple(layout)


def file_of(layout: tuple[TensorHeader, ...], metadata: dict[str, str]) -> bytes:
    return render_header(layout, metadata) + bytes(layout[-1].end if layout else 0)


@given(layout=layouts(), metadata=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
@settings(max_examples=150, deadline=None)
def test_rendered_headers_parse_and_the_library_reads_them_alike(
    layout: tuple[TensorHeader, ...], metadata: dict[str, str]
) -> None:
    raw = file_of(layout, metadata)
    header = parse_file(raw)
    # Empty tensors share an offset with their neighbours, so their order is not told by the file.
    assert sorted(header.tensors, key=lambda t: t.name) == sorted(layout, key=lambda t: t.name)
    assert header.metadata == metadata
    assert header.data_start % 8 == 0
    assert header.file_size_bytes == len(raw)
    assert header.data_start == header_size_bytes(tensor_members_size_bytes(layout), metadata)
    assert header.sha256 == hashlib.sha256(raw[: header.data_start]).hexdigest()
    theirs = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in safetensors.deserialize(raw)}
    assert theirs == {tensor.name: (tensor.dtype, tensor.shape) for tensor in layout}


@given(
    tensors=st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), SHAPES), max_size=6),
    filler=st.integers(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_files_of_the_library_parse(tensors: dict[str, tuple[str, tuple[int, ...]]], filler: int) -> None:
    contents = {
        name: torch.full((tensor_size_bytes(dtype, shape),), filler, dtype=torch.uint8)
        .view(TORCH_DTYPES[dtype])
        .reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }
    raw = save(contents, {"format": "pt"})
    header = parse_file(raw)
    assert {t.name: (t.dtype, t.shape) for t in header.tensors} == tensors
    assert raw[header.data_start :] == bytes([filler]) * sum(t.size_bytes for t in header.tensors)
    assert header.metadata == {"format": "pt"}


BASE_LAYOUT = (
    TensorHeader("model.embed_tokens.weight", "BF16", (4, 8), 0, 64),
    TensorHeader("model.layers.0.mlp.gate.weight", "F32", (2, 4), 64, 96),
    TensorHeader("model.layers.0.mlp.experts.0.up_proj.weight", "F8_E4M3", (3, 5), 96, 111),
)
BASE = file_of(BASE_LAYOUT, {"format": "pt"})
# Bytes that mean something to JSON or to the length prefix break more than arbitrary ones.
FRAGMENTS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"-", b"0", b"9", b"e", b".", b"null", b"true", b"\xff"]
FRAGMENTS += [b"\x00", b"NaN", b"1e999", b"\\ud800", b'"dtype"', b"[[[[", b"F32", b"99999999999999999999"]


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(BASE) - 1),
            st.integers(0, 4),
            st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=4)),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=400, deadline=None)
def test_a_damaged_file_is_refused_or_the_library_accepts_it_too(edits: list[tuple[int, int, bytes]]) -> None:
    raw = bytearray(BASE)
    for position, removed, inserted in edits:
        raw[position : position + removed] = inserted
    try:
        with within_seconds(5):
            header = parse_file(bytes(raw))
    except MemoptError as problem:
        refused = problem.exit_code in {8, 9} and FILE in str(problem)
        assert refused, str(problem)  # noqa: PT017 (most edits are refused, some are harmless)
        return
    entries = safetensors.deserialize(bytes(raw))
    assert {name for name, _ in entries} == {tensor.name for tensor in header.tensors}


@given(raw=st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_nothing_but_a_refusal_or_an_empty_file(raw: bytes) -> None:
    try:
        header = parse_file(raw)
    except MemoptError:
        return
    assert header.tensors == ()


def test_golden_bytes_of_a_header() -> None:
    rendered = render_header((TensorHeader("w", "BF16", (2, 3), 0, 12),), {"format": "pt"})
    json_text = '{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    padded = json_text.encode() + b" " * (-len(json_text) % 8)
    assert rendered == len(padded).to_bytes(8, "little") + padded


def test_header_of_a_file_on_disk_is_read_without_its_data(tmp_path: Path) -> None:
    path = tmp_path / FILE
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "a": torch.zeros(5, dtype=torch.float32)}
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {t.name: (t.dtype, t.shape, t.size_bytes) for t in header.tensors} == {
        "a": ("F32", (5,), 20),
        "b": ("BF16", (2, 3), 12),
    }
    assert header.file_size_bytes == path.stat().st_size == header.data_start + 32


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZE_BYTES))
def test_every_known_dtype_is_the_librarys(dtype: str) -> None:
    raw = file_of((TensorHeader("w", dtype, (3,), 0, 3 * ITEM_SIZE_BYTES[dtype]),), {})
    ((name, entry),) = safetensors.deserialize(raw)
    assert (name, entry["dtype"], len(entry["data"])) == ("w", dtype, 3 * ITEM_SIZE_BYTES[dtype])


def test_a_header_of_many_tensors_parses_fast() -> None:
    table = {
        f"model.layers.{n}.weight": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(50_000)
    }
    raw = json.dumps(table).encode()
    with within_seconds(10):
        header = parse_header(raw, LENGTH_SIZE_BYTES + len(raw) + 50_000, FILE)
    assert len(header.tensors) == 50_000
