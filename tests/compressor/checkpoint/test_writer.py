"""One output file, streamed: planned bytes and no others, whatever the order in which tensors come."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from memopt.compressor.checkpoint.writer import UnitFile, write_atomically
from memopt.errors import DiskFullError, MemoptIOError, OutputError, SizeMismatchError
from memopt.manifests.safetensors_header import TensorHeader, render_header

NAME = "model-00001-of-00001.safetensors"


def layout_of(sizes: list[int]) -> tuple[TensorHeader, ...]:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return tuple(
        TensorHeader(f"t{n}", "U8", (size,), end - size, end)
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


@given(data=st.data(), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_bytes_and_digests_do_not_depend_on_the_order_of_chunks(
    data: st.DataObject, sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout = layout_of(sizes)
    contents = {t.name: bytes((n * 31 + i) % 256 for i in range(t.size_bytes)) for n, t in enumerate(layout)}
    left = {name: memoryview(content) for name, content in contents.items() if content}
    path = tmp_path_factory.mktemp("unit") / NAME
    with UnitFile(path, render_header(layout, {}), layout) as out:
        while left:
            name = data.draw(st.sampled_from(sorted(left)))
            count = data.draw(st.integers(1, len(left[name])))
            out.append(name, left[name][:count])
            left[name] = left[name][count:]
            if not left[name]:
                del left[name]
        digests = out.finish()
    assert digests == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert path.read_bytes() == render_header(layout, {}) + b"".join(contents.values())
    assert {name: bytes(e["data"]) for name, e in safetensors.deserialize(path.read_bytes())} == contents


def test_a_tensor_with_a_byte_too_many_is_refused(tmp_path: Path) -> None:
    layout = layout_of([4, 4])
    with UnitFile(tmp_path / NAME, b"", layout) as out:
        out.append("t0", b"abc")
        with refusal(SizeMismatchError, "t0", NAME, "3 bytes more"):
            out.append("t0", b"defg")


def test_a_tensor_with_a_byte_too_few_is_refused(tmp_path: Path) -> None:
    layout = layout_of([4, 4])
    with UnitFile(tmp_path / NAME, b"", layout) as out:
        out.append("t0", b"abcd")
        out.append("t1", b"abc")
        with refusal(SizeMismatchError, "t1", NAME, "1 bytes fewer"):
            out.finish()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EIO, MemoptIOError),
        (errno.EROFS, OutputError),
    ],
)
def test_a_failing_disk_is_told_once_and_by_its_reason(
    number: int, error: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    out = UnitFile(tmp_path / NAME, b"", layout_of([4]))
    monkeypatch.setattr(os, "pwrite", fail)
    with refusal(error, NAME, os.strerror(number)), out:
        out.append("t0", b"abcd")


def test_a_disk_that_takes_less_at_a_time_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[:3], place))
    with UnitFile(tmp_path / NAME, b"0123456", layout_of([5, 2])) as out:
        out.append("t1", b"fg")
        out.append("t0", b"abcde")
        out.finish()
    assert (tmp_path / NAME).read_bytes() == b"0123456abcdefg"


def test_a_tensor_whose_digest_is_known_is_not_hashed(tmp_path: Path) -> None:
    with UnitFile(tmp_path / NAME, b"", layout_of([1, 1]), frozenset({"t1"})) as out:
        out.append("t0", b"a")
        out.append("t1", b"b")
        assert out.finish() == {"t0": hashlib.sha256(b"a").hexdigest()}


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with refusal(OutputError, "absent", "No such file"):
        UnitFile(tmp_path / "absent" / NAME, b"", layout_of([1]))


def test_an_atomic_write_leaves_the_whole_file_and_no_temporary(tmp_path: Path) -> None:
    path, temporary = tmp_path / "config.json", tmp_path / ".config.json.tmp"
    write_atomically(path, b"old", temporary)
    write_atomically(path, b"new", temporary)
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]
    assert path.read_bytes() == b"new"


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    with refusal(OutputError, "config.json", "No such file"):
        write_atomically(path, b"new", tmp_path / "absent" / "tmp")
    assert path.read_bytes() == b"old"
