"""A finished release's ledger.jsonl on disk: scanned once, its lines read again by place when they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.errors import LedgerError, SourceChangedError
from memopt.manifests.dtypes import ITEM_SIZE_BYTES, tensor_size_bytes
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.ledger_output import LedgerOutput, ledger_lines
from memopt.manifests.open_file import open_regular, read_exactly
from memopt.manifests.signed_files import split_lines

_PIECE_SIZE_BYTES = 2**20
LEDGER_REMEDY = "fetch the release again, or compress anew"


@dataclass(frozen=True, slots=True)
class ScannedLine:
    """One line: its logical tensor (any JSON value), the hub tensors that it stores, and its place in the file.

    `file` of an output is "" in a release of rank files alone. `sha256`: of the line's bytes.
    """

    tensor: object
    outputs: tuple[StoredTensor, ...]
    start: int
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Lines one after the other: their place in the file, in bytes, and a digest over the SHA-256 of each."""

    start: int
    size_bytes: int
    sha256: bytes


def span_of(lines: Sequence[ScannedLine]) -> LineSpan:
    """Where neighbouring `lines` lie together."""
    start = lines[0].start if lines else 0
    return LineSpan(start, sum(line.size_bytes for line in lines), _digest_of(line.sha256 for line in lines))


class LedgerFile:
    """The ledger of the release in `folder`. `sha256` (hex): of the bytes that `scan` went through."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER_NAME
        self.sha256 = ""

    def scan(self) -> Iterator[ScannedLine]:
        """Every line, checked as `ledger_lines` does; `sha256` is known when all were taken. Raises LedgerError."""
        state = hashlib.sha256()
        raw_lines: list[bytes] = []

        def pieces(file: BinaryIO) -> Iterator[bytes]:
            while piece := file.read(_PIECE_SIZE_BYTES):
                state.update(piece)
                yield piece

        def noted(lines: Iterator[bytes]) -> Iterator[bytes]:
            for line in lines:
                raw_lines.append(line + b"\n")
                yield line

        start = 0
        with open_regular(self._path) as (descriptor, _), open(descriptor, "rb", closefd=False) as file:
            for line in ledger_lines(noted(split_lines(LEDGER_NAME, pieces(file)))):
                raw = raw_lines.pop()
                outputs = tuple(map(_stored, line.outputs))
                yield ScannedLine(line.tensor, outputs, start, len(raw), hashlib.sha256(raw).digest())
                start += len(raw)
        self.sha256 = state.hexdigest()

    def read(self, span: LineSpan) -> list[bytes]:
        """The lines of `span`, read anew; SourceChangedError if they are not those that were scanned."""
        with open_regular(self._path) as (descriptor, _):
            raw = read_exactly(descriptor, span.size_bytes, span.start)
        lines = [line + b"\n" for line in raw.split(b"\n")[:-1]]
        if _digest_of(hashlib.sha256(line).digest() for line in lines) != span.sha256:
            raise SourceChangedError(
                "was changed while it was read", file=LEDGER_NAME, remedy="use a release that stays still"
            )
        return lines


def _digest_of(digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()


def _stored(output: LedgerOutput) -> StoredTensor:
    tensor = output.tensor
    if tensor.dtype not in ITEM_SIZE_BYTES:
        fault = f"there is no type {tensor.dtype[:80]!a}"
        raise LedgerError(fault, tensor=tensor.name, file=LEDGER_NAME, remedy=LEDGER_REMEDY)
    size_bytes = tensor_size_bytes(tensor.dtype, tensor.shape)
    return StoredTensor(tensor.name, output.file or "", tensor.dtype, tensor.shape, 0, size_bytes)
