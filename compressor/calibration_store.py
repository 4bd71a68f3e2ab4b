"""Finished codes and scales of a calibration, in OUT/.memopt/calibration until the release is complete.

    layer-00003.experts-0000-0032.safetensors   codes and scales; figures in its metadata
    layer-00003.json                            the layer is finished: its parts, and what was read for it, by SHA-256
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
from memopt.compressor.placement import place_tensors
from memopt.compressor.tensor_plan import OutputTensor
from memopt.errors import ContentError, MissingTensorError, SourceChangedError
from memopt.manifests.open_file import open_regular, read_exactly
from memopt.manifests.safetensors_header import read_header, render_header

CALIBRATION_FOLDER = "calibration"
_FIGURES_KEY = "figures"
# Of a layer's record: scale by tensor name.
KV_SCALES_KEY = "kv_scales"
_RECORD = re.compile(r"layer-(\d{5})\.json")


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
        self, layer: int, labels: Sequence[str], extra: Mapping[str, Any], sources: Mapping[str, str] | None = None
    ) -> None:
        """Record that `layer` is finished; its parts are `labels`. `extra`: plain JSON that `record` gives back.

        `sources`: SHA-256 (hex) of all source tensors that were read until now. Raises as `require_sources`.
        """
        self.require_sources(sources or {})
        new = {name: digest for name, digest in (sources or {}).items() if name not in self._sources}
        self._sources |= new
        paths = [self.part_path(layer, label) for label in labels]
        table = {"parts": {path.name: _sha256(path) for path in paths}, "extra": dict(extra), "sources": new}
        path = self.folder / f"layer-{layer:05d}.json"
        write_stream_atomically(path, (json.dumps(table, sort_keys=True).encode(),), path.with_suffix(".tmp"))

    def record(self, layer: int) -> dict[str, Any] | None:
        """The `extra` of a finished layer; None if it is not finished. ContentError if a part of it was changed."""
        try:
            table = json.loads((self.folder / f"layer-{layer:05d}.json").read_bytes())
            for name, digest in table["parts"].items():
                if _sha256(self.folder / name) != digest:
                    raise self._damaged(name)
            self._sources |= table["sources"]
            return dict(table["extra"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged(f"layer-{layer:05d}.json") from None

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

    def _damaged(self, name: str) -> ContentError:
        out = self.folder.parent.parent
        return ContentError("was changed after it was written", file=name, remedy=f"remove {out} to calibrate anew")

    def open(self) -> None:
        """Find the tensors of all finished layers, for `read_into` and `figures`."""
        for path in sorted(self.folder.iterdir()):
            if _RECORD.fullmatch(path.name):
                table = json.loads(path.read_bytes())
                for name in table["parts"]:
                    self._open_part(self.folder / name)
                self._kv_scales |= table["extra"].get(KV_SCALES_KEY, {})
                self._sources |= table["sources"]

    def open_part(self, layer: int, label: str) -> None:
        """Find the tensors of one part."""
        self._open_part(self.part_path(layer, label))

    def _open_part(self, path: Path) -> None:
        header = read_header(path)
        for tensor in header.tensors:
            self._tensors[tensor.name] = StoredCodes(path, header.data_start + tensor.start, tensor.size_bytes)
        tables = json.loads(header.metadata[_FIGURES_KEY])
        self._figures |= {name: figures_of(table) for name, table in tables.items()}

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
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remove_quietly(path: Path) -> None:
    """Remove a file that may be gone already: several ranks clear up."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
