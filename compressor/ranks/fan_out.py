"""One tensor's way into its files: chunks of the whole come in, every rank's slice goes out, and all are hashed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memopt.compressor.checkpoint.writer import FAULT_IN_MEMOPT, UnitFile
from memopt.compressor.ranks.cut import Cut, CutKind
from memopt.compressor.tensor_plan import OutputTensor
from memopt.errors import SizeMismatchError
from memopt.manifests.dtypes import ITEM_SIZE_BYTES, tensor_size_bytes


def shape_bytes(dtype: str, shape: Sequence[int]) -> bytes:
    """A `weight_shape` tensor's bytes; `dtype`: I32 or I64."""
    return b"".join(size.to_bytes(ITEM_SIZE_BYTES[dtype], "little") for size in shape)


class FanOut:
    """Takes the bytes of tensor `output`, chunks of whole rows in order, and hands each rank's part to its file.

    `rank_files`: the files of the ranks that have it, by rank. They hash slices; what is the same as the whole is
    hashed by the caller alone.
    """

    def __init__(self, output: OutputTensor, cut: Cut, rank_files: Sequence[UnitFile]) -> None:
        self._output = output
        self._cut = cut
        self._files = rank_files
        self._position = 0
        self._slice_bytes = tensor_size_bytes(output.dtype, cut.rank_shape)

    def append(self, view: memoryview) -> None:
        """Take the next bytes, not more than there are; SizeMismatchError if they end within a row that is cut."""
        name = self._output.name
        if not view:
            return
        if self._cut.kind is CutKind.ROWS:
            self._append_rows(view)
        elif self._cut.kind is CutKind.COLUMNS:
            self._append_columns(view)
        elif self._cut.kind is CutKind.SHAPE:
            for file in self._files:
                file.append(name, shape_bytes(self._output.dtype, self._cut.slice_shape))
        else:
            for file in self._files:
                file.append(name, view)

    def _append_rows(self, view: memoryview) -> None:
        while view:
            rank = self._position // self._slice_bytes
            piece = view[: (rank + 1) * self._slice_bytes - self._position]
            self._files[rank].append(self._output.name, piece)
            self._position += piece.nbytes
            view = view[piece.nbytes :]

    def _append_columns(self, view: memoryview) -> None:
        num_ranks, rows = len(self._files), max(1, self._output.shape[0])
        row_bytes = self._slice_bytes // rows * num_ranks
        if row_bytes == 0 or view.nbytes % row_bytes:
            raise SizeMismatchError(
                f"{view.nbytes:,} bytes are not whole rows of {row_bytes:,}",
                tensor=self._output.name,
                remedy=FAULT_IN_MEMOPT,
            )
        pieces = np.frombuffer(view, np.uint8).reshape(-1, num_ranks, row_bytes // num_ranks)
        for rank, file in enumerate(self._files):
            file.append(self._output.name, np.ascontiguousarray(pieces[:, rank]).data)
