"""Logical tensors: a quantized weight and its scales, found together, told by the scale and not by a list."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor
from memopt.compressor.checkpoint.declared_quantization import declared_block
from memopt.compressor.families.family import Family
from memopt.compressor.families.roles import TensorSpec
from memopt.compressor.families.text_config import TextConfig
from memopt.errors import MemoptError, MissingTensorError, ShapeError, UnknownTensorError, UnsupportedError
from memopt.kernels.layout import CODES_PER_WORD

WEIGHT = ".weight"
SCALE_INV = ".weight_scale_inv"
SCALE = ".weight_scale"
PACKED = ".weight_packed"
SHAPE = ".weight_shape"
_COMPANIONS = (SCALE_INV, SCALE, PACKED, SHAPE)
_UNSUPPORTED = (".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".weight_scale_2")
FLOAT8_DTYPE = "F8_E4M3"
SCALE_DTYPES = {"F32", "BF16", "F8_E8M0", "U8"}
PACKED_SCALE_DTYPES = {"BF16"}
SHAPE_DTYPES = {"I32", "I64"}


class SourceFormat(StrEnum):
    """How a logical tensor is stored."""

    PLAIN = "plain"
    FP8_BLOCK = "fp8-block"
    FP8_CHANNEL = "fp8-channel"
    FP8_TENSOR = "fp8-tensor"
    INT4_PACKED = "int4-packed"
    # What calibration measures.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One logical tensor of a checkpoint.

    `weight`: the elements (FP8 bytes, packed INT4 words, or plain). `scale`, `packed_shape`: its companions or None.
    `block`: rows and columns that share one FP8 scale. `group_size`: weights that share one INT4 scale. A tensor that
    no checkpoint stores (format NONE) has no parts.
    """

    spec: TensorSpec
    format: SourceFormat
    weight: StoredTensor
    scale: StoredTensor | None = None
    packed_shape: StoredTensor | None = None
    block: tuple[int, int] | None = None
    group_size: int | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        if self.format is SourceFormat.NONE:
            return ()
        return tuple(part for part in (self.weight, self.scale, self.packed_shape) if part is not None)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def description(self) -> str:
        """The storage format in words: "fp8-block 128x128", "int4 group 32", or the dtype."""
        if self.format is SourceFormat.FP8_BLOCK and self.block is not None:
            return f"{self.format} {self.block[0]}x{self.block[1]}"
        if self.format is SourceFormat.INT4_PACKED:
            return f"int4 group {self.group_size}"
        return self.weight.dtype if self.format is SourceFormat.PLAIN else str(self.format)


@dataclass(frozen=True)
class SourceScan:
    """Every logical tensor in the family's order, and every tensor-level problem."""

    tensors: tuple[SourceTensor, ...]
    problems: tuple[MemoptError, ...]


def logical_name(name: str) -> str:
    """The logical tensor that a stored one belongs to: scales and packed words belong to their weight."""
    for suffix in _COMPANIONS:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + WEIGHT
    return name


