"""A finished layer in the calibration store: parts, what was read for it, rows that the next one starts from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memopt.errors import MalformedError
from memopt.manifests.strict_json import parse_json_object

# Of GLM-5.2 a record has some 300 KB: the names and digests of a layer's 1,560 source tensors.
MAX_RECORD_BYTES = 2**28
_DIGEST_KEY = "sha256"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PartName = Annotated[str, Field(pattern=r"^layer-\d{5}\.[0-9A-Za-z._-]+\.safetensors$")]
RowFileName = Annotated[str, Field(pattern=r"^(hidden|selection)-\d{5}$")]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _StrictPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RowRange(_StrictPart):
    """`count` rows of a file from row `first` on, and the SHA-256 (hex) of their bytes."""

    first: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(gt=0)]
    sha256: Sha256


# JSON has lists alone.
RowRanges = Annotated[tuple[RowRange, ...], Field(strict=False)]


class LayerRecord(_StrictPart):
    """A finished `layer`. `parts`: SHA-256 (hex) of its files of codes. `sources`: of source tensors that no layer
    before it had read.

    `rows`: of the files that the next layer starts from, all their rows in order; `selection_columns` of the selection
    among them, 0 without one. `kv_scales`: by tensor name.
    """

    layer: Annotated[int, Field(ge=0)]
    parts: dict[PartName, Sha256]
    sources: dict[str, Sha256]
    rows: dict[RowFileName, RowRanges]
    selection_columns: Annotated[int, Field(ge=0)]
    kv_scales: dict[str, Scale]

    @model_validator(mode="after")
    def _rows_in_order(self) -> LayerRecord:
        for ranges in self.rows.values():
            ends = [0, *(part.first + part.count for part in ranges)]
            if [part.first for part in ranges] != ends[:-1]:
                raise ValueError("rows that are missing, or there twice")
        return self


def num_rows(ranges: Iterable[RowRange]) -> int:
    """Rows of all of them."""
    return sum(part.count for part in ranges)


def render_layer_record(record: LayerRecord) -> bytes:
    """The record as JSON, with a digest of its own."""
    table = record.model_dump(mode="json")
    return json.dumps(table | {_DIGEST_KEY: _digest(table)}, sort_keys=True).encode()


def parse_layer_record(raw: bytes, file: str) -> LayerRecord:
    """The record that `render_layer_record` wrote; ValueError if a byte of it was changed, or it is none."""
    try:
        table = parse_json_object(raw, file, MalformedError)
    except MalformedError as problem:
        raise ValueError(str(problem)) from None
    if table.pop(_DIGEST_KEY, None) != _digest(table):
        raise ValueError("its digest is another")
    return LayerRecord.model_validate(table)


def _digest(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
