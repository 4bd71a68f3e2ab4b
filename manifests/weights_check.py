"""Whether the weight files of a release are one whole: headers, index and ledger name the same tensors.

An engine loads what the index names, or every *.safetensors in a folder: both must be the same set.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from memopt.errors import ContentError, IndexFileError, LayoutError, MemoptError, MemoptIOError
from memopt.manifests.file_roles import INDEX_SUFFIX, is_weights
from memopt.manifests.rank_folders import place_problem
from memopt.manifests.safetensors_header import FileHeader, TensorHeader
from memopt.manifests.safetensors_index import INDEX_NAME, MAX_INDEX_SIZE_BYTES, parse_index
from memopt.manifests.signed_files import FileSource
from memopt.manifests.workers import run_workers

_MODULUS = 2**256


@dataclass
class SetPrint:
    """A fingerprint of a set of strings, in any order: a full model has 180,000 tensor names, in three places."""

    count: int = 0
    total: int = 0

    def add(self, text: str) -> None:
        self.count += 1
        self.total = (self.total + int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")) % _MODULUS

    def __add__(self, other: SetPrint) -> SetPrint:
        """The fingerprint of both sets together."""
        return SetPrint(self.count + other.count, (self.total + other.total) % _MODULUS)


def print_of(texts: Iterable[str]) -> SetPrint:
    """The fingerprint of `texts`."""
    result = SetPrint()
    for text in texts:
        result.add(text)
    return result


def tensor_text(tensor: TensorHeader) -> str:
    """A tensor's name, type, shape and place as one string."""
    return f"{tensor.name}\0{tensor.dtype}\0{list(tensor.shape)}\0{tensor.start}\0{tensor.end}"


@dataclass
class WeightsReport:
    """`tensors`: file -> fingerprint of its tensors, where the header is sound; `indexes`: those that were read.

    `header_sizes`: bytes from the start of a file that were read, and so verified, where it is.
    """

    problems: list[MemoptError] = field(default_factory=list)
    tensors: dict[str, SetPrint] = field(default_factory=dict)
    indexes: set[str] = field(default_factory=set)
    header_sizes: dict[str, int] = field(default_factory=dict)


def _folder_of(name: str) -> str:
    return name[: name.rfind("/") + 1]


def check_weights(
    names: Collection[str], source: FileSource, readable: Collection[str], num_threads: int = 1
) -> WeightsReport:
    """Check every folder of weights among the listed `names`; files outside `readable` are not opened.

    Never raises for a bad file: LayoutError (set or tensors differ), IndexFileError, HeaderError and its kin,
    ContentError, MemoptIOError stand in the report.
    """
    report = WeightsReport()
    expected: dict[str, SetPrint] = {}
    by_folder: dict[str, set[str]] = {}
    for name in names:
        if is_weights(name) or name.endswith(INDEX_SUFFIX):
            by_folder.setdefault(_folder_of(name), set()).add(name)
    for folder, files in sorted(by_folder.items()):
        weights = {name for name in files if is_weights(name)}
        indexes = sorted(files - weights)
        problem = _index_problem(folder, weights, indexes)
        if problem is not None:
            report.problems.append(problem)
        elif indexes and indexes[0] in readable:
            _read_index(folder, weights, source, expected, report)
    shards = sorted(name for name in names if is_weights(name) and name in readable)
    _check_headers(shards, source, expected, report, num_threads)
    return report


def _index_problem(folder: str, weights: set[str], indexes: list[str]) -> LayoutError | None:
    index = folder + INDEX_NAME
    for name in indexes:
        if name != index:
            return LayoutError("is a second index: engines may load another set of weights", file=name)
    if not indexes and len(weights) > 1:
        first, second = sorted(weights)[:2]
        return LayoutError(
            f"lies beside {first}, and no {INDEX_NAME} says which of them to load",
            file=second,
            remedy="the publisher must add an index, or remove the extra copy",
        )
    return None


def _read_index(
    folder: str, weights: set[str], source: FileSource, expected: dict[str, SetPrint], report: WeightsReport
) -> None:
    name = folder + INDEX_NAME
    try:
        weight_map = parse_index(source.read(name, MAX_INDEX_SIZE_BYTES, IndexFileError), name).weight_map
    except MemoptError as problem:
        report.problems.append(problem)
        return
    report.indexes.add(name)
    named = {folder + shard for shard in weight_map.values()}
    for shard in sorted(named - weights):
        report.problems.append(LayoutError(f"names {shard}, which is not listed", file=name))
    for shard in sorted(weights - named):
        report.problems.append(
            LayoutError(f"is not in {name}: a stale or second copy", file=shard, remedy="the publisher must remove it")
        )
    for shard in named & weights:
        expected[shard] = SetPrint()
    for tensor, shard in weight_map.items():
        if folder + shard in weights:
            expected[folder + shard].add(tensor)


def _check_headers(
    files: list[str], source: FileSource, expected: Mapping[str, SetPrint], report: WeightsReport, num_threads: int
) -> None:
    lock = threading.Lock()

    def check(name: str, _buffer: memoryview, _check: Callable[[], None]) -> None:
        try:
            header = source.header(name)
        except MemoptError as problem:
            with lock:
                report.problems.append(problem)
            return
        tensors = print_of(tensor_text(tensor) for tensor in header.tensors)
        is_expected = name not in expected or expected[name] == print_of(tensor.name for tensor in header.tensors)
        error = None if is_expected else _difference(name, header, source)
        # Swapped files differ from the ledger too; where they belong says more.
        error = place_problem(name, header.metadata) or error
        with lock:
            report.tensors[name] = tensors
            report.header_sizes[name] = header.data_start
            if error is not None:
                report.problems.append(error)

    run_workers(files, check, min(num_threads, max(len(files), 1)))
    report.problems.sort(key=lambda problem: (isinstance(problem, (ContentError, MemoptIOError)), problem.file or ""))


def _difference(name: str, header: FileHeader, source: FileSource) -> MemoptError:
    """Which tensor differs between index and header; the index is read anew, so that a sound release pays nothing."""
    folder = _folder_of(name)
    index = folder + INDEX_NAME
    try:
        weight_map = parse_index(source.read(index, MAX_INDEX_SIZE_BYTES, IndexFileError), index).weight_map
    except MemoptError as problem:
        return problem
    named = {tensor for tensor, shard in weight_map.items() if folder + shard == name}
    held = {tensor.name for tensor in header.tensors}
    tensor = min(named ^ held, default="")
    fault = "is in the index, not in the file" if tensor in named else "is in the file, not in the index"
    return LayoutError(
        f"{tensor[:200]!a} {fault} ({len(named ^ held):,} tensors differ)",
        file=name,
        tensor=tensor if tensor.isprintable() and len(tensor) <= 200 else None,
        remedy="the publisher must make the index anew",
    )
