"""What every kernel demands of its input, checked once, and the error for a weight that is not a number."""

from __future__ import annotations

from math import gcd

from memopt.errors import AlignmentError, ContentError, NonFiniteError, ShapeError, UsageError
from memopt.kernels.int4_spec import BlockShape, Int4Spec
from memopt.kernels.layout import BF16_BITS, CODES_PER_WORD, E4M3_BITS, INT4_GROUP_SIZES


class NonFiniteWeightError(NonFiniteError):
    """The first weight, in row-major order, that is NaN or infinite.

    `row` and `column` count from the start of the chunk that the kernel was given: a caller that reads a tensor in
    chunks adds the chunk's first row with `offset_row`. `bits` is the stored pattern, `scale` its block's (None: BF16).
    """

    def __init__(self, row: int, column: int, bits: int, scale: float | None, *, tensor: str | None = None) -> None:
        stored = f"BF16 bits 0x{bits:04X}" if scale is None else f"FP8 bits 0x{bits:02X} with scale {scale!r}"
        super().__init__(
            f"the weight at row {row}, column {column} is not a finite number ({stored})",
            remedy="compare the source file's SHA-256 with the publisher's and download it again",
            tensor=tensor,
        )
        self.row = row
        self.column = column
        self.bits = bits
        self.scale = scale

    def offset_row(self, rows: int, *, tensor: str | None = None) -> NonFiniteWeightError:
        """The same error, `rows` further down and with the tensor's name."""
        return NonFiniteWeightError(
            self.row + rows, self.column, self.bits, self.scale, tensor=tensor if tensor is not None else self.tensor
        )


def check_source(
    shape: tuple[int, ...], item_bits: int, scale_shape: tuple[int, ...] | None, block: tuple[int, int] | None
) -> BlockShape:
    """The block shape to use for a chunk [R, C]; (R, C) for a BF16 source, which has no scale.

    `item_bits` is 8 (e4m3fn) or 16 (BF16); `scale_shape` must be [ceil(R / rows), ceil(C / columns)] for FP8 and None
    for BF16. Raises ShapeError when they do not fit, UsageError for a block no kernel handles.
    """
    if len(shape) != 2:
        raise ShapeError(f"a weight has {len(shape)} dimensions, but 2 are needed (out, in)", remedy="flatten it first")
    rows, columns = shape
    if item_bits == BF16_BITS:
        if scale_shape is not None:
            raise ShapeError(
                f"a BF16 weight {list(shape)} came with a block scale {list(scale_shape)}",
                remedy="BF16 weights have none: pass None, or the FP8 bits as uint8",
            )
        return BlockShape(max(rows, 1), max(columns, 1))
    if item_bits != E4M3_BITS:
        raise ShapeError(f"a weight of {item_bits} bits is neither FP8 (uint8) nor BF16 (uint16)")
    if scale_shape is None or block is None:
        raise ShapeError(f"an FP8 weight {list(shape)} came without its block scale", remedy="pass scale and block")
    if block[0] < 1 or block[1] < 1:
        raise UsageError(f"a block of {block[0]} x {block[1]} weights is empty", remedy="use 1 or more each way")
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale_shape) != wanted:
        raise ShapeError(
            f"a block scale is {list(scale_shape)}, but a weight {list(shape)} in blocks of {block[0]} x {block[1]} "
            f"needs {list(wanted)}",
            remedy="check weight_block_size in the source's config.json",
        )
    if block[1] < columns and block[1] % CODES_PER_WORD:
        raise UsageError(
            f"blocks of {block[1]} columns are not a multiple of {CODES_PER_WORD}", remedy="use 128, or whole rows"
        )
    return BlockShape(*block)


def check_group(columns: int, spec: Int4Spec) -> int:
    """The group length in weights for rows of `columns`: `spec.group_size`, or the whole row for channel scales.

    Raises UsageError for a size that no engine reads, AlignmentError when it does not divide the row.
    """
    if spec.group_size is not None and spec.group_size not in INT4_GROUP_SIZES:
        raise UsageError(
            f"group size {spec.group_size} is not one that engines read",
            remedy=f"use one of {', '.join(map(str, INT4_GROUP_SIZES))}, or None for one scale a row",
        )
    if spec.scale_search not in ("absmax", "mse", "mse-signed"):
        raise UsageError(f"scale search {spec.scale_search!r} is unknown", remedy="use absmax, mse or mse-signed")
    if spec.error_norm not in ("2", "2.4"):
        raise UsageError(f"error norm {spec.error_norm!r} is unknown", remedy='use "2" or "2.4"')
    length = spec.group_size or CODES_PER_WORD
    if columns == 0 or columns % length:
        raise AlignmentError(
            f"rows of {columns} weights are not a multiple of {length}",
            remedy="choose a smaller group size, or keep this tensor out of INT4",
        )
    return spec.group_size or columns


def check_importance(shape: tuple[int, ...], dtype: str, is_positive: bool, columns: int, spec: Int4Spec) -> None:
    """Raises unless an importance of `shape` and `dtype` fits rows of `columns` and the search of `spec`.

    `is_positive`: every element is finite and above zero. ShapeError, ContentError for an element that is not
    positive, UsageError for a search that it does not go with: absmax searches nothing, and norm 2.4 is no square.
    """
    if tuple(shape) != (columns,) or "float32" not in dtype:
        raise ShapeError(
            f"the importance is {dtype} {list(shape)}, but rows of {columns} weights need float32 [{columns}]"
        )
    if spec.scale_search == "absmax" or spec.error_norm != "2":
        raise UsageError(
            f"an importance weighs squared errors, but scale search {spec.scale_search} with norm {spec.error_norm} "
            "was asked for",
            remedy='use mse or mse-signed, and norm "2"',
        )
    if not is_positive:
        raise ContentError(
            "an importance is zero, negative, NaN or infinite",
            remedy="a column that no token reached counts as much as the others (calibrate/module_statistics.py)",
        )


def segment_length(group: int, columns: int, block: BlockShape) -> int:
    """Weights in a row that surely share both their group and their block scale, counted from a multiple of it."""
    return group if block.columns >= columns else gcd(group, block.columns)


def check_packed(packed_shape: tuple[int, ...], scale_shape: tuple[int, ...], group_size: int | None) -> int:
    """The group length for packed codes [R, C / 8] with scales [R, G]. Raises ShapeError when they do not fit."""
    if len(packed_shape) != 2 or len(scale_shape) != 2:
        raise ShapeError(f"packed codes {list(packed_shape)} and scales {list(scale_shape)} need 2 dimensions each")
    columns = packed_shape[1] * CODES_PER_WORD
    group = group_size or columns
    if columns == 0:
        raise ShapeError(f"packed codes {list(packed_shape)} have no columns")
    if group % CODES_PER_WORD or columns % group or tuple(scale_shape) != (packed_shape[0], columns // group):
        raise ShapeError(
            f"scales are {list(scale_shape)}, but codes of {packed_shape[0]} rows and {columns} columns in groups of "
            f"{group} need [{packed_shape[0]}, {columns / group:g}]",
            remedy="pass the group size that the codes were rounded with",
        )
    return group