def ceil_div(size: int, piece: int) -> int:
    return -(-size // piece)


def _check_scale_dtype(scale: StoredTensor, allowed: set[str]) -> None:
    if scale.dtype not in allowed:
        raise UnsupportedError(
            f"scale dtype {scale.dtype} is not supported",
            tensor=scale.name,
            file=scale.file,
            remedy=f"known: {', '.join(sorted(allowed))}",
        )


def _float8(spec: TensorSpec, weight: StoredTensor, scale: StoredTensor, block: tuple[int, int]) -> SourceTensor:
    """Which FP8 layout the scale's shape says; ShapeError if it fits none."""
    _check_scale_dtype(scale, SCALE_DTYPES)
    if weight.dtype != FLOAT8_DTYPE:
        raise ShapeError(f"has a scale but its dtype is {weight.dtype}", tensor=weight.name, file=weight.file)
    if len(weight.shape) != 2:
        raise ShapeError(f"FP8 weights have 2 dimensions, this has {weight.shape}", tensor=weight.name)
    rows, columns = weight.shape
    grid = (ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    is_inverse = scale.name.endswith(SCALE_INV)
    if is_inverse and scale.shape != grid:
        raise ShapeError(
            f"scale grid {scale.shape}, but {weight.shape} in blocks of {block} needs {grid}",
            tensor=scale.name,
            file=scale.file,
        )
    if not is_inverse and scale.shape in {(rows, 1), (rows,)}:
        return SourceTensor(spec, SourceFormat.FP8_CHANNEL, weight, scale, block=(1, columns))
    if scale.shape == grid:
        return SourceTensor(spec, SourceFormat.FP8_BLOCK, weight, scale, block=block)
    if scale.shape in {(), (1,), (1, 1)}:
        return SourceTensor(spec, SourceFormat.FP8_TENSOR, weight, scale, block=(rows, columns))
    raise ShapeError(
        f"scale shape {scale.shape} is neither per channel ({rows}, 1) nor per block {grid} of {weight.shape}",
        tensor=scale.name,
        file=scale.file,
    )


def _int4(spec: TensorSpec, parts: dict[str, StoredTensor]) -> SourceTensor:
    packed, scale, shape = parts[PACKED], parts.get(SCALE), parts.get(SHAPE)
    if scale is None or shape is None:
        missing = SCALE if scale is None else SHAPE
        raise MissingTensorError(
            f"packed words without {missing[1:]}", tensor=packed.name, remedy="fetch the checkpoint again"
        )
    _check_scale_dtype(scale, PACKED_SCALE_DTYPES)
    rows, columns = spec.shape
    if packed.dtype != "I32" or packed.shape != (rows, ceil_div(columns, CODES_PER_WORD)):
        raise ShapeError(
            f"packed words are {packed.dtype} {packed.shape}, {spec.shape} needs I32 "
            f"{(rows, ceil_div(columns, CODES_PER_WORD))}",
            tensor=packed.name,
            file=packed.file,
        )
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == rows else 0
    if groups == 0 or columns % groups or (columns // groups) % CODES_PER_WORD:
        raise ShapeError(
            f"scales are {scale.shape}, which does not divide {spec.shape} into groups",
            tensor=scale.name,
            file=scale.file,
        )
    if shape.dtype not in SHAPE_DTYPES or shape.shape != (2,):
        raise ShapeError(f"is {shape.dtype} {shape.shape}, must be two integers", tensor=shape.name, file=shape.file)
    return SourceTensor(spec, SourceFormat.INT4_PACKED, packed, scale, shape, group_size=columns // groups)


def _assemble(spec: TensorSpec, parts: dict[str, StoredTensor], block: tuple[int, int]) -> SourceTensor:
    weight = parts.get(WEIGHT)
    if PACKED in parts:
        if weight is not None or SCALE_INV in parts:
            raise ShapeError("is stored both packed and not", tensor=spec.name)
        if len(spec.shape) != 2:
            raise ShapeError(f"packed weights have 2 dimensions, this has {spec.shape}", tensor=spec.name)
        return _int4(spec, parts)
    if weight is None:
        orphan = next(iter(parts.values()))
        raise MissingTensorError("a scale without its weight", tensor=orphan.name, file=orphan.file)
    if SHAPE in parts or (SCALE in parts and SCALE_INV in parts):
        raise ShapeError(f"has {sorted(part.name for part in parts.values())}: two formats at once", tensor=spec.name)
    if weight.shape != spec.shape:
        raise ShapeError(
            f"shape {weight.shape}, config.json makes it {spec.shape}", tensor=weight.name, file=weight.file
        )
    scale = parts.get(SCALE_INV) or parts.get(SCALE)
    if scale is not None:
        return _float8(spec, weight, scale, block)
    if weight.dtype.startswith("F8"):
        raise MissingTensorError(
            f"{weight.dtype} weight without its scale",
            tensor=weight.name,
            file=weight.file,
            remedy="an FP8 weight is useless without weight_scale_inv or weight_scale; fetch the checkpoint again",
        )
    return SourceTensor(spec, SourceFormat.PLAIN, weight)


def scan_source(checkpoint: Checkpoint, family: Family, text: TextConfig) -> SourceScan:
    """Match every stored tensor with what the family expects; missing and unknown ones become named problems."""
    stored: dict[str, dict[str, StoredTensor]] = {}
    problems: list[MemoptError] = []
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(_UNSUPPORTED):
            problems.append(UnsupportedError("asymmetric, act-order and FP4 weights are not supported", tensor=name))
            continue
        base = logical_name(name)
        suffix = name.removeprefix(base.removesuffix(WEIGHT)) if base.endswith(WEIGHT) else WEIGHT
        stored.setdefault(base, {})[suffix] = tensor
    block = declared_block(checkpoint.config)
    tensors: list[SourceTensor] = []

    def take(spec: TensorSpec, parts: dict[str, StoredTensor]) -> None:
        try:
            tensors.append(_assemble(spec, parts, block))
        except MemoptError as problem:
            problems.append(problem)

    for spec in family.expected(text):
        parts = stored.pop(spec.name, None)
        if parts is not None:
            take(spec, parts)
        elif spec.is_required:
            problems.append(
                MissingTensorError(
                    f"{family.name} expects it in this checkpoint ({spec.role})",
                    tensor=spec.name,
                    remedy="fetch the missing shard, or correct config.json",
                )
            )
    for name, parts in sorted(stored.items()):
        first = parts.get(WEIGHT) or next(iter(parts.values()))
        extra = family.extra(name, first.shape)
        if extra is not None:
            take(extra, parts)
        else:
            problems.append(
                UnknownTensorError(
                    f"{family.name} does not know it",
                    tensor=first.name,
                    file=first.file,
                    remedy="remove it, or report the model: nothing is dropped in silence",
                )
            )
    return SourceScan(tuple(tensors), tuple(problems))
