"""What the tokenizers library raises when its file is wrong, as one of our errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memopt.errors import MalformedError

# pyo3's class, which cannot be imported; it is no Exception, so that nothing would catch it.
_PANIC = "PanicException"


@contextmanager
def tokenizers_faults(file: str) -> Iterator[None]:
    """Turn what the library raises, often Exception itself, and a panic of its Rust code, into MalformedError."""
    try:
        yield
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != _PANIC:
            raise
        raise MalformedError(str(problem), file=file, remedy="fetch the file again") from None
