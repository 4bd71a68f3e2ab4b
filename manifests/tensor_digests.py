"""Whether the bytes of every tensor are those that the ledger names, found in the pass that hashes the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memopt.errors import ContentError
from memopt.manifests.file_roles import LEDGER_NAME


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor's place in its file, in bytes from the file's start, and the SHA-256 (hex) that it must have."""

    name: str
    start: int
    end: int
    sha256: str


class TensorDigests:
    """Fed a file from its first byte to its last, compares every tensor with its span's digest as it ends.

    `explain`: says of a span and the SHA-256 (hex) of its bytes what they are instead, if it knows.
    """

    def __init__(
        self, file: str, spans: Iterable[TensorSpan], explain: Callable[[TensorSpan, str], str | None] | None = None
    ) -> None:
        self._file = file
        self._explain = explain
        self._spans = sorted(spans, key=lambda span: (span.start, span.end))
        self._next = 0
        self._state = hashlib.sha256()

    def update(self, piece: memoryview, offset: int) -> None:
        """Take the bytes at `offset`; ContentError naming the tensor whose bytes are not the ledger's."""
        end = offset + piece.nbytes
        while self._next < len(self._spans) and self._spans[self._next].start < end:
            span = self._spans[self._next]
            self._state.update(piece[max(span.start - offset, 0) : span.end - offset])
            if span.end > end:
                return
            found = self._state.hexdigest()
            if found != span.sha256:
                told = None if self._explain is None else self._explain(span, found)
                raise ContentError(
                    f"the bytes of {span.name[:200]!a} are not those that {LEDGER_NAME} names"
                    + (f", {told}" if told else ""),
                    file=self._file,
                    tensor=span.name,
                    remedy="put the files back" if told else "compress again: the file was changed since",
                )
            self._state = hashlib.sha256()
            self._next += 1
