"""Records of finished layers: what is written comes back, and no changed byte does."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.compressor.layer_record import LayerRecord, RowRange, num_rows, parse_layer_record, render_layer_record

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
NAMES = st.text("abcdefghij.", min_size=1, max_size=20)


@st.composite
def row_ranges(draw: st.DrawFn) -> tuple[RowRange, ...]:
    found: list[RowRange] = []
    for count in draw(st.lists(st.integers(1, 10**6), max_size=4)):
        found.append(RowRange(first=num_rows(found), count=count, sha256=draw(DIGESTS)))
    return tuple(found)


RECORDS = st.builds(
    LayerRecord,
    layer=st.integers(0, 99_999),
    parts=st.dictionaries(NAMES.map(lambda name: f"layer-00003.{name}.safetensors"), DIGESTS, max_size=3),
    sources=st.dictionaries(NAMES, DIGESTS, max_size=3),
    rows=st.dictionaries(st.sampled_from(["hidden-00004", "selection-00004"]), row_ranges()),
    selection_columns=st.integers(0, 2**31),
    kv_scales=st.dictionaries(NAMES, st.floats(min_value=1e-30, max_value=1e30), max_size=2),
)
RECORD = LayerRecord(
    layer=3,
    parts={"layer-00003.mlp.down.safetensors": "ab" * 32},
    sources={"model.layers.3.input_layernorm.weight": "cd" * 32},
    rows={"hidden-00004": (RowRange(first=0, count=7, sha256="ef" * 32),)},
    selection_columns=0,
    kv_scales={"model.layers.3.self_attn.k_scale": 0.1},
)


@given(record=RECORDS)
def test_what_is_written_comes_back(record: LayerRecord) -> None:
    assert parse_layer_record(render_layer_record(record), "layer-00003.json") == record


def test_a_flipped_bit_anywhere_is_found() -> None:
    raw = render_layer_record(RECORD)
    for place in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                parse_layer_record(bytes(changed), "layer-00003.json")


@pytest.mark.parametrize(
    "change",
    [
        {"layer": -1},
        {"layer": "3"},
        {"layer": True},
        {"selection_columns": None},
        {"selection_columns": 1.5},
        {"parts": None},
        {"parts": {"layer-00003/x.safetensors": "ab" * 32}},
        {"parts": {"layer-00003.x.safetensors": "AB" * 32}},
        {"sources": {"a": 3}},
        {"rows": {"hidden-4": []}},
        {"rows": {"hidden-00004": [{"first": 1, "count": 7, "sha256": "ef" * 32}]}},
        {"rows": {"hidden-00004": [{"first": 0, "count": 0, "sha256": "ef" * 32}]}},
        {"kv_scales": {"a": 0.0}},
        {"kv_scales": {"a": "1"}},
        {"extra": {}},
    ],
)
def test_a_record_of_other_kinds_is_none_whatever_its_digest_says(change: dict[str, object]) -> None:
    table = json.loads(render_layer_record(RECORD))
    del table["sha256"]
    digest = hashlib.sha256(json.dumps(table | change, sort_keys=True).encode()).hexdigest()
    assert parse_layer_record(render_layer_record(RECORD), "layer-00003.json") == RECORD
    with pytest.raises(ValueError, match="validation error"):
        parse_layer_record(json.dumps(table | change | {"sha256": digest}).encode(), "layer-00003.json")
