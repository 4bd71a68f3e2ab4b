"""Reading weights: positional, exact, and never from a file that changes meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import refusal, within_seconds
from tiny_checkpoints import make_checkpoint

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.errors import LayoutError, MemoptIOError, SourceChangedError, TruncatedError

TENSOR = "lm_head.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path / "checkpoint", "glm-4.7-fp8"))


def opened(checkpoint: Checkpoint) -> SourceReader:
    assert checkpoint.folder is not None
    return SourceReader(checkpoint, checkpoint.folder)


def bytes_of(reader: SourceReader, tensor: StoredTensor) -> bytearray:
    data = bytearray(tensor.size_bytes)
    reader.read_into(tensor, 0, memoryview(data))
    return data


def path_of(checkpoint: Checkpoint) -> Path:
    assert checkpoint.folder is not None
    return checkpoint.folder / checkpoint.tensors[TENSOR].file


def test_bytes_are_the_files(checkpoint: Checkpoint) -> None:
    with opened(checkpoint) as reader:
        for tensor in checkpoint.tensors.values():
            assert checkpoint.folder is not None
            whole = (checkpoint.folder / tensor.file).read_bytes()
            assert bytes_of(reader, tensor) == whole[tensor.start : tensor.start + tensor.size_bytes]
        tensor = checkpoint.tensors[TENSOR]
        middle = bytearray(10)
        reader.read_into(tensor, 7, memoryview(middle))
        assert middle == bytes_of(reader, tensor)[7:17]
        reader.require_unchanged()


def test_a_file_of_another_size_is_refused_when_opened(checkpoint: Checkpoint) -> None:
    path = path_of(checkpoint)
    planned = path.stat().st_size
    os.truncate(path, planned - 5)
    with refusal(SourceChangedError, path.name, f"{planned - 5:,}", f"{planned:,}"):
        opened(checkpoint)


def test_a_file_that_shrinks_while_it_is_read(checkpoint: Checkpoint) -> None:
    tensor, path = checkpoint.tensors[TENSOR], path_of(checkpoint)
    with opened(checkpoint) as reader:
        os.truncate(path, tensor.start + 3)
        with refusal(TruncatedError, TENSOR, path.name, f"{tensor.start + 3:,}"):
            bytes_of(reader, tensor)


def test_a_file_that_is_touched_while_it_is_read(checkpoint: Checkpoint) -> None:
    path = path_of(checkpoint)
    with opened(checkpoint) as reader:
        os.utime(path, ns=(1, 1))
        with refusal(SourceChangedError, path.name, "changed while it was read"):
            reader.require_unchanged()


def test_a_file_that_is_gone_and_a_fifo_are_refused(checkpoint: Checkpoint) -> None:
    path = path_of(checkpoint)
    path.unlink()
    with refusal(MemoptIOError, path.name, "No such file"):
        opened(checkpoint)
    os.mkfifo(path)
    with within_seconds(5), refusal(LayoutError, path.name, "not a regular file"):
        opened(checkpoint)


def test_no_descriptor_is_left_open(checkpoint: Checkpoint) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    with opened(checkpoint):
        assert count() == before + len(checkpoint.files)
    assert count() == before
    os.truncate(sorted(path_of(checkpoint).parent.glob("*.safetensors"))[-1], 1)
    with pytest.raises(SourceChangedError):
        opened(checkpoint)
    assert count() == before
