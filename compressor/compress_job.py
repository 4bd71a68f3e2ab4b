"""Compressing as a job: a plan's units, quantized, converted and copied from a checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memopt.compressor.calibration_budget import require_fallback_budget
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.calibration_store import CALIBRATION_FOLDER, CalibrationStore
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.fingerprint import plan_fingerprint, run_fingerprint
from memopt.compressor.job import Advance, Job, SourcePart, TensorReader, file_sizes
from memopt.compressor.ledger import ErrorSummary, TensorResult, ledger_line, ledger_row
from memopt.compressor.metadata_files import MetadataFile, read_metadata
from memopt.compressor.output_folder import FinishedIdentity
from memopt.compressor.plan import Plan
from memopt.compressor.progress import CALIBRATE_STAGE, Progress, ProgressCallback
from memopt.compressor.quantize.backend import QuantizeBackend
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.release_file import render_release
from memopt.compressor.run_ranks import RunRanks
from memopt.compressor.tensor_work import TensorWorker
from memopt.compressor.units import Unit
from memopt.errors import UsageError


class CompressJob(Job):
    """Carries out `plan`; `backend` rounds, `calibration` says where the data is that the plan was made for.

    UsageError for a plan from a config alone, for a recipe that needs calibration data without any, and for data that
    the recipe does not need.
    """

    def __init__(self, plan: Plan, backend: QuantizeBackend, calibration: CalibrationOptions | None = None) -> None:
        if plan.source.folder is None:
            raise UsageError("a plan from a config alone has no weights", remedy="name a checkpoint folder")
        if plan.recipe.needs_calibration and calibration is None:
            raise UsageError(
                f"recipe {plan.recipe.name} needs calibration data, and none was given",
                remedy="give --calibration text.jsonl; or use method rtn, and kv_cache scales: unit",
            )
        if calibration is not None and not plan.recipe.needs_calibration:
            raise UsageError(
                f"recipe {plan.recipe.name} needs no calibration data, but some was given",
                remedy="leave --calibration out, or use a recipe with method weighted or gptq",
            )
        self._calibration = calibration
        self._store: CalibrationStore | None = None
        self._plan = plan
        self._backend = backend
        self._plan_fingerprint = plan_fingerprint(plan)
        self.folder = plan.source.folder
        self.units = plan.units
        self.fingerprint = run_fingerprint(self._plan_fingerprint, plan.layouts.names)
        self.finished = FinishedIdentity(self._plan_fingerprint, plan.layouts.names)
        # A Hub source is settled by its commit, whose digests were checked when it was fetched.
        self.must_read_source_again = plan.identity.kind == "folder"

    @property
    def small_files(self) -> Sequence[MetadataFile]:
        return self._plan.small_files

    def small_file(self, name: str) -> bytes:
        made = self._plan.made_files.get(name)
        return read_metadata(self.folder / name) if made is None else made

    def ledger_size_bytes(self) -> int:
        return self._plan.ledger_size_bytes()

    def open_source(self) -> SourceReader:
        return SourceReader(self._plan.source, self.folder)

    def prepare(self, state: Path, workers: int, progress: ProgressCallback | None, ranks: RunRanks) -> None:
        """Calibrate, unless there is nothing to. QualityGateError when too many experts ended with a lesser method."""
        if self._calibration is None:
            return
        from memopt.compressor.calibrate.calibrate_model import calibrate_model

        self._store = CalibrationStore(state / CALIBRATION_FOLDER)
        calibrate_model(
            self._plan,
            self._store,
            self._calibration,
            num_workers=workers,
            communicator=ranks.communicator,
            local_rank=ranks.local_rank,
            on_layer=layer_progress(self._plan, progress),
        )
        require_fallback_budget(self._plan.tensors, self._store.all_figures())

    def scratch_size_bytes(self, state: Path) -> int:
        """What the calibration's folder will hold at its fullest, less what is in it already."""
        if self._calibration is None:
            return 0
        from memopt.compressor.calibrate.scratch_size import calibration_scratch_bytes

        return max(0, calibration_scratch_bytes(self._plan) - _folder_size_bytes(state / CALIBRATION_FOLDER))

    def worker(self, reader: TensorReader, unit: Unit, advance: Advance) -> TensorWorker:
        return TensorWorker(reader, self._backend, advance, self._store)

    def rows(self, unit: Unit, results: Sequence[TensorResult], digests: UnitDigests) -> list[dict[str, Any]]:
        places = unit.places()
        return [ledger_row(plan, places, result, digests) for plan, result in zip(unit.tensors, results, strict=True)]

    def tail_lines(self) -> Iterator[bytes]:
        for tensor in self._plan.tensors:
            if not tensor.outputs:
                yield ledger_line(ledger_row(tensor, None))

    def source_parts(self, unit: Unit, rows: Sequence[Mapping[str, Any]]) -> Iterator[SourcePart]:
        for plan, row in zip(unit.tensors, rows, strict=True):
            for part, entry in zip(plan.source.parts, row["sources"], strict=True):
                yield SourcePart(part, entry["sha256"])

    def part_files(self, unit: Unit) -> Mapping[str, int]:
        sizes: Counter[str] = Counter()
        for plan in unit.tensors:
            for part in plan.source.parts:
                sizes[part.file] += part.size_bytes
        return sizes

    def release(self, *, ledger_sha256: str, errors_by_role: Mapping[str, ErrorSummary]) -> bytes:
        return render_release(
            self._plan,
            fingerprint=self._plan_fingerprint,
            ledger_sha256=ledger_sha256,
            errors_by_role=errors_by_role,
        )

    def release_size_bytes(self) -> int:
        return len(render_release(self._plan))


def layer_progress(plan: Plan, callback: ProgressCallback | None) -> Callable[[int, int], None]:
    """Tells `callback` of finished layers, (done, all), as so many of all source bytes."""
    started = time.monotonic()

    def on_layer(done: int, total: int) -> None:
        if callback is None:
            return
        size_bytes = plan.input_size_bytes
        done_bytes = size_bytes * done // total
        rate = done_bytes / max(time.monotonic() - started, 1e-9)
        left = (size_bytes - done_bytes) / rate if rate else None
        callback(Progress(done_bytes, size_bytes, done, 0, total, f"layer {done - 1}", rate, left, CALIBRATE_STAGE))

    return on_layer


def _folder_size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def planned_sizes(plan: Plan) -> dict[str, int]:
    """Every output file of `plan` and its exact size in bytes; for a plan from a config alone too."""
    return file_sizes(plan.small_files, plan.units, plan.ledger_size_bytes(), len(render_release(plan)))
