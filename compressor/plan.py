"""The plan: every tensor's fate and every output byte, complete before the first weight is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from memopt.compressor.alignment import COMMON_DEGREES, can_cut, cut_error
from memopt.compressor.calibration_options import CalibrationIdentity
from memopt.compressor.checkpoint.checkpoint import Checkpoint, raise_first
from memopt.compressor.checkpoint.model_config import CONFIG_NAME, render_config
from memopt.compressor.checkpoint.small_files import SkippedFile
from memopt.compressor.checkpoint.source_tensor import scan_source
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.kv_scale_plan import with_kv_scales
from memopt.compressor.ledger import ledger_line, ledger_row
from memopt.compressor.lint import EngineNote, lint, raise_on_error
from memopt.compressor.metadata_files import MetadataFile, MetadataSelection, missing_code, select_metadata
from memopt.compressor.quantization_config import build_quantization_config, is_stale
from memopt.compressor.ranks.layout import (
    EXPERT_PARALLEL,
    TENSOR_PARALLEL,
    LayoutChoice,
    Layouts,
    choose_layouts,
    rank_layout,
)
from memopt.compressor.recipe import Recipe
from memopt.compressor.source_identity import SourceIdentity
from memopt.compressor.tensor_plan import Fate, TensorPlan, plan_tensors
from memopt.compressor.units import DEFAULT_MAX_FILE_BYTES, Unit, build_units
from memopt.compressor.weight_indexes import hub_index, rank_indexes
from memopt.errors import UsageError
from memopt.manifests.rank_folders import RankLayout
from memopt.manifests.safetensors_header import DATA_ALIGNMENT_BYTES
from memopt.manifests.safetensors_index import INDEX_NAME


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may vary besides its recipe.

    `max_file_bytes`: about the largest weight file. `tensor_parallel`: must divide (None: the recipe's).
    `allow_code`: copy `.py` files. `release_name`: written into release.json (None: the recipe's name).
    `expert_parallel`: ranks that hold whole routed experts, everything else cut as for that many tensor-parallel ranks.
    `layout`: "hub", "tp" (rank files alone) or "both"; None is "both" with a degree above 1, else "hub".
    `calibration`: the data that calibrated formats follow from.
    """

    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    tensor_parallel: int | None = None
    allow_code: bool = False
    release_name: str | None = None
    expert_parallel: int | None = None
    layout: LayoutChoice | None = None
    calibration: CalibrationIdentity | None = None

    @property
    def layouts(self) -> Layouts:
        """What is written; UsageError as `choose_layouts`."""
        return choose_layouts(self.tensor_parallel, self.expert_parallel, self.layout)


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
    layouts: Layouts = field(default_factory=Layouts)

    @property
    def ranks(self) -> RankLayout | None:
        """The ranks that files are written for, None without any."""
        return self.layouts.ranks

    @property
    def writes_hub(self) -> bool:
        """Whether the hub files are written."""
        return self.layouts.writes_hub

    @property
    def checked_ranks(self) -> RankLayout:
        """The ranks that every tensor was checked to divide by, whether files are written for them or not."""
        return _checked_ranks(self.options, self.recipe)

    @property
    def tensor_parallel(self) -> int:
        """How many `checked_ranks` there are."""
        return self.checked_ranks.num_ranks

    def with_layouts(self, layouts: Layouts) -> Plan:
        """The same release in other layouts; the ranks must have been checked to divide it."""
        if layouts == self.layouts:
            return self
        units = tuple(replace(unit, ranks=layouts.ranks, writes_hub=layouts.writes_hub) for unit in self.units)
        return replace(self, units=units, layouts=layouts)

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

    @cached_property
    def made_files(self) -> dict[str, bytes]:
        """config.json and the index of every folder of weights, by name."""
        hub = {INDEX_NAME: self.index_bytes} if self.writes_hub else {}
        return {CONFIG_NAME: self.config_bytes} | hub | rank_indexes(self.units, self.ranks)

    @cached_property
    def small_files(self) -> tuple[MetadataFile, ...]:
        """config.json, the indexes and the copied files: written and checked before any weight."""
        made = [
            MetadataFile(name, len(raw), hashlib.sha256(raw).hexdigest(), "memopt")
            for name, raw in self.made_files.items()
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
            places = unit.places()
            for plan in unit.tensors:
                yield ledger_line(ledger_row(plan, places))
        for plan in self.tensors:
            if not plan.outputs:
                yield ledger_line(ledger_row(plan, None))


def _checked_ranks(options: PlanOptions, recipe: Recipe) -> RankLayout:
    """The ranks that the tensors must divide by: the options', else the recipe's."""
    asked = rank_layout(options.tensor_parallel, options.expert_parallel)
    return asked or RankLayout(TENSOR_PARALLEL, recipe.tensor_parallel)


def require_ranks(plans: Iterable[TensorPlan], ranks: RankLayout) -> None:
    """AlignmentError naming the first tensor that cannot be cut over `ranks`, and what could be for all of them."""
    stored = [plan for plan in plans if plan.outputs]
    for plan in stored:
        if not _can_cut(plan, ranks):
            degrees = [degree for degree in COMMON_DEGREES if _can_cut_all(stored, RankLayout(ranks.kind, degree))]
            raise cut_error(
                plan.source.spec,
                ranks,
                degrees,
                is_whole_experts_legal=_can_cut_all(stored, RankLayout(EXPERT_PARALLEL, ranks.num_ranks)),
                weights_per_scale=plan.int4_weights_per_scale,
                block=_float8_block(plan),
            )


def _can_cut_all(plans: Iterable[TensorPlan], ranks: RankLayout) -> bool:
    return all(_can_cut(plan, ranks) for plan in plans)


def _can_cut(plan: TensorPlan, ranks: RankLayout) -> bool:
    weights_per_scale, block = plan.int4_weights_per_scale, _float8_block(plan)
    return can_cut(plan.source.spec, ranks, weights_per_scale=weights_per_scale, block=block)


def _float8_block(plan: TensorPlan) -> tuple[int, int] | None:
    return plan.source.block if plan.is_float8 else None


def _check_options(options: PlanOptions) -> None:
    if options.max_file_bytes < DATA_ALIGNMENT_BYTES:
        raise UsageError(f"a file of at most {options.max_file_bytes} bytes holds nothing", remedy="use 1MB or more")


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
    layouts = options.layouts
    family = family_of(checkpoint.config)
    scan = scan_source(checkpoint, family, parse_text_config(checkpoint.config))
    raise_first(scan.problems)
    tensors = with_kv_scales(plan_tensors(recipe, family.name, scan.tensors), recipe)
    is_changed = any(plan.fate in {Fate.QUANTIZED, Fate.CONVERTED, Fate.CALIBRATED} for plan in tensors)
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
    require_ranks(tensors, _checked_ranks(options, recipe))
    units = build_units(tensors, options.max_file_bytes, layouts)
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
        index_bytes=hub_index(units),
        metadata=metadata,
        notes=notes,
        layouts=layouts,
    )
