"""A checkpoint seen through its headers alone: files, tensors, config; no weight is read here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memopt.compressor.checkpoint.model_config import ModelConfig, read_config
from memopt.compressor.checkpoint.small_files import SourceFile
from memopt.errors import IndexFileError, LayoutError, MemoptError, MissingFileError, MissingTensorError, UsageError
from memopt.manifests.rank_folders import parse_layout
from memopt.manifests.safetensors_header import FileHeader, read_header
from memopt.manifests.safetensors_index import (
    INDEX_NAME,
    SINGLE_FILE_NAME,
    WEIGHT_SUFFIX,
    SafetensorsIndex,
    read_index,
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in a file. `start`: byte offset from the start of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One weight file: its size in bytes and the sha256 of its header."""

    name: str
    size_bytes: int
    header_sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """Headers and config of a checkpoint. `folder` is None when it was made from a config alone.

    `files`: by name. `tensors`: tensor name -> where it lies. `listed`: what the source holds, where its publisher says
    so (the Hub's listing); None: whatever lies in `folder`.
    """

    folder: Path | None
    config: ModelConfig
    files: dict[str, WeightFile]
    tensors: dict[str, StoredTensor]
    listed: tuple[SourceFile, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of tensor data, headers not counted."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class CheckpointScan:
    """A checkpoint and every problem that its files have; `checkpoint` holds what could be read."""

    checkpoint: Checkpoint
    problems: tuple[MemoptError, ...]


def _index_of(folder: Path, listed: tuple[SourceFile, ...] | None) -> SafetensorsIndex | None:
    """The checkpoint's index, or None for one of one file without an index."""
    if listed is None:
        found = {name for name in (INDEX_NAME, SINGLE_FILE_NAME) if (folder / name).exists()}
    else:
        found = {file.name for file in listed}
    if not found & {INDEX_NAME, SINGLE_FILE_NAME}:
        _refuse_rank_files_alone(folder)
    return None if INDEX_NAME not in found and SINGLE_FILE_NAME in found else read_index(folder)


def _refuse_rank_files_alone(folder: Path) -> None:
    """MissingFileError with the way out, if `folder` is a release whose weights are rank files only."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if parse_layout(path.name) is not None and path.is_dir():
            raise MissingFileError(
                f"{folder} holds files of ranks alone ({path.name}/), no {INDEX_NAME}",
                remedy="`memopt merge` makes the whole weights of them; to plan, --config its config.json will do",
            )


def _disagreements(index: SafetensorsIndex, tensors: dict[str, StoredTensor], unread: set[str]) -> list[MemoptError]:
    problems: list[MemoptError] = []
    for name, file in index.weight_map.items():
        found = tensors.get(name)
        if found is None and file not in unread:
            problems.append(
                MissingTensorError(
                    f"the index puts it in {file}, where it is not", tensor=name, remedy="fetch the checkpoint again"
                )
            )
        elif found is not None and found.file != file:
            problems.append(IndexFileError(f"the index says {file}, it lies in {found.file}", tensor=name))
    for name, tensor in tensors.items():
        if name not in index.weight_map:
            problems.append(IndexFileError("is in the file but not in the index", tensor=name, file=tensor.file))
    return problems


def _left_over(folder: Path, names: tuple[str, ...]) -> list[MemoptError]:
    return [
        LayoutError(
            "is in the folder but not in the index: its tensors would be lost",
            file=path.name,
            remedy="remove it, or add its tensors to the index",
        )
        for path in sorted(folder.glob(f"*{WEIGHT_SUFFIX}"))
        if path.name not in names
    ]


def scan_checkpoint(folder: Path, listed: tuple[SourceFile, ...] | None = None) -> CheckpointScan:
    """Read config, index and every header below `folder`; problems of single files are collected, not raised.

    `listed`: what the source holds, if `folder` may hold other files too, which then do not count.
    Raises UsageError if there is no such folder, and as `read_config` and `read_index`.
    """
    # Not Path.is_dir, which raises for a name that is too long.
    if not os.path.isdir(folder):
        raise UsageError(
            f"there is no checkpoint folder {folder}",
            remedy="name a folder, or a Hub repository as org/name@revision",
        )
    config = read_config(folder)
    index = _index_of(folder, listed)
    names = (SINGLE_FILE_NAME,) if index is None else index.file_names
    headers: dict[str, FileHeader] = {}
    problems: list[MemoptError] = []
    for name in names:
        try:
            headers[name] = read_header(folder / name)
        except MemoptError as problem:
            problems.append(problem)
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for t in header.tensors:
            if t.name in tensors:
                problems.append(LayoutError(f"is also in {tensors[t.name].file}", tensor=t.name, file=file))
            tensors[t.name] = StoredTensor(t.name, file, t.dtype, t.shape, header.data_start + t.start, t.size_bytes)
    if index is not None:
        problems += _disagreements(index, tensors, set(names) - set(headers))
    if listed is None:
        problems += _left_over(folder, names)
    files = {name: WeightFile(name, header.file_size_bytes, header.sha256) for name, header in headers.items()}
    return CheckpointScan(Checkpoint(folder, config, files, tensors, listed), tuple(problems))


def open_checkpoint(folder: Path, listed: tuple[SourceFile, ...] | None = None) -> Checkpoint:
    """`scan_checkpoint`, raising its first problem, if it has one, and saying how many others there are."""
    scan = scan_checkpoint(folder, listed)
    raise_first(scan.problems)
    if not scan.checkpoint.tensors:
        raise MissingFileError(f"{folder} holds no tensors")
    return scan.checkpoint


def raise_first(problems: tuple[MemoptError, ...]) -> None:
    """Raise the first of `problems`, if any; its remedy then says how many others `memopt inspect` lists."""
    if not problems:
        return
    first, others = problems[0], len(problems) - 1
    if others:
        more = f"{others} more problem{'s' if others > 1 else ''}: see `memopt inspect`"
        first.remedy = f"{first.remedy}; {more}" if first.remedy else more
    raise first
