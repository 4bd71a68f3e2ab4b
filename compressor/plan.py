"""The plan: every tensor's fate and every output byte, complete before the first weight is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memopt.compressor.alignment import require_divisible
from memopt.compressor.checkpoint.checkpoint import Checkpoint, raise_first
from memopt.compressor.checkpoint.model_config import CONFIG_NAME, render_config
from memopt.compressor.checkpoint.small_files import SkippedFile
from memopt.compressor.checkpoint.source_tensor import scan_source
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.ledger import ledger_line, ledger_row
from memopt.compressor.lint import EngineNote, lint, raise_on_error
from memopt.compressor.metadata_files import MetadataFile, MetadataSelection, missing_code, select_metadata
from memopt.compressor.quantization_config import build_quantization_config, is_stale
from memopt.compressor.recipe import Recipe
from memopt.compressor.source_identity import SourceIdentity
from memopt.compressor.tensor_plan import Fate, TensorPlan, plan_tensors
from memopt.compressor.units import DEFAULT_MAX_FILE_BYTES, Unit, build_units
from memopt.errors import UsageError
from memopt.manifests.safetensors_header import DATA_ALIGNMENT_BYTES
from memopt.manifests.safetensors_index import INDEX_NAME, render_index


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may vary besides its recipe.

    `max_file_bytes`: about the largest weight file. `tensor_parallel`: must divide (None: the recipe's).
    `allow_code`: copy `.py` files. `release_name`: written into release.json (None: the recipe's name).
    """

    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    tensor_parallel: int | None = None
    allow_code: bool = False
    release_name: str | None = None


@dataclass(frozen=True)
class Plan:
    """What `compress` will do.

    `tensors`: in the family's order, dropped ones too. `units`: output weight files. `config_bytes`, `index_bytes`:
    the files that describe them. `metadata`: small files copied as they are. `notes`: the engine lint.
    """

    source: Checkpoint
    identity: SourceIdentity
    family: str
    recipe: Recipe
    options: PlanOptions
    tensors: tuple[TensorPlan, ...]
    units: tuple[Unit, ...]
    quantization: dict[str, Any] | None
    config_bytes: bytes
    index_bytes: bytes
    metadata: MetadataSelection
    notes: tuple[EngineNote, ...]

    @property
    def tensor_parallel(self) -> int:
        return self.options.tensor_parallel or self.recipe.tensor_parallel

    @property
    def weights_size_bytes(self) -> int:
        """Bytes of output tensor data, headers not counted."""
        return sum(unit.data_size_bytes for unit in self.units)

    @property
    def input_size_bytes(self) -> int:
        """Bytes of source tensor data that will be read."""
        return sum(unit.input_size_bytes for unit in self.units)

    @property
    def fate_counts(self) -> dict[Fate, int]:
        """Logical tensors by fate."""
        counts = Counter(plan.fate for plan in self.tensors)
        return {fate: counts[fate] for fate in Fate if counts[fate]}

    @property
    def small_files(self) -> tuple[MetadataFile, ...]:
        """config.json, the index and the copied files: written and checked before any weight."""
        made = [
            MetadataFile(name, len(raw), hashlib.sha256(raw).hexdigest(), "memopt")
            for name, raw in ((CONFIG_NAME, self.config_bytes), (INDEX_NAME, self.index_bytes))
        ]
        return (*made, *self.metadata.copied)

    @property
    def skipped_files(self) -> tuple[SkippedFile, ...]:
        return self.metadata.skipped

    def ledger_size_bytes(self) -> int:
        """Exact size of ledger.jsonl, in bytes."""
        return self._ledger_size_bytes

    @cached_property
    def _ledger_size_bytes(self) -> int:
        return sum(len(line) for line in self.blank_ledger())

    def blank_ledger(self) -> Iterator[bytes]:
        """The ledger's lines with zero digests and figures: same lines, same widths."""
        for unit in self.units:
            placed = {header.name: header for header in unit.layout}
            for plan in unit.tensors:
                yield ledger_line(ledger_row(plan, unit.file_name, placed))
        for plan in self.tensors:
            if not plan.outputs:
                yield ledger_line(ledger_row(plan, "", {}))


def _check_tensor_parallel(plans: tuple[TensorPlan, ...], degree: int) -> None:
    for plan in plans:
        if plan.outputs:
            require_divisible(
                plan.source.spec,
                degree,
                weights_per_scale=plan.int4_weights_per_scale,
                block=plan.source.block if plan.is_float8 else None,
            )


def _check_options(options: PlanOptions) -> None:
    if options.max_file_bytes < DATA_ALIGNMENT_BYTES:
        raise UsageError(f"a file of at most {options.max_file_bytes} bytes holds nothing", remedy="use 1MB or more")
    if options.tensor_parallel is not None and options.tensor_parallel < 1:
        raise UsageError(f"tensor-parallel degree {options.tensor_parallel} is not positive")


def _select_metadata(checkpoint: Checkpoint, options: PlanOptions) -> MetadataSelection:
    if checkpoint.folder is None:
        return MetadataSelection((), ())
    return select_metadata(
        checkpoint.folder, checkpoint.listed, weights=checkpoint.files.keys(), allow_code=options.allow_code
    )


def build_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    options: PlanOptions | None = None,
    identity: SourceIdentity | None = None,
) -> Plan:
    """Plan everything from headers, config and recipe alone; nothing is written and no weight is read.

    Raises UnsupportedError, ConfigError, MissingTensorError, UnknownTensorError, ShapeError for the checkpoint;
    RecipeError, AlignmentError, LintError for the recipe.
    """
    options = options or PlanOptions()
    _check_options(options)
    family = family_of(checkpoint.config)
    scan = scan_source(checkpoint, family, parse_text_config(checkpoint.config))
    raise_first(scan.problems)
    tensors = plan_tensors(recipe, family.name, scan.tensors)
    is_changed = any(plan.fate in {Fate.QUANTIZED, Fate.CONVERTED} for plan in tensors)
    is_rewritten = is_changed or is_stale(checkpoint.config.quantization, tensors)
    quantization = build_quantization_config(tensors) if is_rewritten else checkpoint.config.quantization
    metadata = _select_metadata(checkpoint, options)
    copied = {file.name for file in metadata.copied}
    # A config alone says nothing of the files beside it: code that is allowed is taken to be there.
    is_code_taken = checkpoint.folder is None and options.allow_code
    notes = lint(
        tensors,
        quantization,
        recipe.engines,
        is_config_rewritten=is_rewritten,
        missing_code=() if is_code_taken else missing_code(checkpoint.config.raw, checkpoint.folder, copied),
        family=family.name,
    )
    raise_on_error(notes)
    _check_tensor_parallel(tensors, options.tensor_parallel or recipe.tensor_parallel)
    units = build_units(tensors, options.max_file_bytes)
    weight_map = {header.name: unit.file_name for unit in units for header in unit.layout}
    return Plan(
        source=checkpoint,
        identity=identity or SourceIdentity(),
        family=family.name,
        recipe=recipe,
        options=options,
        tensors=tensors,
        units=units,
        quantization=quantization,
        config_bytes=(render_config(checkpoint.config, quantization) if is_rewritten else checkpoint.config.raw_bytes),
        index_bytes=render_index(weight_map, sum(unit.data_size_bytes for unit in units)),
        metadata=metadata,
        notes=notes,
    )
