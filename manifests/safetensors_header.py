"""A strict parser for safetensors headers: the guard before every weight file is used.

Format: 8-byte little-endian header length, a JSON object, then the data (huggingface/safetensors README, "Format").
Stricter than the reference: no holes, no trailing bytes, no unknown keys, no duplicate names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short  # hostile values can be megabytes long
from typing import Any

from memopt.errors import (
    HeaderError,
    LfsPointerError,
    MemoptIOError,
    TruncatedError,
    UnsupportedError,
)
from memopt.manifests.dtypes import ITEM_SIZE_BYTES, tensor_size_bytes
from memopt.manifests.open_file import open_regular, read_exactly
from memopt.manifests.strict_json import parse_json_object

LENGTH_SIZE_BYTES = 8
# The reference library's cap (safetensors `MAX_HEADER_SIZE`).
MAX_HEADER_SIZE_BYTES = 100_000_000
DATA_ALIGNMENT_BYTES = 8
MAX_DIMENSIONS = 8
_MAX_INT = 2**63 - 1
_LFS_MAGIC = b"version https://git-lfs"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file; `start` and `end` are byte offsets in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A parsed header: tensors by rising offset; the data section starts at byte `data_start`.

    `sha256`: of the length prefix and the JSON text, as read.
    """

    tensors: tuple[TensorHeader, ...]
    metadata: dict[str, str]
    data_start: int
    file_size_bytes: int
    sha256: str


def header_length(prefix: bytes, file_size_bytes: int, file: str) -> int:
    """The JSON header's length in bytes, from a file's first bytes; HeaderError, LfsPointerError or TruncatedError."""
    if prefix.startswith(_LFS_MAGIC[:LENGTH_SIZE_BYTES]):
        raise LfsPointerError(
            "this is a Git-LFS pointer, not the weights", file=file, remedy="run `git lfs pull` in the checkpoint"
        )
    if len(prefix) < LENGTH_SIZE_BYTES:
        raise TruncatedError(f"{file_size_bytes} bytes is too short for a safetensors file", file=file)
    length = int.from_bytes(prefix[:LENGTH_SIZE_BYTES], "little")
    if length > MAX_HEADER_SIZE_BYTES:
        raise HeaderError(
            f"claims a header of {length:,} bytes, at most {MAX_HEADER_SIZE_BYTES:,} are read",
            file=file,
            remedy="the file is damaged or not safetensors; fetch it again",
        )
    if LENGTH_SIZE_BYTES + length > file_size_bytes:
        raise TruncatedError(
            f"header needs {LENGTH_SIZE_BYTES + length:,} bytes, the file has {file_size_bytes:,}",
            file=file,
            remedy="the file is half-written; fetch it again",
        )
    return length


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT


