"""Every way in which a weight file lies: one named refusal each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal, within_seconds

from memopt.errors import (
    HeaderError,
    LayoutError,
    LfsPointerError,
    MemoptError,
    MissingFileError,
    TruncatedError,
    UnsupportedError,
)
from memopt.manifests.safetensors_header import MAX_HEADER_SIZE_BYTES, read_header

SHARD = "model-00007-of-00142.safetensors"


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw_file(header: Any, data: bytes = bytes(4)) -> bytes:
    """A file whose header is `header` (JSON text, or anything that json can write), unpadded."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / SHARD
    path.write_bytes(raw)
    with within_seconds(10):
        read_header(path)


ENTRY = json.dumps(entry()).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5368709120\n"
TWO = {"a.weight": entry(), "b.weight": entry(offsets=(4, 8))}
CASES: dict[str, tuple[bytes, type[MemoptError], tuple[str, ...]]] = {
    "empty file": (b"", TruncatedError, ("0 bytes", "too short")),
    "shorter than its length": (b"\x01\x02\x03", TruncatedError, ("3 bytes",)),
    "git-lfs pointer": (POINTER, LfsPointerError, ("Git-LFS pointer", "git lfs pull")),
    "giant length": ((2**63).to_bytes(8, "little") + b"{}", HeaderError, ("9,223,372,036,854,775,808", "100,000,000")),
    "length over the cap": (
        (MAX_HEADER_SIZE_BYTES + 1).to_bytes(8, "little") + b"{}",
        HeaderError,
        ("100,000,001", "100,000,000"),
    ),
    "header beyond the file": ((5000).to_bytes(8, "little") + b"{}", TruncatedError, ("5,008", "10", "half-written")),
    "no header": (raw_file(b"", b""), HeaderError, ("must start with '{'",)),
    "not a brace": (raw_file(b" {}", b""), HeaderError, ("must start with '{'",)),
    "a list": (raw_file(b"[]", b""), HeaderError, ("must start with '{'",)),
    "bad UTF-8": (raw_file(b'{"\xff\xfe": 1}'), HeaderError, ("not strict JSON", "utf-8")),
    "half a character": (
        raw_file(b'{"\\ud800": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
        HeaderError,
        ("unpaired surrogate",),
    ),
    "cut JSON": (raw_file(b'{"a.weight": {"dtype": "U8"'), HeaderError, ("not strict JSON",)),
    "text after the object": (raw_file(b"{} {}", b""), HeaderError, ("not strict JSON", "Extra data")),
    "NaN": (raw_file(b'{"a": NaN}'), HeaderError, ("NaN is not JSON",)),
    "Infinity": (raw_file(b'{"a": -Infinity}'), HeaderError, ("-Infinity is not JSON",)),
    "deep nesting": (raw_file(b'{"a":' + b"[" * 200_000), HeaderError, ("nesting is too deep",)),
    "deep shape": (raw_file(b'{"a.weight":{"dtype":"U8","shape":' + b"[" * 800 + b"]" * 800
                            + b',"data_offsets":[0,4]}}'), HeaderError, ("a.weight", "shape")),
    "long shape": (raw_file({"a.weight": entry(shape=[1] * 100_000)}), HeaderError, ("a.weight", "shape")),
    "duplicate name": (
        raw_file(b'{"a.weight":%b,"a.weight":%b}' % (ENTRY, ENTRY)),
        HeaderError,
        ("'a.weight' appears twice",),
    ),
    "duplicate key in an entry": (
        raw_file(b'{"a.weight":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}'),
        HeaderError,
        ("'dtype' appears twice",),
    ),
    "duplicate metadata": (
        raw_file(b'{"__metadata__":{"x":"1"},"__metadata__":{"x":"2"}}', b""),
        HeaderError,
        ("'__metadata__' appears twice",),
    ),
    "metadata of numbers": (raw_file({"__metadata__": {"step": 7}}, b""), HeaderError, ("strings to strings",)),
    "metadata a list": (raw_file({"__metadata__": []}, b""), HeaderError, ("strings to strings",)),
    "entry a list": (raw_file({"a.weight": [0, 4]}), HeaderError, ("a.weight", "exactly")),
    "entry without shape": (
        raw_file({"a.weight": {"dtype": "U8", "data_offsets": [0, 4]}}),
        HeaderError,
        ("a.weight", "shape"),
    ),
    "entry with more": (raw_file({"a.weight": {**entry(), "strides": [1]}}), HeaderError, ("a.weight", "exactly")),
    "dtype a number": (raw_file({"a.weight": entry(dtype=8)}), HeaderError, ("a.weight", "string")),
    "unknown dtype": (raw_file({"a.weight": entry(dtype="F4")}), UnsupportedError, ("a.weight", "'F4'", "BF16")),
    "nine dimensions": (raw_file({"a.weight": entry(shape=[1] * 8 + [4])}), HeaderError, ("a.weight", "shape")),
    "shape a number": (raw_file({"a.weight": entry(shape=4)}), HeaderError, ("a.weight", "shape 4")),
    "three offsets": (raw_file({"a.weight": entry(offsets=[0, 4, 4])}), HeaderError, ("a.weight", "[0, 4, 4]")),
    "offsets a text": (raw_file({"a.weight": entry(offsets="04")}), HeaderError, ("a.weight", "'04'")),
    "product too large": (
        raw_file({"a.weight": entry("F32", [2**40, 2**40], [0, 4])}),
        HeaderError,
        ("a.weight", f"{2**82:,}", "4"),
    ),
    "product too small": (raw_file({"a.weight": entry("F32", [4], [0, 4])}), HeaderError, ("a.weight", "16", "4")),
    "product that wraps at 64 bits": (
        raw_file({"a.weight": entry("U8", [2**32, 2**32], [0, 0])}, b""),
        HeaderError,
        ("a.weight", f"{2**64:,}"),
    ),
    "offsets reversed": (raw_file({"a.weight": entry(offsets=[4, 0])}), HeaderError, ("a.weight", "-4")),
    "overlap": (
        raw_file({"a.weight": entry(), "b.weight": entry(offsets=[2, 6])}, bytes(6)),
        HeaderError,
        ("b.weight", "overlaps", "2", "4"),
    ),
    "two tensors in one place": (
        raw_file({"a.weight": entry(), "b.weight": entry()}),
        HeaderError,
        ("overlaps", "starts at 0", "expected 4"),
    ),
    "empty tensor inside another": (
        raw_file({"a.weight": entry(), "b.weight": entry(shape=[0], offsets=[2, 2])}),
        HeaderError,
        ("b.weight", "overlaps"),
    ),
    "hole": (
        raw_file({"a.weight": entry(), "b.weight": entry(offsets=[6, 10])}, bytes(10)),
        HeaderError,
        ("b.weight", "hole", "starts at 6", "expected 4"),
    ),
    "hole at the start": (raw_file({"a.weight": entry(offsets=[2, 6])}, bytes(6)), HeaderError, ("a.weight", "hole")),
    "trailing bytes": (raw_file(TWO, bytes(11)), HeaderError, ("3 bytes after the last tensor",)),
    "trailing bytes after nothing": (raw_file({}, b"x"), HeaderError, ("1 bytes after",)),
    "truncated data": (raw_file(TWO, bytes(7)), TruncatedError, ("half-written", "its header needs")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_lies_are_refused_by_name(case: str, tmp_path: Path) -> None:
    raw, error, words = CASES[case]
    with refusal(error, SHARD, *words):
        read(tmp_path, raw)


@pytest.mark.parametrize("value", [True, False, -1, 1.0, 4.5, 1e300, 2**63, 10**30, "4", None, [4], {}])
@pytest.mark.parametrize("place", ["shape", "start", "end"])
def test_a_size_is_a_whole_number_below_two_to_the_63(place: str, value: Any, tmp_path: Path) -> None:
    shape, offsets = ([value], [0, 4]) if place == "shape" else ([4], [value, 4] if place == "start" else [0, value])
    with refusal(HeaderError, SHARD, "a.weight"):
        read(tmp_path, raw_file({"a.weight": entry(shape=shape, offsets=offsets)}))


def test_an_overflowing_float_is_refused(tmp_path: Path) -> None:
    with refusal(HeaderError, SHARD, "a.weight", "inf"):
        read(tmp_path, raw_file(b'{"a.weight":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}}'))


def test_an_integer_of_ten_thousand_digits_is_refused(tmp_path: Path) -> None:
    digits = b"9" * 10_000
    with refusal(HeaderError, SHARD, "not strict JSON"):
        read(tmp_path, raw_file(b'{"a.weight":{"dtype":"U8","shape":[' + digits + b'],"data_offsets":[0,4]}}'))


def test_what_is_at_the_limit_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / SHARD
    path.write_bytes(
        raw_file({"a.weight": entry(shape=[1, 1, 1, 1, 1, 1, 2, 2]), "z": entry(shape=[0], offsets=[4, 4])})
    )
    assert [tensor.name for tensor in read_header(path).tensors] == ["a.weight", "z"]
    path.write_bytes(raw_file({}, b""))
    assert read_header(path).tensors == ()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = raw_file(TWO, bytes(8))
    for size in range(len(whole)):
        with refusal(TruncatedError, SHARD):
            read(tmp_path, whole[:size])


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SHARD)
    with within_seconds(5), refusal(LayoutError, SHARD, "not a regular file"):
        read_header(tmp_path / SHARD)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / SHARD).mkdir()
    with refusal(LayoutError, SHARD, "not a regular file"):
        read_header(tmp_path / SHARD)


def test_a_device_is_refused() -> None:
    with within_seconds(5), refusal(LayoutError, "/dev/zero", "not a regular file"):
        read_header(Path("/dev/zero"))


def test_a_dangling_link_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / SHARD).symlink_to(tmp_path / "gone")
    with refusal(MissingFileError, SHARD, str(tmp_path)):
        read_header(tmp_path / SHARD)


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / SHARD).symlink_to(tmp_path / SHARD)
    with refusal(LayoutError, SHARD, "cannot open"):
        read_header(tmp_path / SHARD)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(raw_file(TWO, bytes(8)))
    (tmp_path / SHARD).symlink_to("blob")
    assert len(read_header(tmp_path / SHARD).tensors) == 2


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with refusal(LayoutError, "cannot open", "too long"):
        read_header(tmp_path / f"{'m' * 300}.safetensors")
