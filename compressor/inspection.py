"""What a checkpoint is, told from its headers: family, formats by role, sizes, TP degrees, problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memopt.compressor.alignment import COMMON_DEGREES, divides
from memopt.compressor.checkpoint.checkpoint import CheckpointScan
from memopt.compressor.checkpoint.declared_quantization import FP8, INT4, declared_formats
from memopt.compressor.checkpoint.model_config import CONFIG_NAME
from memopt.compressor.checkpoint.source_tensor import SourceFormat, SourceScan, SourceTensor, scan_source
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.recipe import DEFAULT_RECIPES
from memopt.compressor.source_identity import SourceIdentity
from memopt.compressor.tensor_plan import FLOAT8_FORMATS
from memopt.errors import ConfigError, MemoptError


@dataclass(frozen=True)
class RoleFormat:
    """Tensors of one role in one storage format. `num_weights` counts elements, scales not counted."""

    role: str
    format: str
    num_tensors: int
    num_weights: int
    size_bytes: int


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: stable code, message, and what to do."""

    code: str
    message: str


@dataclass(frozen=True)
class Inspection:
    """What `memopt inspect` prints. Sizes in bytes, headers not counted.

    `num_stored_tensors` counts names in the files; `num_weights` elements of logical tensors without their scales;
    `num_elements` all stored elements, scales too. `tensor_parallel_degrees`: those that divide it as it is.
    """

    family: str
    model_type: str
    architecture: str | None
    repository: str | None
    commit: str | None
    num_files: int
    num_stored_tensors: int
    num_elements: int
    num_weights: int
    size_bytes: int
    num_layers: int
    num_mtp_layers: int
    roles: tuple[RoleFormat, ...]
    tensor_parallel_degrees: tuple[int, ...]
    suggested_recipe: str | None
    problems: tuple[Problem, ...]


def _num_weights(source: SourceTensor) -> int:
    total = 1
    for size in source.spec.shape:
        total *= size
    return total


def _roles(sources: tuple[SourceTensor, ...]) -> tuple[RoleFormat, ...]:
    rows: dict[tuple[str, str], list[int]] = {}
    for source in sources:
        row = rows.setdefault((str(source.spec.role), source.description), [0, 0, 0])
        row[0] += 1
        row[1] += _num_weights(source)
        row[2] += source.size_bytes
    return tuple(
        RoleFormat(role, form, *row) for (role, form), row in sorted(rows.items(), key=lambda item: -item[1][2])
    )


def _degrees(sources: tuple[SourceTensor, ...]) -> tuple[int, ...]:
    return tuple(
        degree
        for degree in COMMON_DEGREES
        if all(
            divides(
                source.spec,
                degree,
                weights_per_scale=source.group_size,
                block=source.block if source.format in FLOAT8_FORMATS else None,
            )
            for source in sources
        )
    )


def _config_problems(quantization: dict[str, Any] | None, sources: tuple[SourceTensor, ...]) -> tuple[ConfigError, ...]:
    """Where config.json and the tensors tell of different formats; the tensors are right, engines follow the config."""
    names = {SourceFormat.PLAIN: None, SourceFormat.INT4_PACKED: INT4}
    stored = {names.get(source.format, FP8) for source in sources} - {None}
    declared = declared_formats(quantization)
    told = " and ".join(sorted(declared)) or "no quantized"
    found = " and ".join(sorted(map(str, stored))) or "none"
    if declared == stored:
        return ()
    return (
        ConfigError(
            f"declares {told} weights, the files hold {found}",
            file=CONFIG_NAME,
            remedy="correct quantization_config; a memopt release is described by its tensors",
        ),
    )


def _architecture(scan: CheckpointScan) -> str | None:
    architectures = scan.checkpoint.config.raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else None


def inspect_scan(scan: CheckpointScan, identity: SourceIdentity) -> Inspection:
    """Inspect headers that were read already. UnsupportedError, ConfigError if the config cannot be understood."""
    checkpoint = scan.checkpoint
    family = family_of(checkpoint.config)
    text = parse_text_config(checkpoint.config)
    sources: SourceScan = scan_source(checkpoint, family, text)
    # A shard that cannot be read would repeat itself as one missing tensor a line.
    problems: tuple[MemoptError, ...] = scan.problems or sources.problems
    recipe = None if problems else _suggested(family.name, sources)
    problems = problems or _config_problems(checkpoint.config.quantization, sources.tensors)
    elements = 0
    for tensor in checkpoint.tensors.values():
        count = 1
        for size in tensor.shape:
            count *= size
        elements += count
    return Inspection(
        family=family.name,
        model_type=checkpoint.config.model_type,
        architecture=_architecture(scan),
        repository=identity.repository,
        commit=identity.commit,
        num_files=len(checkpoint.files),
        num_stored_tensors=len(checkpoint.tensors),
        num_elements=elements,
        num_weights=sum(_num_weights(source) for source in sources.tensors),
        size_bytes=checkpoint.size_bytes,
        num_layers=text.num_hidden_layers,
        num_mtp_layers=text.num_nextn_predict_layers,
        roles=_roles(sources.tensors),
        tensor_parallel_degrees=_degrees(sources.tensors),
        suggested_recipe=recipe,
        problems=tuple(Problem(problem.code, str(problem)) for problem in problems),
    )


def _suggested(family: str, sources: SourceScan) -> str | None:
    if any(source.description.startswith("int4") for source in sources.tensors):
        return "kimi-k2.6" if family.startswith("kimi") else "dequantize"
    return DEFAULT_RECIPES.get(family)
