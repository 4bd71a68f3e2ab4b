"""Units: which tensors go into which output files, where, and the files' headers; fixed before a weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from memopt.compressor.placement import place_tensors
from memopt.compressor.ranks.layout import Layouts
from memopt.compressor.ranks.rank_tensors import rank_tensors
from memopt.compressor.tensor_plan import TensorPlan
from memopt.manifests.rank_folders import RankFolder, RankLayout
from memopt.manifests.safetensors_header import (
    TensorHeader,
    header_size_bytes,
    render_header,
    tensor_members_size_bytes,
)

# transformers refuses a file without it.
FILE_METADATA = {"format": "pt"}
# Two files a GLM-5.2 MoE layer: big enough to stream, small enough that a crash loses little.
DEFAULT_MAX_FILE_BYTES = 4 * 10**9


@dataclass(frozen=True)
class FileLayout:
    """A file's tensors by rising offset. Tensor-parallel ranks have one in common."""

    tensors: tuple[TensorHeader, ...]

    @property
    def data_size_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @cached_property
    def members_size_bytes(self) -> int:
        """What the tensors take in a header."""
        return tensor_members_size_bytes(self.tensors)


@dataclass(frozen=True)
class PlannedFile:
    """One weight file: its path below the release, its tensors, and its header's metadata.

    `rank` is None for a hub file.
    """

    name: str
    rank: int | None
    placed: FileLayout
    metadata: Mapping[str, str]

    @property
    def layout(self) -> tuple[TensorHeader, ...]:
        """Its tensors by rising offset."""
        return self.placed.tensors

    @property
    def header(self) -> bytes:
        """Length prefix and JSON; rendered anew each time, for all headers together are large."""
        return render_header(self.layout, self.metadata)

    @property
    def data_size_bytes(self) -> int:
        return self.placed.data_size_bytes

    @property
    def size_bytes(self) -> int:
        return header_size_bytes(self.placed.members_size_bytes, self.metadata) + self.data_size_bytes


@dataclass(frozen=True)
class UnitPlaces:
    """Where a unit's tensors lie, by name: in the hub file, and in the file of every rank that has them.

    `hub_file` is None if no hub file is written, `ranks` if no rank files are.
    """

    hub_file: str | None
    hub: Mapping[str, TensorHeader]
    ranks: RankLayout | None
    in_ranks: Mapping[str, TensorHeader]


@dataclass(frozen=True)
class Unit:
    """What is written as one piece: a hub file, and the files of every rank with slices of the same tensors.

    `number` counts from 1. `tensors`: plans in file order. `layout`: the hub file's tensors by rising offset, known
    even if that file is not written (`writes_hub`). `ranks`: None without rank files.
    """

    number: int
    file_name: str
    tensors: tuple[TensorPlan, ...]
    layout: tuple[TensorHeader, ...]
    ranks: RankLayout | None = None
    writes_hub: bool = True

    @property
    def data_size_bytes(self) -> int:
        """Bytes of its tensors, each counted once."""
        return self.hub_file.data_size_bytes

    @property
    def input_size_bytes(self) -> int:
        return sum(plan.source.size_bytes for plan in self.tensors)

    @cached_property
    def hub_file(self) -> PlannedFile:
        return PlannedFile(self.file_name, None, FileLayout(self.layout), FILE_METADATA)

    @cached_property
    def rank_files(self) -> tuple[PlannedFile, ...]:
        """The files of the ranks that hold something, by rank."""
        if self.ranks is None:
            return ()
        folders = [RankFolder(self.ranks, rank) for rank in range(self.ranks.num_ranks)]
        by_rank = rank_tensors(self.tensors, self.ranks)
        shared = {id(tensors): FileLayout(tensors) for tensors in by_rank}
        return tuple(
            PlannedFile(folder.path + self.file_name, folder.rank, shared[id(tensors)], FILE_METADATA | folder.metadata)
            for folder, tensors in zip(folders, by_rank, strict=True)
            if tensors
        )

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """Every file that is written, the hub file first."""
        return (*((self.hub_file,) if self.writes_hub else ()), *self.rank_files)

    @property
    def written_size_bytes(self) -> int:
        """Bytes of tensor data in all of its files."""
        return sum(file.data_size_bytes for file in self.files)

    def places(self) -> UnitPlaces:
        """Where its tensors lie; made anew each time."""
        return UnitPlaces(
            self.file_name if self.writes_hub else None,
            {header.name: header for header in self.layout},
            self.ranks,
            {header.name: header for file in self.rank_files for header in file.layout},
        )


def output_size_bytes(plan: TensorPlan) -> int:
    return sum(output.size_bytes for output in plan.outputs)


def hub_layout(plans: Iterable[TensorPlan]) -> tuple[TensorHeader, ...]:
    """Where the outputs of `plans` lie in their hub file."""
    return place_tensors(output for plan in plans for output in plan.outputs)


def _layers(plans: Iterable[TensorPlan]) -> Iterator[list[TensorPlan]]:
    """Runs of plans of one layer (or of no layer), in order."""
    run: list[TensorPlan] = []
    for plan in plans:
        if run and plan.source.spec.layer != run[-1].source.spec.layer:
            yield run
            run = []
        run.append(plan)
    if run:
        yield run


def _split(run: list[TensorPlan], max_file_bytes: int) -> Iterator[list[TensorPlan]]:
    """Cut one layer into the fewest near-equal pieces of about `max_file_bytes`; a tensor is never cut."""
    total = sum(output_size_bytes(plan) for plan in run)
    num_pieces = -(-total // max_file_bytes)
    piece: list[TensorPlan] = []
    number = done = 0
    for plan in run:
        size = output_size_bytes(plan)
        # The piece that the tensor's middle falls into, were the layer cut into equal parts.
        home = min(num_pieces - 1, (2 * done + size) * num_pieces // (2 * total))
        if piece and home != number:
            yield piece
            piece = []
        number = home
        piece.append(plan)
        done += size
    if piece:
        yield piece


def build_units(
    plans: tuple[TensorPlan, ...], max_file_bytes: int = DEFAULT_MAX_FILE_BYTES, layouts: Layouts | None = None
) -> tuple[Unit, ...]:
    """Layer-aligned files of at most about `max_file_bytes`: small layers share a file, a large one is cut.

    The limit is the hub file's; `layouts` (None: the hub's alone) changes neither names nor borders.
    """
    layouts = layouts or Layouts()
    files: list[list[TensorPlan]] = []
    open_size = 0
    for run in _layers(plan for plan in plans if plan.outputs):
        size = sum(output_size_bytes(plan) for plan in run)
        if files and open_size and open_size + size <= max_file_bytes:
            files[-1] += run
            open_size += size
        elif size <= max_file_bytes:
            files.append(list(run))
            open_size = size
        else:
            files += _split(run, max_file_bytes)
            open_size = 0
    count = len(files)
    return tuple(
        Unit(
            number,
            f"model-{number:05d}-of-{count:05d}.safetensors",
            tuple(tensors),
            hub_layout(tensors),
            layouts.ranks,
            layouts.writes_hub,
        )
        for number, tensors in enumerate(files, start=1)
    )
