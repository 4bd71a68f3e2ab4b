"""Where tensors lie in a weight file: one after the other, every one at a multiple of its item size."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.compressor.tensor_plan import OutputTensor
from memopt.manifests.dtypes import ITEM_SIZE_BYTES
from memopt.manifests.safetensors_header import DATA_ALIGNMENT_BYTES, TensorHeader


def is_ragged(output: OutputTensor) -> bool:
    """Whether what follows `output` in a file would not be aligned to 8 bytes."""
    return output.size_bytes % DATA_ALIGNMENT_BYTES != 0


def _order(output: OutputTensor) -> tuple[bool, int]:
    return is_ragged(output), -ITEM_SIZE_BYTES[output.dtype] if is_ragged(output) else 0


def place_tensors(outputs: Iterable[OutputTensor], start: int = 0) -> tuple[TensorHeader, ...]:
    """Offsets from byte `start` of the data on (a multiple of 8): in the given order, but ragged tensors last.

    Of these the widest type comes first, so that no tensor needs padding, which the format does not allow.
    """
    layout: list[TensorHeader] = []
    position = start
    for output in sorted(outputs, key=_order):
        end = position + output.size_bytes
        layout.append(TensorHeader(output.name, output.dtype, output.shape, position, end))
        position = end
    return tuple(layout)
