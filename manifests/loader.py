"""Files and tensors of a release folder, each byte of them hashed in the memory in which it is handed out."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from memopt.errors import LayoutError, UsageError
from memopt.manifests.safetensors_header import (
    LENGTH_SIZE_BYTES,
    FileHeader,
    TensorHeader,
    header_length,
    parse_header,
)
from memopt.manifests.signed_files import SignedFiles
from memopt.manifests.tensor_memory import ALIGNMENT_BYTES, is_same_kind, memory_of, new_memory, tensors_at
from memopt.manifests.tree import open_file_at
from memopt.manifests.verified_reader import FileRead, SignedFile, Target, check_open_file, read_verified

if TYPE_CHECKING:
    import torch

    from memopt.manifests.trusted_release import TrustedRelease

# Open files at a time: well below the usual limit of 1024 descriptors.
_MAX_OPEN_FILES = 64
# Tensors that are handed out one after the other, or copied to a device, are read in groups of about this size.
GROUP_SIZE_BYTES = 256 * 2**20


def _groups(tensors: Sequence[TensorHeader]) -> Iterator[list[list[TensorHeader]]]:
    """Groups of about 256 MiB, each of runs of tensors that lie next to one another."""
    runs: list[list[TensorHeader]] = []
    size_bytes = 0
    for tensor in tensors:
        if runs and size_bytes + tensor.size_bytes > GROUP_SIZE_BYTES:
            yield runs
            runs, size_bytes = [], 0
        if runs and runs[-1][-1].end == tensor.start:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        size_bytes += tensor.size_bytes
    if runs:
        yield runs


class Loader(SignedFiles):
    """Reads the signed files of `trusted` below a folder's descriptor, in k threads.

    Every method raises ContentError for bytes that are not the signed ones, MissingFileError, LayoutError,
    MemoptIOError, and for a file of weights HeaderError and its kin; nothing is returned then.
    """

    def __init__(self, root_fd: int, trusted: TrustedRelease, num_threads: int) -> None:
        super().__init__(root_fd, trusted.signed_file)
        self._trusted = trusted
        self._num_threads = num_threads
        self._headers: dict[str, FileHeader] = {}

    def is_in_chunks(self, name: str) -> bool:
        """Whether parts of the file can be verified; else it is one digest."""
        leaves = self._trusted.leaves
        return leaves is not None and name in leaves.ranges

    def check_files(self, names: Collection[str]) -> None:
        """Hash files whole and keep nothing."""
        for batch in _batches(sorted(names)):
            with ExitStack() as opened:
                reads = [FileRead(*self._open(name, opened), is_whole=True) for name in batch]
                read_verified(reads, self._num_threads)

    def copy_files(self, copies: Sequence[tuple[str, int]]) -> None:
        """Write files to open descriptors: (name, descriptor), the very bytes that were hashed.

        The caller must throw the copies away if this raises; an OSError of the writing is not translated.
        """
        with ExitStack() as opened:
            reads = [
                FileRead(*self._open(name, opened), is_whole=True, sink=partial(_write, descriptor))
                for name, descriptor in copies
            ]
            read_verified(reads, self._num_threads)

    def read_file(self, name: str) -> bytes:
        """All bytes of a file, whatever its size."""
        return bytes(self._read_whole([name])[name])

    def header(self, name: str) -> FileHeader:
        """The header of a file of weights, kept once it was read."""
        if name not in self._headers:
            self._headers[name] = super().header(name)
        return self._headers[name]

    def load_files(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Every tensor of these files, in one piece of memory a file."""
        tensors: dict[str, torch.Tensor] = {}
        for batch in _batches(sorted(names)):
            for name, memory in self._read_whole(batch).items():
                header = self._header_of(name, memory)
                tensors |= tensors_at(memory, header.data_start, header.tensors)
        return tensors

    def load_tensors(self, file_name: str, names: Collection[str] | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors `names` (None: all) of a file in groups of about 256 MiB, in the order they lie in it.

        Each group is verified before it is yielded: all chunks that it touches, or the whole file if it was not signed
        in chunks.
        """
        if not self.is_in_chunks(file_name):
            memory = self._read_whole([file_name])[file_name]
            header = self._header_of(file_name, memory)
            yield tensors_at(memory, header.data_start, _chosen(header, names))
            return
        header = self.header(file_name)
        for runs in _groups(_chosen(header, names)):
            yield self._read_runs(file_name, header, runs)

    def fill_tensors(self, file_name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read the tensors of a file into the memory of `tensors`, which `check_destinations` accepted.

        Those on other devices, and of a file that was not signed in chunks, are copied once verified. If this raises
        they hold bytes that must not be used.
        """
        is_direct = all(tensor.device.type == "cpu" for tensor in tensors.values())
        if not is_direct or not self.is_in_chunks(file_name):
            for group in self.load_tensors(file_name, tensors.keys()):
                for name, tensor in group.items():
                    tensors[name].copy_(tensor)
            return
        header = self.header(file_name)
        targets = tuple(
            Target(header.data_start + tensor.start, memory_of(tensors[tensor.name]))
            for tensor in _chosen(header, tensors.keys())
            if tensor.size_bytes
        )
        with ExitStack() as opened:
            read_verified([FileRead(*self._open(file_name, opened), targets)], self._num_threads)

    def _read_runs(self, name: str, header: FileHeader, runs: list[list[TensorHeader]]) -> dict[str, torch.Tensor]:
        memories: list[tuple[memoryview, int]] = []
        targets: list[Target] = []
        for run in runs:
            start, end = run[0].start, run[-1].end
            # The data keeps the alignment it has in the file.
            padding = (header.data_start + start) % ALIGNMENT_BYTES
            memory = new_memory(padding + end - start)
            memories.append((memory, padding - start))
            targets.append(Target(header.data_start + start, memory[padding:]))
        with ExitStack() as opened:
            read_verified([FileRead(*self._open(name, opened), tuple(targets))], self._num_threads)
        tensors: dict[str, torch.Tensor] = {}
        for run, (memory, base) in zip(runs, memories, strict=True):
            tensors |= tensors_at(memory, base, run)
        return tensors

    def _open(self, name: str, opened: ExitStack) -> tuple[int, SignedFile]:
        if name not in self._trusted.digests:
            raise LayoutError("no such file was signed", file=name, remedy="only signed files are read")
        descriptor = open_file_at(self._root_fd, name)
        opened.callback(os.close, descriptor)
        # The size found counts only where none was signed; the digest then binds it.
        file = self._describe(name, os.fstat(descriptor).st_size)
        check_open_file(descriptor, file)
        return descriptor, file

    def _read_whole(self, names: Sequence[str]) -> dict[str, memoryview]:
        memories: dict[str, memoryview] = {}
        with ExitStack() as opened:
            reads: list[FileRead] = []
            for name in names:
                # The size is checked before memory is asked for.
                descriptor, file = self._open(name, opened)
                memories[name] = new_memory(file.size_bytes)
                reads.append(FileRead.of_all(descriptor, file, memories[name]))
            read_verified(reads, self._num_threads)
        return memories

    def _header_of(self, name: str, memory: memoryview) -> FileHeader:
        """The header in the verified bytes of a whole file."""
        if name not in self._headers:
            length = header_length(bytes(memory[:LENGTH_SIZE_BYTES]), memory.nbytes, name)
            raw = bytes(memory[LENGTH_SIZE_BYTES : LENGTH_SIZE_BYTES + length])
            self._headers[name] = parse_header(raw, memory.nbytes, name)
        return self._headers[name]


def check_destinations(header: FileHeader, tensors: Mapping[str, torch.Tensor]) -> None:
    """UsageError unless each of `tensors` can take the stored tensor of its name as it is."""
    for stored in _chosen(header, tensors.keys()):
        tensor = tensors[stored.name]
        if not is_same_kind(tensor, stored):
            raise UsageError(
                f"is {tensor.dtype} {list(tensor.shape)}, stored is {stored.dtype} {list(stored.shape)}",
                tensor=stored.name,
                remedy="give a tensor of the stored type and shape",
            )
        if not tensor.is_contiguous():
            raise UsageError("is not contiguous", tensor=stored.name, remedy="give a contiguous tensor")


def _write(descriptor: int, offset: int, memory: memoryview) -> None:
    done = 0
    while done < memory.nbytes:
        done += os.pwrite(descriptor, memory[done:], offset + done)


def _chosen(header: FileHeader, names: Collection[str] | None) -> list[TensorHeader]:
    return [tensor for tensor in header.tensors if names is None or tensor.name in names]


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _MAX_OPEN_FILES):
        yield names[start : start + _MAX_OPEN_FILES]
