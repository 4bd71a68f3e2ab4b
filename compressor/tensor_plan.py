"""Every tensor's fate: what becomes of it, and the tensors that it gives, from headers and recipe alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memopt.compressor.checkpoint.source_tensor import (
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    SourceFormat,
    SourceTensor,
)
from memopt.compressor.families.roles import Role
from memopt.compressor.recipe import Int4Format, KeepFormat, NativeInt4Format, Recipe
from memopt.errors import AlignmentError, RecipeError, UnsupportedError
from memopt.kernels.layout import CODES_PER_WORD, INT4_GROUP_SIZES
from memopt.manifests.dtypes import tensor_size_bytes

# On disk an int64 pair (out, in), as compressed-tensors writes it.
SHAPE_DTYPE = "I64"
CONVERTIBLE_DTYPES = {"BF16", "F8_E4M3"}
# A plain tensor of such a type is not BF16, and making it so would round it without anyone asking.
NOT_BF16_DTYPES = {"F16", "F64"}
FLOAT8_FORMATS = {SourceFormat.FP8_BLOCK, SourceFormat.FP8_CHANNEL, SourceFormat.FP8_TENSOR}
# Scale dtypes that vLLM's compressed-tensors FP8 loader takes as they are.
KEPT_SCALE_DTYPES = {"F32", "BF16"}


class Fate(StrEnum):
    """What becomes of a source tensor, or where a tensor without one comes from: exactly one of these."""

    QUANTIZED = "quantized"
    CONVERTED = "converted"
    COPIED = "copied"
    DROPPED = "dropped"
    # Made from calibration data; no source tensor becomes it.
    CALIBRATED = "calibrated"


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return tensor_size_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One logical tensor: source, fate, outputs; `int4` when it is quantized, `reason` when it is dropped."""

    source: SourceTensor
    fate: Fate
    outputs: tuple[OutputTensor, ...]
    int4: Int4Format | None = None
    reason: str = ""

    @property
    def output_format(self) -> str:
        """The stored form after the work, in words."""
        if self.fate is Fate.DROPPED:
            return "none"
        if self.fate is Fate.CALIBRATED:
            return self.outputs[0].dtype
        if self.int4 is not None:
            return f"int4 group {self.int4.group_size}"
        return "BF16" if self.fate is Fate.CONVERTED else self.source.description

    @property
    def is_int4(self) -> bool:
        return self.int4 is not None or (self.fate is Fate.COPIED and self.source.format is SourceFormat.INT4_PACKED)

    @property
    def int4_weights_per_scale(self) -> int | None:
        """Weights that share one INT4 scale, None if the output is not INT4."""
        if self.int4 is not None:
            return self.int4.weights_per_scale or self.source.spec.shape[-1]
        return self.source.group_size if self.is_int4 else None

    @property
    def int4_group_size(self) -> int | None:
        """The INT4 group in weights; None for one scale a row."""
        if self.int4 is not None:
            return self.int4.weights_per_scale
        is_channel = self.source.group_size == self.source.spec.shape[-1]
        return None if is_channel else self.source.group_size

    @property
    def is_float8(self) -> bool:
        return self.fate is Fate.COPIED and self.source.format in FLOAT8_FORMATS