def _entry(name: str, value: Any, file: str) -> TensorHeader:
    if not isinstance(value, dict) or set(value) != _ENTRY_KEYS:
        raise HeaderError(f"entry must have exactly {sorted(_ENTRY_KEYS)}", tensor=name, file=file)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise HeaderError("dtype must be a string", tensor=name, file=file)
    if dtype not in ITEM_SIZE_BYTES:
        raise UnsupportedError(
            f"dtype {dtype!r} is not supported", tensor=name, file=file, remedy=f"known: {', '.join(ITEM_SIZE_BYTES)}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
        raise HeaderError(f"shape {short(shape)} is not a short list of sizes", tensor=name, file=file)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise HeaderError(f"data_offsets {short(offsets)} is not two sizes", tensor=name, file=file)
    start, end = offsets
    size_bytes = tensor_size_bytes(dtype, tuple(shape))
    if end - start != size_bytes:
        raise HeaderError(
            f"{dtype} {shape} needs {size_bytes:,} bytes, data_offsets give {end - start:,}", tensor=name, file=file
        )
    return TensorHeader(name, dtype, tuple(shape), start, end)


def parse_header(raw: bytes, file_size_bytes: int, file: str) -> FileHeader:
    """Parse the JSON header `raw` of a file of `file_size_bytes`; every byte of data belongs to exactly one tensor.

    Raises HeaderError, TruncatedError or UnsupportedError naming `file` and the tensor.
    """
    if not raw.startswith(b"{"):
        raise HeaderError("the header must start with '{'", file=file, remedy="the file is damaged or not safetensors")
    table = parse_json_object(raw, file, HeaderError)
    metadata = table.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{METADATA_KEY} must map strings to strings", file=file)
    tensors = sorted((_entry(name, value, file) for name, value in table.items()), key=lambda t: (t.start, t.end))
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            fault = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise HeaderError(
                f"{fault}: starts at {tensor.start:,}, expected {position:,}", tensor=tensor.name, file=file
            )
        position = tensor.end
    data_start = LENGTH_SIZE_BYTES + len(raw)
    expected = data_start + position
    if file_size_bytes < expected:
        raise TruncatedError(
            f"the file has {file_size_bytes:,} bytes, its header needs {expected:,}",
            file=file,
            remedy="the file is half-written; fetch it again",
        )
    if file_size_bytes > expected:
        raise HeaderError(
            f"{file_size_bytes - expected:,} bytes after the last tensor belong to nothing",
            file=file,
            remedy="fetch the file again",
        )
    digest = hashlib.sha256(len(raw).to_bytes(LENGTH_SIZE_BYTES, "little") + raw).hexdigest()
    return FileHeader(tuple(tensors), metadata, data_start, file_size_bytes, digest)


def read_header(path: Path) -> FileHeader:
    """Open `path`, read its header only, and parse it; raises as `parse_header` and `open_regular`."""
    with open_regular(path) as (descriptor, status):
        try:
            length = header_length(read_exactly(descriptor, LENGTH_SIZE_BYTES, 0), status.st_size, path.name)
            raw = read_exactly(descriptor, length, LENGTH_SIZE_BYTES)
        except OSError as problem:
            raise MemoptIOError(f"cannot read: {problem.strerror}", file=str(path)) from None
    if len(raw) != length:
        raise TruncatedError("the file shrank while its header was read", file=path.name)
    return parse_header(raw, status.st_size, path.name)


def render_header(tensors: Iterable[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON header for `tensors` in file order, padded so that the data starts 8-byte aligned."""
    members = [member for member in (_metadata_member(metadata), _tensor_members(tensors)) if member]
    raw = b"{" + b",".join(members) + b"}"
    raw += b" " * (-len(raw) % DATA_ALIGNMENT_BYTES)
    return len(raw).to_bytes(LENGTH_SIZE_BYTES, "little") + raw


def tensor_members_size_bytes(tensors: Iterable[TensorHeader]) -> int:
    """What `tensors` add to a header: the same in every file that holds them, whatever its metadata."""
    return len(_tensor_members(tensors))


def header_size_bytes(members_size_bytes: int, metadata: Mapping[str, str]) -> int:
    """Exact size of `render_header`'s bytes, from `tensor_members_size_bytes` of its tensors."""
    sizes = [size for size in (len(_metadata_member(metadata)), members_size_bytes) if size]
    size = len("{}") + sum(sizes) + max(0, len(sizes) - 1)
    return LENGTH_SIZE_BYTES + size + -size % DATA_ALIGNMENT_BYTES


def _metadata_member(metadata: Mapping[str, str]) -> bytes:
    return _members({METADATA_KEY: dict(metadata)}) if metadata else b""


def _tensor_members(tensors: Iterable[TensorHeader]) -> bytes:
    return _members(
        {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [tensor.start, tensor.end],
            }
            for tensor in tensors
        }
    )


def _members(table: dict[str, Any]) -> bytes:
    """The members of a JSON object, without its braces."""
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()[1:-1]
