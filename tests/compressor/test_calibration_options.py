"""What calibration runs on is looked at before anything is hashed, planned or written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.compressor.calibration_options import MAX_NUMBER, CalibrationOptions
from memopt.errors import DataFileError, LayoutError, MissingFileError, UsageError

TEXT = b'{"text": "a sentence"}\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_bytes(TEXT)
    return path


def test_the_identity_is_the_files_digest_and_the_numbers(data: Path) -> None:
    found = CalibrationOptions(data, 3, 4, coverage_tokens=5, device="cpu").identity()
    assert (found.sha256, found.size_bytes) == (hashlib.sha256(TEXT).hexdigest(), len(TEXT))
    assert (found.num_samples, found.sample_tokens, found.coverage_tokens) == (3, 4, 5)
    # What float32's bytes do not depend on is no part of it.
    assert (found.compute, found.batch_tokens) == ("float32", 0)
    assert CalibrationOptions(data, 3, 4, 2**30, 6, 5, "cpu").identity() == found
    assert CalibrationOptions(str(data), 3, 4, coverage_tokens=5, device="cpu").data == data  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_samples", "sample_tokens", "memory_bytes", "batch_tokens", "coverage_tokens"])
def test_numbers_have_bounds(data: Path, name: str) -> None:
    def identity(number: int) -> Any:
        return CalibrationOptions(data, **{"device": "cpu", name: number}).identity()  # type: ignore[arg-type]

    identity(1)
    identity(MAX_NUMBER)
    for number, words in (
        (0, "is 0 "),
        (-1, "is -1 "),
        (MAX_NUMBER + 1, "is more than 4,611"),
        (10**5000, "more than"),
    ):
        with pytest.raises(UsageError, match=words):
            identity(number)


def test_a_gpu_that_is_not_there_is_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=r"no CUDA device.*--calibration-device cpu"):
        CalibrationOptions(data, device="cuda").identity()
    assert CalibrationOptions(data).identity().compute == "float32"
    with pytest.raises(UsageError, match="calibration device 'tpu'"):
        CalibrationOptions(data, device="tpu").identity()  # type: ignore[arg-type]


def test_a_file_that_is_not_read_is_not_hashed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("hashed")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    monkeypatch.setattr("memopt.compressor.evaluate.calibration_data.MAX_TEXT_FILE_BYTES", len(TEXT) - 1)
    (tmp_path / "text.txt").write_bytes(TEXT)
    (tmp_path / "folder.jsonl").mkdir()
    for name, kind, words in (
        ("text.jsonl", DataFileError, "text.jsonl: 23 bytes, at most 22 are read"),
        ("text.txt", DataFileError, "ends neither in"),
        ("none.jsonl", MissingFileError, "there is no none.jsonl"),
        ("folder.jsonl", LayoutError, "not a regular file"),
    ):
        with pytest.raises(kind, match=words):
            CalibrationOptions(tmp_path / name, device="cpu").identity()


def test_compress_wants_options_and_not_a_path(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="calibration is a str"):
        memopt.compress(tmp_path, tmp_path / "out", calibration=str(data))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