def _quantized(source: SourceTensor, target: Int4Format) -> TensorPlan:
    spec = source.spec
    if len(spec.shape) != 2 or not spec.is_linear:
        raise RecipeError(
            f"only Linear weights can be INT4; this is {spec.role} {spec.shape}",
            tensor=spec.name,
            remedy="give this role bf16 or keep",
        )
    if source.weight.dtype not in CONVERTIBLE_DTYPES:
        raise UnsupportedError(
            f"{source.weight.dtype} cannot be quantized, only FP8 and BF16", tensor=spec.name, file=source.weight.file
        )
    rows, columns = spec.shape
    group_size = target.weights_per_scale or columns
    if columns % group_size or group_size % CODES_PER_WORD:
        legal = [size for size in INT4_GROUP_SIZES if columns % size == 0]
        raise AlignmentError(
            f"{columns} columns are not a multiple of group {group_size}",
            tensor=spec.name,
            remedy=f"legal groups: {', '.join(map(str, legal)) or 'none'}",
        )
    base = spec.name.removesuffix(WEIGHT)
    outputs = (
        OutputTensor(base + PACKED, "I32", (rows, columns // CODES_PER_WORD)),
        OutputTensor(base + SCALE, "BF16", (rows, columns // group_size)),
        OutputTensor(base + SHAPE, SHAPE_DTYPE, (2,)),
    )
    return TensorPlan(source, Fate.QUANTIZED, outputs, target)


def _native_int4(source: SourceTensor, target: NativeInt4Format) -> TensorPlan:
    wanted = source.spec.shape[-1] if target.group_size == "channel" else target.group_size
    if source.format is SourceFormat.INT4_PACKED and source.group_size == wanted:
        return _copied(source)
    raise RecipeError(
        f"is {source.description}, but the recipe demands that it is INT4 in groups of {wanted} already",
        tensor=source.spec.name,
        file=source.weight.file,
        remedy="choose a recipe that quantizes (`memopt inspect` suggests one), or `keep`",
    )


def _require_readable_block(source: SourceTensor) -> None:
    """UnsupportedError for FP8 blocks that no kernel expands: a block that cuts a word of eight codes."""
    if source.format is not SourceFormat.FP8_BLOCK or source.block is None:
        return
    rows, columns = source.block
    if columns < source.spec.shape[1] and columns % CODES_PER_WORD:
        raise UnsupportedError(
            f"FP8 blocks of {rows}x{columns} cannot be read: {columns} columns are not a multiple of {CODES_PER_WORD}",
            tensor=source.spec.name,
            file=source.weight.file,
            remedy="check weight_block_size in config.json; `keep` copies such blocks",
        )


def _copied(source: SourceTensor) -> TensorPlan:
    outputs = tuple(OutputTensor(part.name, part.dtype, part.shape) for part in source.parts)
    return TensorPlan(source, Fate.COPIED, outputs)


def plan_tensor(source: SourceTensor, recipe: Recipe) -> TensorPlan:
    """The fate of one tensor; RecipeError, AlignmentError or UnsupportedError naming it if the recipe cannot be met."""
    target = recipe.format_of(source.spec)
    if isinstance(target, KeepFormat):
        return _copied(source)
    if source.spec.role is Role.BUFFER:
        return TensorPlan(source, Fate.DROPPED, (), reason="a buffer that every engine computes from config.json")
    if isinstance(target, NativeInt4Format):
        return _native_int4(source, target)
    _require_readable_block(source)
    if isinstance(target, Int4Format):
        if source.format is not SourceFormat.INT4_PACKED:
            return _quantized(source, target)
        wanted = target.weights_per_scale or source.spec.shape[1]
        if source.group_size != wanted:
            raise RecipeError(
                f"is INT4 in groups of {source.group_size} already and is never requantized to {wanted}",
                tensor=source.spec.name,
                remedy=f"use group_size {source.group_size}, or keep",
            )
        return _copied(source)
    if source.format is SourceFormat.PLAIN:
        if source.weight.dtype in NOT_BF16_DTYPES:
            raise UnsupportedError(
                f"{source.weight.dtype} does not become BF16: that would round it",
                tensor=source.spec.name,
                file=source.weight.file,
                remedy="give this role `keep`, or convert the checkpoint to BF16 first",
            )
        return _copied(source)
    return TensorPlan(source, Fate.CONVERTED, (OutputTensor(source.spec.name, "BF16", source.spec.shape),))


def with_compressed_tensors_names(plan: TensorPlan) -> TensorPlan:
    """The same plan with an FP8 scale under compressed-tensors' name and in its shape, its values untouched.

    vLLM 0.32 takes kept FP8 beside INT4 only in that spelling (docs/formats.md, "Mixed checkpoints"): `weight_scale`,
    [out, 1] for one scale a channel, [1] for one a tensor.
    """
    scale = plan.source.scale
    if not plan.is_float8 or scale is None:
        return plan
    if scale.dtype not in KEPT_SCALE_DTYPES:
        raise UnsupportedError(
            f"{scale.dtype} scales cannot stay FP8 in a compressed-tensors checkpoint",
            tensor=scale.name,
            remedy="use a recipe whose default is bf16",
        )
    shapes = {SourceFormat.FP8_CHANNEL: (plan.source.spec.shape[0], 1), SourceFormat.FP8_TENSOR: (1,)}
    weight = plan.outputs[0]
    name = plan.source.spec.name.removesuffix(WEIGHT) + SCALE
    renamed = OutputTensor(name, scale.dtype, shapes.get(plan.source.format, scale.shape))
    return TensorPlan(plan.source, plan.fate, (weight, renamed))


def check_recipe_fits(recipe: Recipe, family: str, sources: tuple[SourceTensor, ...]) -> None:
    """RecipeError if the recipe is for another family or if one of its rules matches no tensor."""
    if family not in recipe.families:
        raise RecipeError(
            f"recipe {recipe.name} is for {', '.join(recipe.families)}, the checkpoint is {family}",
            remedy="choose a recipe of that family",
        )
    unused = set(range(len(recipe.rules)))
    for source in sources:
        for number, rule in enumerate(recipe.rules):
            if rule.matches(source.spec):
                unused.discard(number)
                break
        if not unused:
            return
    first = recipe.rules[min(unused)]
    raise RecipeError(
        f"recipe {recipe.name}: the rule for {first.describe()} matches no tensor of this checkpoint",
        remedy="correct or remove the rule; a rule before it may take its tensors",
    )


def plan_tensors(recipe: Recipe, family: str, sources: tuple[SourceTensor, ...]) -> tuple[TensorPlan, ...]:
    """Every tensor's plan, in the family's order; raises as `plan_tensor` and `check_recipe_fits`."""
    check_recipe_fits(recipe, family, sources)
    plans = tuple(plan_tensor(source, recipe) for source in sources)
    if any(plan.fate in {Fate.QUANTIZED, Fate.CONVERTED} for plan in plans):
        plans = tuple(with_compressed_tensors_names(plan) for plan in plans)
    return plans
