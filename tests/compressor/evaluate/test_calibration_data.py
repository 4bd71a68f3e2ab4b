"""Reading text and ids: what is read, what is refused and by which words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.token_windows import document_windows, packed_windows
from memopt.errors import ContentError, DataFileError, HeaderError, MemoptError, MissingFileError, UsageError

VOCABULARY = 200


def encode(text: str) -> Sequence[int]:
    return list(text.encode())


def jsonl(folder: Path, *documents: object) -> Path:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_text_is_read_a_document_a_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"text": "ab", "source": "x"}, {"text": "c"}, {"text": "def"})
    data = read_token_data(path, VOCABULARY, encode)
    assert [document.tolist() for document in data.documents] == [[97, 98], [99], [100, 101, 102]]
    assert data.digest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (data.digest.kind, data.digest.num_documents, data.digest.num_tokens) == ("text", 3, 6)


def test_windows_name_documents_as_the_file_counts_them(tmp_path: Path) -> None:
    data = read_token_data(jsonl(tmp_path, {"text": "a"}, {"text": "bcd"}, {"text": "e"}, {"text": "fg"}), 200, encode)
    # "a" and "e" are one token: there is nothing to predict them from.
    assert [(window.document, window.ids.tolist()) for window in document_windows(data, 9)] == [
        (1, [98, 99, 100]),
        (3, [102, 103]),
    ]


@pytest.mark.parametrize(("dtype", "shape"), [(torch.int32, (6,)), (torch.int64, (2, 3))])
def test_ids_are_read_as_rows(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ids = torch.arange(6, dtype=dtype).reshape(shape)
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    data = read_token_data(tmp_path / "ids.safetensors", 6, None)
    assert [document.tolist() for document in data.documents] == ids.reshape(-1, shape[-1]).tolist()
    assert data.digest.kind == "ids"


TEXT_REFUSALS = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "blank line": (b'{"text": "ab"}\n\n{"text": "cd"}\n', "line 2"),
    "latin-1": ('{"text": "caf\xe9 au lait"}\n'.encode("latin-1"), "byte 13 of the line is not UTF-8"),
    "utf-16": ('{"text": "ab"}\n'.encode("utf-16"), "byte order mark"),
    "utf-8 with a mark": ('{"text": "ab"}\n'.encode("utf-8-sig"), "byte order mark"),
    "half a character": (b'{"text": "\\ud800 is half"}\n', "unpaired surrogate"),
    "no text": (b'{"prompt": "ab"}\n', "'text' is no string"),
    "empty text": (b'{"text": "  "}\n', "'text' is empty"),
    "a list": (b'["ab"]\n', "a JSON object is needed"),
    "plain text": (b"Once upon a time\n", "line 1: not strict JSON"),
    "nul": (b'{"text": "a\x00b"}\n', "line 1: not strict JSON.*text.*object a line"),
    "nested": (b'{"text": ' + b"[" * 100_000 + b"}\n", "line 1: not strict JSON: nesting is too deep"),
    "two texts": (b'{"text": "ab", "text": "cd"}\n', "appears twice"),
    "not a number": (b'{"text": "ab", "n": NaN}\n', "NaN is not JSON"),
    "cut": (b'{"text": "ab"}\n{"text": "a', "line 2: not strict JSON"),
    "too short": (b'{"text": "a"}\n', "no document of 2 tokens"),
    "outside the vocabulary": ('{"text": "ab\xff"}\n'.encode(), r"token id 255|token id 195"),
}


@pytest.mark.parametrize("name", TEXT_REFUSALS)
def test_text_that_is_wrong_is_refused(tmp_path: Path, name: str) -> None:
    raw, words = TEXT_REFUSALS[name]
    (tmp_path / "text.jsonl").write_bytes(raw)
    with pytest.raises(DataFileError, match=words):
        read_token_data(tmp_path / "text.jsonl", 190, encode)


def test_ids_that_are_wrong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.safetensors"
    for tensors, words in (
        ({"ids": torch.zeros(4)}, r"is F32 \[4\]"),
        ({"ids": torch.zeros(1, 2, 3, dtype=torch.int64)}, r"is I64 \[1, 2, 3\]"),
        ({"ids": torch.tensor(3)}, r"is I64 \[\]"),
        ({"ids": torch.zeros(4, dtype=torch.int16)}, r"is I16 \[4\]"),
        ({"ids": torch.zeros(0, dtype=torch.int32)}, "no document of 2 tokens"),
        ({"ids": torch.zeros(3, 0, dtype=torch.int32)}, "no document of 2 tokens"),
        ({"ids": torch.tensor([2**63 - 1, 1])}, "token id 9,223,372,036,854,775,807"),
        ({"ids": torch.tensor([3, -1])}, "token id -1 in document 1"),
        ({"ids": torch.tensor([[3, 4], [3, 200]])}, "token id 200 in document 2"),
        ({"a": torch.tensor([1, 2]), "b": torch.tensor([1, 2])}, "holds 2 tensors"),
        ({"ids": torch.zeros(5, 1, dtype=torch.int64)}, "no document of 2 tokens"),
    ):
        save_file(tensors, path)
        with pytest.raises(DataFileError, match=words):
            read_token_data(path, VOCABULARY, None)
    path.write_bytes(b"not a header at all")
    with pytest.raises(HeaderError):
        read_token_data(path, VOCABULARY, None)


def test_a_line_and_a_file_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path, {"text": "ab"}, {"text": "c" * 100})
    monkeypatch.setattr("memopt.compressor.evaluate.calibration_data.MAX_LINE_BYTES", 50)
    with pytest.raises(DataFileError, match=r"text\.jsonl, line 2: 112 bytes, at most 50"):
        read_token_data(path, VOCABULARY, encode)
    monkeypatch.setattr("memopt.compressor.evaluate.calibration_data.MAX_TEXT_FILE_BYTES", 50)
    with pytest.raises(DataFileError, match="at most 50 are read"):
        read_token_data(path, VOCABULARY, encode)


def test_escapes_and_carriage_returns_are_text(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_bytes(b'{"text": "a\\u0000b"}\r\n{"text": "\\ud83d\\ude00"}\r\n')
    data = read_token_data(tmp_path / "text.jsonl", 256, encode)
    assert [document.tolist() for document in data.documents] == [[97, 0, 98], list("\U0001f600".encode())]


def test_other_refusals(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"text": "ab"})
    with pytest.raises(DataFileError, match="no tokenizer"):
        read_token_data(path, VOCABULARY, None)
    (tmp_path / "text.txt").write_text("ab")
    with pytest.raises(DataFileError, match=r"ends neither in \.jsonl"):
        read_token_data(tmp_path / "text.txt", VOCABULARY, encode)
    with pytest.raises(MissingFileError):
        read_token_data(tmp_path / "none.jsonl", VOCABULARY, encode)


@pytest.mark.parametrize("problem", [UsageError("the prompt holds byte 0x04"), ContentError("a token without text")])
def test_a_text_that_the_tokenizer_refuses_is_named(tmp_path: Path, problem: MemoptError) -> None:
    def refuse(text: str) -> Sequence[int]:
        if text == "cd":
            raise problem
        return encode(text)

    with pytest.raises(DataFileError, match=r"text\.jsonl, line 2: cannot be tokenized: (the prompt|a token)"):
        read_token_data(jsonl(tmp_path, {"text": "ab"}, {"text": "cd"}), VOCABULARY, refuse)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.integers(2, 17))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_cover_what_they_should(tmp_path: Path, lengths: list[int], window_tokens: int) -> None:
    total = sum(lengths)
    ids = iter(range(total))
    documents = [{"text": "".join(chr(next(ids) % 90 + 33) for _ in range(length))} for length in lengths]
    data = read_token_data(jsonl(tmp_path, *documents), VOCABULARY, encode)

    windows = document_windows(data, window_tokens)
    for window in windows:
        assert np.array_equal(window.ids, data.documents[window.document][window.start : window.start + window_tokens])
        assert window.num_predicted >= 1
    # All but each document's first token, the first of every later window, and a last window of one token.
    starts = sum(len(range(0, length - 1, window_tokens)) for length in lengths)
    lone = sum(length % window_tokens == 1 for length in lengths)
    assert sum(window.num_predicted for window in windows) == total - starts - lone
    few = document_windows(data, window_tokens, 2)
    assert len(few) == min(2, len(windows))
    places = [(window.document, window.start) for window in windows]
    assert [places.index((window.document, window.start)) for window in few] == [
        number * len(places) // 2 for number in range(2)
    ][: len(few)]

    if total < window_tokens:
        with pytest.raises(DataFileError, match=f"the data has {total}"):
            packed_windows(data, 1, window_tokens)
        return
    whole = total // window_tokens
    packed = packed_windows(data, whole, window_tokens)
    assert np.array_equal(packed.reshape(-1), np.concatenate(data.documents)[: whole * window_tokens])
    with pytest.raises(DataFileError, match="fewer or shorter samples"):
        packed_windows(data, whole + 1, window_tokens)


def test_windows_that_predict_nothing_are_refused(tmp_path: Path) -> None:
    data = read_token_data(jsonl(tmp_path, {"text": "abcdef"}), VOCABULARY, encode)
    for refused in (
        lambda: document_windows(data, 1),
        lambda: document_windows(data, 4, 0),
        lambda: packed_windows(data, 0, 4),
    ):
        with pytest.raises(UsageError, match="ask for 1"):
            refused()
