"""What a stored part must hold to be copied or expanded: finite numbers, and the shape that config.json gives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.finite import first_non_finite
from memopt.compressor.checkpoint.source_tensor import SourceFormat, SourceTensor
from memopt.errors import NonFiniteError, ShapeError
from memopt.kernels.layout import BF16_SHIFT, INT4_CODE_MIN
from memopt.manifests.dtypes import ITEM_SIZE_BYTES

# |-8|: an INT4 scale times it must be finite.
INT4_LARGEST_CODE = -INT4_CODE_MIN
UE8M0_DTYPES = {"F8_E8M0", "U8"}
SHAPE_NUMPY = {"I32": np.int32, "I64": np.int64}
# Two numbers of 64 bits: a multiple of every item's size, too.
PACKED_SHAPE_BYTES = 16
_REMEDY = "compare the source file's SHA-256 with the publisher's and download it again"


def check_packed_shape(part: StoredTensor, data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> None:
    stored = data.view(SHAPE_NUMPY[part.dtype]).tolist()
    if tuple(stored) != shape:
        raise ShapeError(
            f"holds {stored}, config.json makes it {list(shape)}",
            tensor=part.name,
            file=part.file,
            remedy=_REMEDY,
        )


def check_copied(source: SourceTensor, part: StoredTensor, data: npt.NDArray[np.uint8], offset: int) -> None:
    """What is refused when a tensor is expanded is refused when it is copied too. `offset`: of `data`, in bytes."""
    if part is source.packed_shape:
        check_packed_shape(part, data, source.spec.shape)
        return
    is_scale = part is source.scale
    dtype = "F8_E8M0" if is_scale and part.dtype in UE8M0_DTYPES else part.dtype
    bad = first_non_finite(data, dtype)
    if bad is not None:
        raise NonFiniteError(
            f"element {offset // ITEM_SIZE_BYTES[part.dtype] + bad:,} is not a finite number",
            tensor=part.name,
            file=part.file,
            remedy=_REMEDY,
        )
    if is_scale and source.format is SourceFormat.INT4_PACKED:
        require_finite(bf16_values(data.view(np.uint16)), part, INT4_LARGEST_CODE)


def bf16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << BF16_SHIFT).view(np.float32)


def require_finite(scale: npt.NDArray[np.float32], part: StoredTensor, largest_code: float = 1.0) -> None:
    """NonFiniteError naming the first scale that is not finite, or that makes `largest_code` infinite."""
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(scale * np.float32(largest_code)))
    if bad.size:
        raise NonFiniteError(
            f"scale {int(bad[0])} of {scale.size} is {scale.reshape(-1)[bad[0]]}",
            tensor=part.name,
            file=part.file,
            remedy=_REMEDY,
        )
