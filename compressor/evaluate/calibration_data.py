"""Texts or token ids from a file: what calibration runs on and what quality is measured on.

`text.jsonl`: one JSON object a line, whose "text" is a document; other keys are passed over. `ids.safetensors`: one
tensor of int32 or int64 token ids, [N] (one document) or [N, T] (N documents). Nothing of the file is copied anywhere:
its SHA-256 stands for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memopt.errors import ContentError, DataFileError, UsageError
from memopt.manifests.safetensors_header import LENGTH_SIZE_BYTES, header_length, parse_header
from memopt.manifests.strict_json import parse_json_object, read_capped

MAX_TEXT_FILE_BYTES = 2**28
MAX_IDS_FILE_BYTES = 2**32
MAX_LINE_BYTES = 2**26
MAX_DOCUMENTS = 2**22
TEXT_KEY = "text"
TEXT_SUFFIX = ".jsonl"
IDS_SUFFIX = ".safetensors"
# A window needs a token to predict from and one to predict.
MIN_DOCUMENT_TOKENS = 2
_ID_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}

Encode = Callable[[str], Sequence[int]]
TokenIds = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DataDigest:
    """What stands for a data file in provenance. `sha256`: hex, of the file's bytes. Counts are of all it holds."""

    sha256: str
    size_bytes: int
    kind: Literal["text", "ids"]
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenData:
    """Every document of the file in its order, int64 token ids [n]; one has MIN_DOCUMENT_TOKENS or more."""

    documents: tuple[TokenIds, ...]
    digest: DataDigest


def read_token_data(path: Path, vocab_size: int, encode: Encode | None) -> TokenData:
    """Read `path`, which ends in .jsonl or .safetensors.

    `encode`: text to ids; None where the model has no tokenizer that memopt reads. Raises DataFileError naming the line
    or tensor for data that is empty, wrongly encoded, too short or outside the vocabulary; MissingFileError and
    MemoptIOError as `open_regular`.
    """
    size_limit = data_size_limit(path)
    if path.suffix == TEXT_SUFFIX:
        if encode is None:
            raise DataFileError(
                "holds text, but the checkpoint has no tokenizer that memopt reads",
                file=path.name,
                remedy=f"tokenize it yourself and give an int32 tensor in a {IDS_SUFFIX} file",
            )
        raw = read_capped(path, size_limit, DataFileError)
        documents = tuple(_encoded(text, line, encode, path.name) for line, text in text_lines(raw, path.name))
    else:
        raw = read_capped(path, size_limit, DataFileError)
        documents = _id_documents(raw, path.name)
    for number, document in enumerate(documents, start=1):
        _check_ids(document, number, vocab_size, path.name)
    if all(len(document) < MIN_DOCUMENT_TOKENS for document in documents):
        raise DataFileError(
            f"holds no document of {MIN_DOCUMENT_TOKENS} tokens", file=path.name, remedy="give more text"
        )
    kind: Literal["text", "ids"] = "text" if path.suffix == TEXT_SUFFIX else "ids"
    digest = hashlib.sha256(raw).hexdigest()
    num_tokens = sum(len(document) for document in documents)
    return TokenData(documents, DataDigest(digest, len(raw), kind, len(documents), num_tokens))


def data_size_limit(path: Path) -> int:
    """Bytes that are read of a data file of this name; DataFileError for another suffix than the two."""
    if path.suffix == TEXT_SUFFIX:
        return MAX_TEXT_FILE_BYTES
    if path.suffix == IDS_SUFFIX:
        return MAX_IDS_FILE_BYTES
    raise DataFileError(
        f"ends neither in {TEXT_SUFFIX} nor in {IDS_SUFFIX}", file=path.name, remedy='write {"text": …} lines'
    )


def text_lines(raw: bytes, file: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of every document of a .jsonl file's bytes; DataFileError naming the first bad line."""
    if not raw.strip():
        raise DataFileError("is empty", file=file, remedy='write one {"text": …} object a line')
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise DataFileError("starts with a byte order mark", file=file, remedy="save it as UTF-8 without one")
    # The last line may end with a line feed; a blank line between others is a mistake.
    lines = raw.removesuffix(b"\n").split(b"\n")
    if len(lines) > MAX_DOCUMENTS:
        raise DataFileError(f"{len(lines):,} lines, at most {MAX_DOCUMENTS:,} are read", file=file)
    for number, line in enumerate(lines, start=1):
        place = f"{file}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise DataFileError(f"{len(line):,} bytes, at most {MAX_LINE_BYTES:,} are read", file=place)
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as problem:
            raise DataFileError(
                f"byte {problem.start} of the line is not UTF-8", file=place, remedy="convert the file to UTF-8"
            ) from None
        text = _object(line, place).get(TEXT_KEY)
        if not isinstance(text, str) or not text.strip():
            raise DataFileError(
                f"{TEXT_KEY!r} is {'empty' if isinstance(text, str) else 'no string'}",
                file=place,
                remedy="leave the line out, or give its text",
            )
        yield number, text


def _object(line: bytes, place: str) -> dict[str, Any]:
    """A line's JSON object."""
    try:
        return parse_json_object(line, place, DataFileError)
    except DataFileError as problem:
        problem.remedy = 'write one {"text": …} object a line'
        raise


def _encoded(text: str, line: int, encode: Encode, file: str) -> TokenIds:
    """Ids of one document; DataFileError naming its line for a text that the tokenizer refuses."""
    place = f"{file}, line {line}"
    try:
        ids = np.asarray(encode(text), dtype=np.int64)
    except (ContentError, UsageError) as problem:
        raise DataFileError(
            f"cannot be tokenized: {problem.message}", file=place, remedy="leave the line out, or cut its text"
        ) from None
    if ids.ndim != 1:
        raise DataFileError(f"the tokenizer gave ids of shape {list(ids.shape)}", file=place)
    return ids


def _id_documents(raw: bytes, file: str) -> tuple[TokenIds, ...]:
    """The rows of the one tensor of a safetensors file."""
    length = header_length(raw[:LENGTH_SIZE_BYTES], len(raw), file)
    header = parse_header(raw[LENGTH_SIZE_BYTES : LENGTH_SIZE_BYTES + length], len(raw), file)
    if len(header.tensors) != 1:
        raise DataFileError(f"holds {len(header.tensors)} tensors, one is read", file=file)
    tensor = header.tensors[0]
    dtype = _ID_DTYPES.get(tensor.dtype)
    if dtype is None or len(tensor.shape) not in (1, 2):
        raise DataFileError(
            f"is {tensor.dtype} {list(tensor.shape)}",
            tensor=tensor.name,
            file=file,
            remedy="give I32 or I64 [N], [N, T]",
        )
    if tensor.shape[0] > MAX_DOCUMENTS and len(tensor.shape) == 2:
        raise DataFileError(f"{tensor.shape[0]:,} rows, at most {MAX_DOCUMENTS:,} are read", tensor=tensor.name)
    start = header.data_start + tensor.start
    ids = np.frombuffer(raw, dtype, count=tensor.size_bytes // dtype.itemsize, offset=start).astype(np.int64)
    rows = ids.reshape(tensor.shape if len(tensor.shape) == 2 else (1, -1))
    return tuple(rows)


def _check_ids(document: TokenIds, number: int, vocab_size: int, file: str) -> None:
    """DataFileError for an id that is no row of the embedding."""
    if not len(document):
        return
    low, high = int(document.min()), int(document.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataFileError(
            f"token id {wrong:,} in document {number}, but the vocabulary has {vocab_size:,}",
            file=file,
            remedy="use the tokenizer of the checkpoint that is compressed",
        )
