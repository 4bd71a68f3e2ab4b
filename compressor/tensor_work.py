"""The work on one tensor, streamed in row chunks: copy, dequantize to BF16, or round to INT4."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.compressor.calibrated_codes import row_errors, stored_values
from memopt.compressor.calibration_store import CalibrationStore
from memopt.compressor.checkpoint.checkpoint import StoredTensor
from memopt.compressor.checkpoint.source_tensor import PACKED, SCALE, SourceFormat, SourceTensor
from memopt.compressor.checkpoint.writer import TensorSink
from memopt.compressor.job import TensorReader
from memopt.compressor.ledger import ErrorFigures, TensorResult
from memopt.compressor.part_checks import (
    INT4_LARGEST_CODE,
    PACKED_SHAPE_BYTES,
    UE8M0_DTYPES,
    bf16_values,
    check_copied,
    check_packed_shape,
    require_finite,
)
from memopt.compressor.quantize.backend import QuantizeBackend
from memopt.compressor.tensor_plan import Fate, TensorPlan
from memopt.errors import ShapeError
from memopt.kernels import cpu
from memopt.kernels.checks import NonFiniteWeightError
from memopt.kernels.int4_spec import Int4Spec
from memopt.kernels.ue8m0 import decode_ue8m0


@dataclass(frozen=True)
class RowChunk:
    """Rows [first, first + count) of a weight, `data` as stored."""

    first: int
    count: int
    data: npt.NDArray[np.uint8]


class TensorWorker:
    """Does the work of one tensor after another for one thread; holds one chunk buffer.

    `advance` is called with the number of source bytes done after each chunk; it raises to stop the work. `calibrated`:
    where codes come from that follow from calibration data, None without any.
    """

    def __init__(
        self,
        reader: TensorReader,
        backend: QuantizeBackend,
        advance: Callable[[int], None],
        calibrated: CalibrationStore | None = None,
    ) -> None:
        self._reader = reader
        self._backend = backend
        self._advance = advance
        self._calibrated = calibrated
        self._chunk_bytes = backend.chunk_bytes
        self._buffer = np.empty(self._chunk_bytes, np.uint8)

    def run(self, plan: TensorPlan, out: TensorSink) -> TensorResult:
        """Stream `plan` from the source into `out`. Output digests are the file's to give.

        SourceChangedError for a tensor that is not what calibration read.
        """
        result = self._run(plan, out)
        if self._calibrated is not None:
            self._calibrated.require_sources(result.source_sha256)
        return result

    def _run(self, plan: TensorPlan, out: TensorSink) -> TensorResult:
        if plan.fate is Fate.CALIBRATED and self._calibrated is not None:
            name = plan.outputs[0].name
            out.append(name, np.float32(self._calibrated.kv_scale(name)).tobytes())
            return TensorResult({})
        if plan.fate is Fate.COPIED:
            return TensorResult(self._copy(plan, out))
        if plan.int4 is not None and plan.int4.is_calibrated and self._calibrated is not None:
            return self._take_codes(plan, out, self._calibrated)
        if plan.fate is Fate.QUANTIZED:
            return self._quantize(plan, out)
        if plan.source.format is SourceFormat.INT4_PACKED:
            return TensorResult(self._dequantize_int4(plan, out))
        return TensorResult(self._dequantize_float8(plan, out))

    def _chunk_buffer(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        if size_bytes > self._buffer.nbytes:
            self._buffer = np.empty(size_bytes, np.uint8)
        return self._buffer[:size_bytes]

    def _copy(self, plan: TensorPlan, out: TensorSink) -> dict[str, str]:
        digests: dict[str, str] = {}
        for part, output in zip(plan.source.parts, plan.outputs, strict=True):
            state = hashlib.sha256()
            step = self._copy_step(part)
            for offset in range(0, part.size_bytes, step):
                data = self._chunk_buffer(min(step, part.size_bytes - offset))
                view = data.data
                self._reader.read_into(part, offset, view)
                check_copied(plan.source, part, data, offset)
                state.update(view)
                out.append(output.name, view)
                self._advance(view.nbytes)
            digests[part.name] = state.hexdigest()
        return digests

    def _copy_step(self, part: StoredTensor) -> int:
        """Bytes of a chunk: whole rows, so that ranks can cut columns, and a weight_shape in one."""
        row_bytes = part.size_bytes // part.shape[0] if part.shape and part.shape[0] else 0
        step = max(PACKED_SHAPE_BYTES, self._chunk_bytes)
        return max(1, step // row_bytes) * row_bytes if row_bytes else step

    def _row_chunks(self, weight: StoredTensor, block_rows: int, digests: dict[str, str]) -> Iterator[RowChunk]:
        """Chunks of whole rows, each starting at a multiple of `block_rows`; adds the weight's digest at the end."""
        rows = weight.shape[0]
        row_bytes = weight.size_bytes // max(rows, 1)
        step = max(1, self._chunk_bytes // max(row_bytes, 1))
        if block_rows < rows:
            step = math.ceil(step / block_rows) * block_rows
        state = hashlib.sha256()
        for first in range(0, rows, step):
            count = min(step, rows - first)
            data = self._chunk_buffer(count * row_bytes)
            self._reader.read_into(weight, first * row_bytes, data.data)
            state.update(data.data)
            yield RowChunk(first, count, data)
            self._advance(data.nbytes)
        digests[weight.name] = state.hexdigest()

    def _small_part(self, part: StoredTensor, digests: dict[str, str]) -> bytearray:
        data = bytearray(part.size_bytes)
        self._reader.read_into(part, 0, memoryview(data))
        digests[part.name] = hashlib.sha256(data).hexdigest()
        self._advance(part.size_bytes)
        return data

    def _float8_scale(self, source: SourceTensor, digests: dict[str, str]) -> npt.NDArray[np.float32] | None:
        """The FP8 scale as float32 [block rows, block columns]; None for a BF16 source. NonFiniteError naming it."""
        if source.scale is None or source.block is None:
            return None
        raw = np.frombuffer(self._small_part(source.scale, digests), np.uint8)
        if source.scale.dtype in UE8M0_DTYPES:
            scale = decode_ue8m0(raw)
        elif source.scale.dtype == "BF16":
            scale = bf16_values(raw.view(np.uint16))
        else:
            scale = raw.view(np.float32)
        require_finite(scale, source.scale)
        rows, columns = source.weight.shape
        return scale.reshape(math.ceil(rows / source.block[0]), math.ceil(columns / source.block[1]))

    def _quantize(self, plan: TensorPlan, out: TensorSink) -> TensorResult:
        source, target = plan.source, plan.int4
        packed, scale_output, shape = plan.outputs
        spec = Int4Spec(target.weights_per_scale, target.scale, target.norm) if target else Int4Spec()
        digests: dict[str, str] = {}
        scales = self._float8_scale(source, digests)
        rows, columns = source.weight.shape
        block = source.block or (rows, columns)
        sq_error = np.zeros(rows)
        energy = np.zeros(rows)
        max_error, num_clipped = 0.0, 0
        for chunk in self._row_chunks(source.weight, block[0], digests):
            values = chunk.data.view(np.uint8 if scales is not None else np.uint16).reshape(chunk.count, columns)
            chunk_scale, chunk_block = _chunk_scale(scales, block, rows, chunk)
            try:
                result = self._backend.quantize(values, chunk_scale, chunk_block, spec)
            except NonFiniteWeightError as problem:
                raise _located(problem, chunk, source) from None
            out.append(packed.name, result.packed.data)
            out.append(scale_output.name, result.scale_bits.data)
            sq_error[chunk.first : chunk.first + chunk.count] = result.sq_error
            energy[chunk.first : chunk.first + chunk.count] = result.energy
            max_error = max(max_error, float(result.max_error.max(initial=0.0)))
            num_clipped += int(result.num_clipped.sum())
        out.append(shape.name, np.array([rows, columns], np.int64).tobytes())
        # fsum is exact, so that the figures do not depend on numpy's order of summation.
        figures = ErrorFigures(math.fsum(sq_error), math.fsum(energy), max_error, num_clipped, rows * columns)
        return TensorResult(digests, figures)

    def _take_codes(self, plan: TensorPlan, out: TensorSink, store: CalibrationStore) -> TensorResult:
        """Codes and scales from the store; the source is read for its digest and the error figures."""
        source = plan.source
        packed, scale_output, shape = plan.outputs
        digests: dict[str, str] = {}
        scales = self._float8_scale(source, digests)
        rows, columns = source.weight.shape
        block = source.block or (rows, columns)
        sq_error, energy = np.zeros(rows), np.zeros(rows)
        max_error, num_clipped = 0.0, 0
        for chunk in self._row_chunks(source.weight, block[0], digests):
            bits = chunk.data.view(np.uint8 if scales is not None else np.uint16).reshape(chunk.count, columns)
            values = stored_values(bits, *_chunk_scale(scales, block, rows, chunk))
            parts = [
                store.read(output.name, chunk.first * row_bytes, chunk.count * row_bytes)
                for output in (packed, scale_output)
                for row_bytes in (output.size_bytes // rows,)
            ]
            errors = row_errors(
                values,
                parts[0].view(np.int32).reshape(chunk.count, -1),
                parts[1].view(np.uint16).reshape(chunk.count, -1),
            )
            out.append(packed.name, parts[0].data)
            out.append(scale_output.name, parts[1].data)
            sq_error[chunk.first : chunk.first + chunk.count] = errors.sq_error
            energy[chunk.first : chunk.first + chunk.count] = errors.energy
            max_error = max(max_error, errors.max_error)
            num_clipped += errors.num_clipped
        out.append(shape.name, np.array([rows, columns], np.int64).tobytes())
        figures = ErrorFigures(math.fsum(sq_error), math.fsum(energy), max_error, num_clipped, rows * columns)
        return TensorResult(digests, figures, store.figures(source.spec.name))

    def _dequantize_float8(self, plan: TensorPlan, out: TensorSink) -> dict[str, str]:
        source = plan.source
        digests: dict[str, str] = {}
        scales = self._float8_scale(source, digests)
        rows, columns = source.weight.shape
        block = source.block or (rows, columns)
        for chunk in self._row_chunks(source.weight, block[0], digests):
            chunk_scale, chunk_block = _chunk_scale(scales, block, rows, chunk)
            if chunk_scale is None or chunk_block is None:
                raise ShapeError("an FP8 weight without its scale", tensor=source.spec.name)
            try:
                bits = cpu.dequantize_float8_bf16(chunk.data.reshape(chunk.count, columns), chunk_scale, chunk_block)
            except NonFiniteWeightError as problem:
                raise _located(problem, chunk, source) from None
            out.append(plan.outputs[0].name, bits.data)
        return digests

    def _dequantize_int4(self, plan: TensorPlan, out: TensorSink) -> dict[str, str]:
        source = plan.source
        digests: dict[str, str] = {}
        rows, columns = source.spec.shape
        if source.scale is None or source.packed_shape is None or source.group_size is None:
            raise ShapeError(f"packed words without {SCALE} or shape", tensor=source.spec.name + PACKED)
        shape_bytes = self._small_part(source.packed_shape, digests)
        check_packed_shape(source.packed_shape, np.frombuffer(shape_bytes, np.uint8), (rows, columns))
        scale_bits = np.frombuffer(self._small_part(source.scale, digests), np.uint16).reshape(rows, -1)
        require_finite(bf16_values(scale_bits), source.scale, INT4_LARGEST_CODE)
        group = None if source.group_size == columns else source.group_size
        for chunk in self._row_chunks(source.weight, 1, digests):
            packed = chunk.data.view(np.int32).reshape(chunk.count, -1)
            bits = cpu.dequantize_int4(packed, scale_bits[chunk.first : chunk.first + chunk.count], group)
            out.append(plan.outputs[0].name, bits.data)
        return digests


def _chunk_scale(
    scales: npt.NDArray[np.float32] | None, block: tuple[int, int], rows: int, chunk: RowChunk
) -> tuple[npt.NDArray[np.float32] | None, tuple[int, int] | None]:
    """The rows of the scale grid that cover `chunk`, and the block in its terms; (None, None) for a BF16 source."""
    if scales is None:
        return None, None
    if block[0] >= rows:
        return scales, (chunk.count, block[1])
    first = chunk.first // block[0]
    last = math.ceil((chunk.first + chunk.count) / block[0])
    return scales[first:last], block


def _located(problem: NonFiniteWeightError, chunk: RowChunk, source: SourceTensor) -> NonFiniteWeightError:
    located = problem.offset_row(chunk.first, tensor=source.weight.name)
    located.file = source.weight.file
    return located
