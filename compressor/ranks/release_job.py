"""What sharding and merging share: a release's own units in other layouts, its ledger and release.json edited."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.job import Job
from memopt.compressor.ledger import UNKNOWN_DIGEST, ErrorSummary, TensorResult, ledger_line, placed_output
from memopt.compressor.metadata_files import MetadataFile
from memopt.compressor.output_folder import FinishedIdentity
from memopt.compressor.ranks.layout import Layouts
from memopt.compressor.ranks.release_files import ReleaseFiles, sort_release_files
from memopt.compressor.ranks.release_reader import ReleaseReader
from memopt.compressor.ranks.released import ReleasedPlan
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.release_file import render_table
from memopt.compressor.units import PlannedFile, Unit
from memopt.compressor.weight_indexes import hub_index, rank_indexes
from memopt.errors import ContentError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.safetensors_index import INDEX_NAME
from memopt.version import __version__


class ReleaseJob(Job):
    """Writes `released` anew in `layouts`. Subclasses say which files are read, and how."""

    command: ClassVar[str]
    must_read_source_again = True

    def __init__(self, released: ReleasedPlan, layouts: Layouts) -> None:
        self._released = released
        self._layouts = layouts
        self.folder = released.folder
        self.units = tuple(replace(unit, ranks=layouts.ranks, writes_hub=layouts.writes_hub) for unit in released.units)
        self._source_units = {unit.number: unit for unit in released.units}
        identity = released.table.get("identity")
        fingerprint = identity.get("plan_fingerprint") if isinstance(identity, dict) else None
        self.finished = FinishedIdentity(str(fingerprint), layouts.names)
        # Through the ledger's digest in it release.json covers the weights.
        parts = [
            self.command,
            __version__,
            hashlib.sha256(released.release_bytes).hexdigest(),
            *layouts.names,
            *(f"{file.name} {file.sha256}" for file in self.small_files),
        ]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @abstractmethod
    def source_files(self, unit: Unit) -> tuple[PlannedFile, ...]:
        """The files of the release that are read for `unit`."""

    def source_unit(self, unit: Unit) -> Unit:
        """`unit` in the layouts of the release."""
        return self._source_units[unit.number]

    @cached_property
    def _made_files(self) -> dict[str, bytes]:
        hub = {INDEX_NAME: hub_index(self.units)} if self._layouts.writes_hub else {}
        return {CONFIG_NAME: self._released.config_bytes} | hub | rank_indexes(self.units, self._layouts.ranks)

    @cached_property
    def small_files(self) -> Sequence[MetadataFile]:
        copied = {name: self._released.read(name) for name in self._sorted_files.copied}
        return tuple(
            MetadataFile(name, len(raw), hashlib.sha256(raw).hexdigest(), "memopt")
            for name, raw in (self._made_files | copied).items()
        )

    @property
    def left_behind(self) -> tuple[str, ...]:
        return self._sorted_files.left_behind

    @cached_property
    def _sorted_files(self) -> ReleaseFiles:
        return sort_release_files(
            self.folder,
            weights={unit.file_name for unit in self.units},
            code_files=self._released.table.get("code_files"),
            signed_names=self._released.signed_names,
        )

    def small_file(self, name: str) -> bytes:
        made = self._made_files.get(name)
        return self._released.read(name) if made is None else made

    @cached_property
    def _ledger_size_bytes(self) -> int:
        blank = sum(len(ledger_line(row)) for unit in self.units for row in self._placed_rows(unit, None))
        return blank + sum(len(line) for line in self.tail_lines())

    def ledger_size_bytes(self) -> int:
        return self._ledger_size_bytes

    def open_source(self) -> ReleaseReader:
        return ReleaseReader(self.folder, (file for unit in self.units for file in self.source_files(unit)))

    def part_files(self, unit: Unit) -> Mapping[str, int]:
        return {file.name: file.data_size_bytes for file in self.source_files(unit)}

    def rows(self, unit: Unit, results: Sequence[TensorResult], digests: UnitDigests) -> list[dict[str, Any]]:
        rows = self._placed_rows(unit, digests)
        for row in rows:
            for entry in row["outputs"]:
                if digests.whole.get(entry["name"]) != entry["sha256"]:
                    raise ContentError(
                        f"its bytes are not those that {LEDGER_NAME} names",
                        tensor=entry["name"],
                        file=self.source_files(unit)[0].name,
                        remedy="fetch the release again",
                    )
        return rows

    def _placed_rows(self, unit: Unit, digests: UnitDigests | None) -> list[dict[str, Any]]:
        places = unit.places()
        rows: list[dict[str, Any]] = []
        for plan, row in zip(unit.tensors, self._released.rows(self.source_unit(unit)), strict=True):
            outputs = [
                placed_output(entry, plan, output, places, digests)
                for entry, output in zip(row["outputs"], plan.outputs, strict=True)
            ]
            rows.append(row | {"outputs": outputs})
        return rows

    def tail_lines(self) -> Iterator[bytes]:
        yield from self._released.tail_lines()

    def release(self, *, ledger_sha256: str, errors_by_role: Mapping[str, ErrorSummary]) -> bytes:
        table = self._released.table
        edited = {"ledger": table["ledger"] | {"sha256": ledger_sha256}, "layouts": list(self._layouts.names)}
        return render_table(table | edited)

    def release_size_bytes(self) -> int:
        return len(self.release(ledger_sha256=UNKNOWN_DIGEST, errors_by_role={}))
