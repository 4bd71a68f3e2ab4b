"""Finished codes and scales of a calibration, in OUT/.memopt/calibration until the release is complete.

    layer-00003.experts-0000-0032.safetensors   codes and scales; figures in its metadata
    layer-00003.json                            the layer is finished (layer_record.py)
    hidden-00004, selection-00004, …            rows that the next layer starts from (calibrate/row_file.py)

Every file but the rows appears whole or not at all. Several ranks may write into one store, each its own parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memopt.compressor.calibration_figures import CalibrationFigures, figures_of
from memopt.compressor.checkpoint.disk_errors import read_error
from memopt.compressor.checkpoint.writer import write_stream_atomically
from memopt.compressor.layer_record import (
    MAX_RECORD_BYTES,
    LayerRecord,
    RowRange,
    parse_layer_record,
    render_layer_record,
)
from memopt.compressor.placement import place_tensors
from memopt.compressor.tensor_plan import OutputTensor
from memopt.errors import (
    ContentError,
    LayoutError,
    MalformedError,
    MissingFileError,
    MissingTensorError,
    SourceChangedError,
)
from memopt.manifests.open_file import open_regular, read_exactly
from memopt.manifests.safetensors_header import read_header, render_header
from memopt.manifests.strict_json import read_capped

CALIBRATION_FOLDER = "calibration"
_FIGURES_KEY = "figures"
_RECORD = re.compile(r"layer-(\d{5})\.json")
_PART = re.compile(r"layer-(\d{5})\..+\.safetensors")
# Rows that are made anew whenever their layer is, and files that were not finished.
_PASSING = re.compile(r"(attended|inputs|mtp)-.+|layer-.+\.tmp")
_STARTING_ROWS = re.compile(r"(?:hidden|selection)-(\d{5})")


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """Where a tensor of a part lies: byte `start` of file `path`."""

    path: Path
    start: int
    size_bytes: int


class CalibrationStore:
    """The store in `folder`, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._tensors: dict[str, StoredCodes] = {}
        self._figures: dict[str, CalibrationFigures] = {}
        self._kv_scales: dict[str, float] = {}
        self._sources: dict[str, str] = {}

    def part_path(self, layer: int, label: str) -> Path:
        """The file of a layer's part."""
        return self.folder / f"layer-{layer:05d}.{label}.safetensors"

    def write_part(
        self,
        layer: int,
        label: str,
        tensors: Sequence[tuple[OutputTensor, npt.NDArray[np.uint8]]],
        figures: Mapping[str, CalibrationFigures],
    ) -> None:
        """Write a part; `figures` by logical name of the weight. DiskFullError, MemoptIOError."""
        by_name = {output.name: data for output, data in tensors}
        layout = place_tensors(output for output, _ in tensors)
        tables = {name: entry.table() for name, entry in figures.items()}
        header = render_header(layout, {_FIGURES_KEY: json.dumps(tables, sort_keys=True)})
        path = self.part_path(layer, label)
        chunks: Iterator[Any] = iter((header, *(by_name[tensor.name].data for tensor in layout)))
        write_stream_atomically(path, chunks, path.with_suffix(".tmp"))

    def finish_layer(
        self,
        layer: int,
        labels: Sequence[str],
        sources: Mapping[str, str] | None = None,
        *,
        rows: Mapping[str, Sequence[RowRange]] | None = None,
        selection_columns: int = 0,
        kv_scales: Mapping[str, float] | None = None,
    ) -> None:
        """Record that `layer` is finished; its parts are `labels`. `record` gives the rest back.

        `sources`: SHA-256 (hex) of all source tensors that were read until now. Raises as `require_sources`.
        """
        self.require_sources(sources or {})
        new = {name: digest for name, digest in (sources or {}).items() if name not in self._sources}
        self._sources |= new
        paths = [self.part_path(layer, label) for label in labels]
        record = LayerRecord(
            layer=layer,
            parts={path.name: _sha256(path) for path in paths},
            sources=new,
            rows={name: tuple(ranges) for name, ranges in (rows or {}).items()},
            selection_columns=selection_columns,
            kv_scales=dict(kv_scales or {}),
        )
        path = self._record_path(layer)
        write_stream_atomically(path, (render_layer_record(record),), path.with_suffix(".tmp"))

    def remove_leftovers(self) -> None:
        """Remove what a run that was cut off left of its last layer: the folder would outgrow what was planned for it.

        One rank calls it, while no other writes. ContentError for a record behind a layer that is not finished.
        """
        paths = sorted(self.folder.iterdir())
        numbers = [int(match[1]) for path in paths if (match := _RECORD.fullmatch(path.name))]
        for place, number in enumerate(numbers):
            if number != place:
                raise self._damaged(self._record_path(number).name, "records a layer, but the one before has no record")
        for path in paths:
            part, rows = _PART.fullmatch(path.name), _STARTING_ROWS.fullmatch(path.name)
            is_unfinished = part is not None and int(part[1]) >= len(numbers)
            if is_unfinished or _PASSING.fullmatch(path.name) or (rows and int(rows[1]) != len(numbers)):
                remove_quietly(path)

    def record(self, layer: int) -> LayerRecord | None:
        """What a finished layer left; None if it is not finished. ContentError if it, or a part of it, was changed."""
        try:
            record = self._read_record(layer)
        except MissingFileError:
            return None
        for name, digest in record.parts.items():
            if self._part_sha256(name) != digest:
                raise self._damaged(name)
        self._sources |= record.sources
        return record

    def _record_path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05d}.json"

    def _read_record(self, layer: int) -> LayerRecord:
        """MissingFileError if there is none, ContentError if it is not what `finish_layer` wrote."""
        path = self._record_path(layer)
        try:
            record = parse_layer_record(read_capped(path, MAX_RECORD_BYTES, MalformedError), path.name)
        except MissingFileError:
            raise
        except (ValueError, MalformedError, LayoutError):
            raise self._damaged(path.name) from None
        if record.layer != layer:
            raise self._damaged(path.name)
        return record

    def _part_sha256(self, name: str) -> str:
        try:
            return _sha256(self.folder / name)
        except LayoutError:
            raise self._damaged(name) from None

    def require_sources(self, sources: Mapping[str, str]) -> None:
        """SourceChangedError unless the source tensors with these SHA-256 are those that calibration read, or unread.

        What follows from them would else be codes of other weights than the ledger names.
        """
        for name, digest in sources.items():
            if self._sources.get(name, digest) != digest:
                raise SourceChangedError(
                    "differs from what calibration read",
                    tensor=name,
                    remedy=f"restore the source, or remove {self.folder.parent.parent} to start anew",
                )

    def _damaged(self, name: str, message: str = "was changed after it was written") -> ContentError:
        return ContentError(message, file=name, remedy=f"remove {self.folder.parent.parent} to calibrate anew")

    def open(self) -> None:
        """Find the tensors of all finished layers, for `read` and `figures`. ContentError for a record or part that was
        changed.
        """
        for path in sorted(self.folder.iterdir()):
            match = _RECORD.fullmatch(path.name)
            if match is not None:
                record = self._read_record(int(match[1]))
                for name in record.parts:
                    self._open_part(self.folder / name)
                self._kv_scales |= record.kv_scales
                self._sources |= record.sources

    def open_part(self, layer: int, label: str) -> None:
        """Find the tensors of one part."""
        self._open_part(self.part_path(layer, label))

    def _open_part(self, path: Path) -> None:
        try:
            header = read_header(path)
            tables = json.loads(header.metadata[_FIGURES_KEY])
            self._figures |= {name: figures_of(table) for name, table in tables.items()}
        except (ValueError, KeyError, TypeError, AttributeError, MalformedError, LayoutError):
            raise self._damaged(path.name) from None
        for tensor in header.tensors:
            self._tensors[tensor.name] = StoredCodes(path, header.data_start + tensor.start, tensor.size_bytes)

    def figures(self, weight: str) -> CalibrationFigures:
        """What was found of the weight with that logical name; MissingTensorError if it was not calibrated."""
        found = self._figures.get(weight)
        if found is None:
            raise MissingTensorError("calibration has no codes for it", tensor=weight)
        return found

    def kv_scale(self, name: str) -> float:
        """The scale of the KV cache with that name; MissingTensorError if it was not measured."""
        if name not in self._kv_scales:
            raise MissingTensorError("calibration has not measured it", tensor=name)
        return self._kv_scales[name]

    def all_figures(self) -> Mapping[str, CalibrationFigures]:
        """By logical name, of everything that was opened."""
        return self._figures

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of tensor `name` from `start` on (None: all). MissingTensorError, MemoptIOError."""
        found = self._tensors.get(name)
        if found is None:
            raise MissingTensorError("calibration has no codes for it", tensor=name)
        count = found.size_bytes - start if size_bytes is None else size_bytes
        try:
            with open_regular(found.path) as (descriptor, _):
                return np.frombuffer(read_exactly(descriptor, count, found.start + start), np.uint8).copy()
        except OSError as problem:
            raise read_error(problem, found.path.name, name) from None


def _sha256(path: Path) -> str:
    with open_regular(path) as (descriptor, _), open(descriptor, "rb", closefd=False) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remove_quietly(path: Path) -> None:
    """Remove a file that may be gone already: several ranks clear up."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
