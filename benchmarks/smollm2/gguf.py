"""A strict reader of GGUF version 3, as far as one-file, little-endian models need it.

Format: ggml-org/ggml docs/gguf.md ("File structure"): magic, version, counts, key-value pairs, tensor infos, padding
to `general.alignment`, then the data. Dimensions are stored fastest first; shapes here are slowest first.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.smollm2.ggml_blocks import GgmlType, decode, ggml_type, stored_size_bytes
from memopt.errors import MalformedError, TruncatedError, UnsupportedError

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT_BYTES = 32
ALIGNMENT_KEY = "general.alignment"
# Sanity bounds: a length that a broken file claims must not ask for all memory.
MAX_ITEMS = 2**22
MAX_TEXT_BYTES = 2**20
MAX_DIMENSIONS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
# gguf_metadata_value_type -> struct format of the plain kinds.
_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` slowest dimension first, `start` and `end` in bytes of the file."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the data: `metadata` by key, `tensors` by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Cursor:
    """Reads values one after another; TruncatedError where the bytes end."""

    def __init__(self, raw: bytes | mmap.mmap, file: str) -> None:
        self._raw = raw
        self._file = file
        self.position = 0

    def take(self, count: int) -> bytes:
        part = self._raw[self.position : self.position + count]
        if len(part) != count:
            raise TruncatedError(f"ends at byte {len(self._raw):,} inside its header", file=self._file)
        self.position += count
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        count = self.number("Q")
        if count > MAX_TEXT_BYTES:
            raise MalformedError(f"a string of {count:,} bytes, at most {MAX_TEXT_BYTES:,} are read", file=self._file)
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError as problem:
            raise MalformedError(f"a string is not UTF-8: {problem.reason}", file=self._file) from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.number("I"), self.number("Q")
            if element == _ARRAY or count > MAX_ITEMS:
                raise MalformedError(f"an array of {count:,} values of kind {element} is not read", file=self._file)
            return [self.value(element) for _ in range(count)]
        if kind not in _PLAIN:
            raise MalformedError(f"value kind {kind} is unknown", file=self._file)
        number = self.number(_PLAIN[kind])
        if kind != _BOOL:
            return number
        if number > 1:
            raise MalformedError(f"a truth value is {number}", file=self._file)
        return bool(number)


def parse_header(raw: bytes | mmap.mmap, file: str) -> GgufHeader:
    """Header of the whole file `raw`: every tensor lies inside it, none overlaps another, no name is twice.

    Raises MalformedError, TruncatedError, or UnsupportedError (version, tensor type), naming `file`.
    """
    cursor = _Cursor(raw, file)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise MalformedError("does not start with GGUF", file=file)
    version = cursor.number("I")
    if version != VERSION:
        raise UnsupportedError(f"GGUF version {version}; version {VERSION} is read", file=file)
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    if max(num_tensors, num_values) > MAX_ITEMS:
        raise MalformedError(f"{num_tensors:,} tensors and {num_values:,} values are claimed", file=file)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        if key in metadata:
            raise MalformedError(f"key {key!r} appears twice", file=file)
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [_tensor_info(cursor, file) for _ in range(num_tensors)]
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment <= 0:
        raise MalformedError(f"{ALIGNMENT_KEY} is {alignment!r}", file=file)
    data_start = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _placed(infos, data_start, alignment, len(raw), file))


def _tensor_info(cursor: _Cursor, file: str) -> GgufTensor:
    """A tensor's name, type, shape and offsets within the data section."""
    name = cursor.text()
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise MalformedError(f"{num_dimensions} dimensions", tensor=name, file=file)
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
    if not all(0 < size <= 2**31 for size in shape):
        raise MalformedError(f"shape {shape}", tensor=name, file=file)
    kind = ggml_type(cursor.number("I"), name)
    start = cursor.number("Q")
    return GgufTensor(name, kind, shape, start, start + stored_size_bytes(kind, shape, name))


def _placed(
    infos: list[GgufTensor], data_start: int, alignment: int, file_size: int, file: str
) -> dict[str, GgufTensor]:
    """The tensors with offsets in the file; MalformedError for an overlap, a bad start or a name given twice."""
    tensors: dict[str, GgufTensor] = {}
    position = 0
    for info in sorted(infos, key=lambda tensor: tensor.start):
        if info.name in tensors:
            raise MalformedError("appears twice", tensor=info.name, file=file)
        if info.start % alignment or info.start < position:
            raise MalformedError(f"starts at byte {info.start:,} of the data", tensor=info.name, file=file)
        position = info.end
        placed = GgufTensor(info.name, info.kind, info.shape, info.start + data_start, info.end + data_start)
        if placed.end > file_size:
            raise TruncatedError(f"needs {placed.end:,} bytes, the file has {file_size:,}", tensor=info.name, file=file)
        tensors[info.name] = placed
    return tensors


class GgufFile:
    """An open GGUF file: `header`, and tensors decoded to float32 on demand. A context manager."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as stream:
            if not path.stat().st_size:
                raise TruncatedError("is empty", file=path.name)
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.header = parse_header(self._map, path.name)
        except BaseException:
            self._map.close()
            raise

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as float32, slowest dimension first; KeyError if there is none."""
        tensor = self.header.tensors[name]
        return decode(tensor.kind, self._map[tensor.start : tensor.end], tensor.shape)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
