"""A checkpoint made from its config alone: the names, dtypes and shapes that the family publishes, and no weights."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor, WeightFile
from memopt.compressor.checkpoint.declared_quantization import declared_block
from memopt.compressor.checkpoint.model_config import ModelConfig
from memopt.compressor.checkpoint.source_tensor import (
    PACKED,
    SCALE,
    SCALE_INV,
    SHAPE,
    WEIGHT,
    SourceFormat,
    ceil_div,
)
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.families.text_config import parse_text_config
from memopt.errors import UnsupportedError
from memopt.kernels.layout import CODES_PER_WORD, INT4_BITS, INT4_GROUP_SIZES
from memopt.manifests.dtypes import tensor_size_bytes

SKELETON_FILE = "model.safetensors"


def published_format(config: ModelConfig) -> tuple[SourceFormat, int]:
    """How quantized weights are stored according to config.json, and the INT4 group size (0 for other formats)."""
    quantization = config.quantization
    if quantization is None:
        return SourceFormat.PLAIN, 0
    if quantization.get("quant_method") == "fp8":
        return SourceFormat.FP8_BLOCK, 0
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if isinstance(weights, dict):
        if weights.get("type") == "float" and weights.get("strategy") == "channel":
            return SourceFormat.FP8_CHANNEL, 0
        group_size = weights.get("group_size")
        is_int4 = weights.get("type") == "int" and weights.get("num_bits") == INT4_BITS
        if is_int4 and isinstance(group_size, int) and group_size in INT4_GROUP_SIZES:
            return SourceFormat.INT4_PACKED, group_size
    raise UnsupportedError(
        f"quantization {quantization.get('quant_method')!r} {quantization.get('format')!r} is not known",
        file="config.json",
        remedy="known: fp8 blocks, compressed-tensors FP8 channels, compressed-tensors INT4 groups of 32, 64 or 128",
    )


def _parts(
    spec: TensorSpec, form: SourceFormat, group_size: int, block: tuple[int, int]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each stored tensor of one logical tensor."""
    base = spec.name.removesuffix(WEIGHT)
    is_int4 = form is SourceFormat.INT4_PACKED and spec.role is Role.ROUTED_EXPERT
    is_float8 = form in {SourceFormat.FP8_BLOCK, SourceFormat.FP8_CHANNEL} and spec.is_published_quantized
    if is_int4:
        rows, columns = spec.shape
        yield base + PACKED, "I32", (rows, ceil_div(columns, CODES_PER_WORD))
        yield base + SCALE, "BF16", (rows, columns // group_size)
        yield base + SHAPE, "I64", (2,)
    elif is_float8:
        rows, columns = spec.shape
        yield spec.name, "F8_E4M3", spec.shape
        if form is SourceFormat.FP8_BLOCK:
            yield base + SCALE_INV, "F32", (ceil_div(rows, block[0]), ceil_div(columns, block[1]))
        else:
            yield base + SCALE, "F32", (rows, 1)
    else:
        yield spec.name, "F32" if spec.role is Role.ROUTER_BIAS else "BF16", spec.shape


def skeleton_checkpoint(config: ModelConfig) -> Checkpoint:
    """The checkpoint that `config` describes, as one virtual file without a folder.

    Raises UnsupportedError for an unknown family or quantization, ConfigError for missing sizes.
    """
    family, text = family_of(config), parse_text_config(config)
    form, group_size = published_format(config)
    block = declared_block(config)
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for spec in family.expected(text):
        if spec.role is Role.LM_HEAD and text.tie_word_embeddings:
            continue
        for name, dtype, shape in _parts(spec, form, group_size, block):
            size_bytes = tensor_size_bytes(dtype, shape)
            tensors[name] = StoredTensor(name, SKELETON_FILE, dtype, shape, position, size_bytes)
            position += size_bytes
    return Checkpoint(None, config, {SKELETON_FILE: WeightFile(SKELETON_FILE, position, "")}, tensors)
