"""What config.json says of the quantized weights; the tensors themselves say what is true (source_tensor.py)."""

from __future__ import annotations

from typing import Any

from memopt.compressor.checkpoint.model_config import CONFIG_NAME, ModelConfig
from memopt.errors import ConfigError
from memopt.kernels.layout import E4M3_BITS, FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS, INT4_BITS

FP8 = "FP8"
INT4 = "INT4"
COMPRESSED_TENSORS = "compressed-tensors"
# Sanity bound, far above any tensor: a config comes from outside.
MAX_BLOCK = 2**31


def weight_arguments(quantization: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The `weights` tables of a compressed-tensors block's groups; what is no such table is left out."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return ()
    tables = (group.get("weights") for group in groups.values() if isinstance(group, dict))
    return tuple(table for table in tables if isinstance(table, dict))


def declared_formats(quantization: dict[str, Any] | None) -> frozenset[str]:
    """The weight formats that the block promises: FP8, INT4, or another one in its own words."""
    if quantization is None:
        return frozenset()
    method = quantization.get("quant_method")
    if method == "fp8":
        return frozenset({FP8})
    if method != COMPRESSED_TENSORS:
        return frozenset({str(method)})
    known = {f"float{E4M3_BITS}": FP8, f"int{INT4_BITS}": INT4}
    kinds = [(table.get("type"), table.get("num_bits")) for table in weight_arguments(quantization)]
    named = [f"{kind}{bits}" for kind, bits in kinds if isinstance(kind, str) and isinstance(bits, int)]
    return frozenset(known.get(name, name) for name in named)


def declared_block(config: ModelConfig) -> tuple[int, int]:
    """The FP8 block that config.json declares, 128 x 128 if it is silent; ConfigError if it is no block.

    `weight_block_size` (quant_method fp8), or `block_structure` of a compressed-tensors group (memopt's mixed form).
    """
    quantization = config.quantization or {}
    named = [("weight_block_size", quantization.get("weight_block_size"))]
    named += [("block_structure", table.get("block_structure")) for table in weight_arguments(quantization)]
    blocks: set[tuple[int, int]] = set()
    for key, value in named:
        if value is None:
            continue
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not all(type(size) is int and 0 < size <= MAX_BLOCK for size in value):
            raise ConfigError(f"{key} must be two positive integers", file=CONFIG_NAME)
        blocks.add((value[0], value[1]))
    if len(blocks) > 1:
        raise ConfigError(f"declares FP8 blocks {sorted(blocks)} at once; one is read", file=CONFIG_NAME)
    return blocks.pop() if blocks else (FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS)
