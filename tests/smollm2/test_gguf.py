"""The GGUF reader: golden bytes, exact decoding, refusals."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import F32, Q4_1, Q8_0, gguf_bytes, tiny_llama_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.smollm2.ggml_blocks import GgmlType, decode
from benchmarks.smollm2.gguf import GgufFile, parse_header
from memopt.errors import MalformedError, MemoptError, TruncatedError, UnsupportedError

# A Q4_1 block by hand: scale 0.5, minimum -2, bytes 0x10, 0x32, then 0xF0 fourteen times.
GOLDEN_Q4_1 = struct.pack("<ee", 0.5, -2.0) + bytes([0x10, 0x32]) + bytes([0xF0] * 14)
GOLDEN_Q4_1_VALUES = [-2.0, -1.0] + [-2.0] * 14 + [-1.5, -0.5] + [5.5] * 14
GOLDEN_Q8_0 = struct.pack("<e", 0.25) + struct.pack("<32b", *range(-16, 16))
HEADER_VALUES = {"a": 3, "b": "text", "c": True, "d": 0.5, "e": ["x", "yz"], "f": [1, -2]}


def small_file() -> bytes:
    ones = np.arange(6, dtype="<f4").tobytes()
    tensors = {"f": (F32, (2, 3), ones), "q": (Q4_1, (1, 32), GOLDEN_Q4_1), "r": (Q8_0, (1, 32), GOLDEN_Q8_0)}
    return gguf_bytes(HEADER_VALUES, tensors)


def test_values_and_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file())
    with GgufFile(path) as opened:
        assert dict(opened.header.metadata) == HEADER_VALUES
        assert opened.read("f").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert opened.read("q").tolist() == [GOLDEN_Q4_1_VALUES]
        assert opened.read("r").tolist() == [[code / 4 for code in range(-16, 16)]]
        assert {name: tensor.kind for name, tensor in opened.header.tensors.items()} == {
            "f": GgmlType.F32,
            "q": GgmlType.Q4_1,
            "r": GgmlType.Q8_0,
        }


halves = st.floats(width=16, allow_nan=False, allow_infinity=False)


@given(halves, halves, st.binary(min_size=16, max_size=16))
@settings(deadline=None)
def test_q4_1_is_ggmls_loop(scale: float, minimum: float, codes: bytes) -> None:
    # ggml-quants.c, dequantize_row_q4_1, one element after another.
    d, m = np.float32(scale), np.float32(minimum)
    low = [np.float32(code & 0xF) * d + m for code in codes]
    high = [np.float32(code >> 4) * d + m for code in codes]
    found = decode(GgmlType.Q4_1, struct.pack("<ee", scale, minimum) + codes, (1, 32))
    assert found.tobytes() == np.array(low + high, np.float32).tobytes()


@given(halves, st.lists(st.integers(-128, 127), min_size=32, max_size=32))
@settings(deadline=None)
def test_q8_0_is_ggmls_loop(scale: float, codes: list[int]) -> None:
    # ggml-quants.c, dequantize_row_q8_0.
    expected = np.array([np.float32(code) * np.float32(scale) for code in codes], np.float32)
    found = decode(GgmlType.Q8_0, struct.pack("<e32b", scale, *codes), (1, 32))
    assert found.tobytes() == expected.tobytes()


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(TruncatedError, match=r"empty\.gguf: is empty"):
        GgufFile(tmp_path / "empty.gguf")


@given(st.integers(0, len(small_file()) - 1))
@settings(deadline=None)
def test_a_file_that_ends_early_is_refused(size: int) -> None:
    with pytest.raises(TruncatedError, match=r"ends at byte|needs"):
        parse_header(small_file()[:size], "cut.gguf")


@given(st.integers(0, 200), st.integers(0, 255))
@settings(deadline=None)
def test_a_changed_byte_is_read_or_refused_but_never_crashes(position: int, byte: int) -> None:
    raw = bytearray(small_file())
    raw[position] = byte
    with contextlib.suppress(MemoptError):
        parse_header(bytes(raw), "changed.gguf")


def overlapping() -> bytes:
    raw = gguf_bytes({}, {"first": (F32, (8,), bytes(32)), "second": (F32, (8,), bytes(32))})
    # The offset of "second" is the last number before the padding and 64 bytes of data.
    place = raw.rindex(struct.pack("<IQ", F32, 32))
    return raw[:place] + struct.pack("<IQ", F32, 0) + raw[place + 12 :]


REFUSALS: dict[str, tuple[Callable[[], bytes], type[MemoptError], str]] = {
    "magic": (lambda: b"GGUX" + small_file()[4:], MalformedError, "does not start with GGUF"),
    "version": (lambda: gguf_bytes({}, {}, version=2), UnsupportedError, "GGUF version 2"),
    "type": (
        lambda: gguf_bytes({}, {"attn_q": (12, (1, 256), bytes(144))}),
        UnsupportedError,
        "attn_q: GGML type 12 is",
    ),
    "columns": (lambda: gguf_bytes({}, {"attn_q": (Q4_1, (2, 16), bytes(20))}), MalformedError, "attn_q: 16 columns"),
    "overlap": (overlapping, MalformedError, "second: starts at byte 0"),
    "alignment": (lambda: gguf_bytes({"general.alignment": 0}, {}), MalformedError, "general.alignment is 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_named(name: str) -> None:
    make, error, words = REFUSALS[name]
    with pytest.raises(error, match=words):
        parse_header(make(), "bad.gguf")


def test_a_key_that_appears_twice_is_refused() -> None:
    one: dict[str, Any] = {"k": 1}
    raw = gguf_bytes(one, {})
    entry = raw[24 : 24 + 8 + 1 + 4 + 4]
    twice = raw[:16] + struct.pack("<Q", 2) + entry + entry
    with pytest.raises(MalformedError, match="key 'k' appears twice"):
        parse_header(twice, "twice.gguf")


def test_the_tiny_llama_is_whole() -> None:
    assert len(parse_header(tiny_llama_bytes(), "tiny.gguf").tensors) == 2 + 2 * 9
