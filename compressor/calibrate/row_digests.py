"""Digests of the rows between layers: taken as they are written, compared when a later run starts from them.

A flipped bit in them would else become other codes, and no error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from memopt.compressor.calibrate.calibration_run import CalibrationRun, share
from memopt.compressor.calibrate.ordered_map import ordered_map
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.layer_record import RowRange, num_rows
from memopt.errors import ContentError

_WORDS = hashlib.sha256().digest_size // torch.int64.itemsize


def gather_row_ranges(run: CalibrationRun, digests: Mapping[int, bytes]) -> tuple[RowRange, ...]:
    """Of all batches of `run`, from what each rank has of its own: SHA-256 by first row. All ranks call it together."""
    words = torch.zeros(len(run.batches), _WORDS, dtype=torch.int64)
    for number, batch in enumerate(run.batches):
        if batch.first_row in digests:
            words[number] = torch.frombuffer(bytearray(digests[batch.first_row]), dtype=torch.int64)
    # One rank has a batch, the others add zeros.
    words = run.communicator.sum(words)
    return tuple(
        RowRange(first=batch.first_row, count=batch.num_rows, sha256=row.numpy().tobytes().hex())
        for batch, row in zip(run.batches, words, strict=True)
    )


def require_same_rows(run: CalibrationRun, rows: RowFile, ranges: Sequence[RowRange]) -> None:
    """ContentError unless `rows` are those of `ranges`, of which every rank reads its share, on all its threads."""
    require_whole(run, rows)
    if num_rows(ranges) != rows.num_rows:
        raise _changed(run, rows, f"{rows.num_rows:,} rows, but {num_rows(ranges):,} were recorded")

    def is_same(part: RowRange) -> bool:
        return rows.read_sha256(part.first, part.count).hex() == part.sha256

    own = ranges[share(len(ranges), run.rank, run.communicator.num_ranks)]
    for part, same in zip(own, ordered_map(run.pool, is_same, own, run.ahead), strict=True):
        if not same:
            raise _changed(
                run,
                rows,
                f"rows {part.first:,} to {part.first + part.count - 1:,} were changed after they were written",
            )


def require_whole(run: CalibrationRun, rows: RowFile) -> None:
    """ContentError unless the file has the size of all its rows."""
    if rows.path.stat().st_size != rows.size_bytes:
        raise _changed(run, rows, "is not what the finished layers left")


def _changed(run: CalibrationRun, rows: RowFile, message: str) -> ContentError:
    # The rows that they were computed from are gone.
    return ContentError(
        message, file=rows.path.name, remedy=f"remove {run.store.folder.parent.parent} to calibrate anew"
    )
