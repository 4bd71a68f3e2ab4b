"""The ledger: every source name exactly once, and lines whose width does not depend on what was found."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import NAMES
from tiny_plans import plan_of, tiny, with_tensor

from memopt.compressor.ledger import (
    LARGEST_FIGURE,
    SMALLEST_FIGURE,
    UNKNOWN_DIGEST,
    ErrorFigures,
    ErrorSummary,
    TensorResult,
    figure,
    fixed_width,
    ledger_line,
    ledger_row,
)
from memopt.compressor.plan import Plan
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.tensor_plan import Fate

FIGURES = st.just(math.nan) | st.floats(0, allow_infinity=True)


@given(value=FIGURES | st.floats(1e-99, 1e-97) | st.floats(9.8e98, 1.1e99))
@settings(max_examples=500, deadline=None)
def test_every_figure_is_twelve_characters_of_json(value: float) -> None:
    text = fixed_width(value)
    assert len(text) == 12
    assert math.isclose(json.loads(text), figure(value), rel_tol=1e-6)
    assert fixed_width(json.loads(text)) == text, "what is read from a ledger is written as the same text again"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000000e+00"),
        (-0.0, "0.000000e+00"),
        (1.234567e-3, "1.234567e-03"),
        (9.9999999, "1.000000e+01"),
        (5e-324, "0.000000e+00"),
        (SMALLEST_FIGURE, "1.000000e-98"),
        (LARGEST_FIGURE, "9.900000e+98"),
        (math.inf, "9.900000e+98"),
        (math.nan, "9.900000e+98"),
        (-1.0, "0.000000e+00"),
    ],
)
def test_golden_figures(value: float, text: str) -> None:
    assert fixed_width(value) == text


def test_a_plan_and_its_lines() -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    (row,) = [json.loads(line) for line in plan.blank_ledger() if json.loads(line)["tensor"] == name]
    source = plan.source.tensors[name]
    assert {key: row[key] for key in ("role", "layer", "mtp", "fate", "source_format", "format")} == {
        "role": "routed_expert",
        "layer": 1,
        "mtp": False,
        "fate": "quantized",
        "source_format": "fp8-block 128x128",
        "format": "int4 group 32",
    }
    assert [part["name"] for part in row["sources"]] == [name, f"{name}_scale_inv"]
    assert row["sources"][0] == {
        "name": name,
        "file": source.file,
        "dtype": "F8_E4M3",
        "shape": [256, 256],
        "offset": source.start,
        "size_bytes": 65_536,
        "sha256": UNKNOWN_DIGEST,
    }
    made = [part["name"].rpartition(".")[2] for part in row["outputs"]]
    assert made == ["weight_packed", "weight_scale", "weight_shape"]
    assert row["error"] == {"relative_mse": 0.0, "max_error": 0.0, "clipped_share": 0.0}


def placed_lines(plan: Plan, result: TensorResult, outputs: dict[str, str]) -> list[bytes]:
    return [
        ledger_line(ledger_row(tensor, unit.places(), result, UnitDigests(outputs, {})))
        for unit in plan.units
        for tensor in unit.tensors
    ]


PLAN = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
ERRORS = st.builds(ErrorFigures, FIGURES, FIGURES, FIGURES, st.integers(0, 2**40), st.integers(0, 2**40))


@given(errors=ERRORS, digest=st.binary(min_size=32, max_size=32))
@settings(max_examples=30, deadline=None)
def test_results_do_not_change_a_lines_width(errors: ErrorFigures, digest: bytes) -> None:
    names = {part.name for tensor in PLAN.tensors for part in (*tensor.source.parts, *tensor.outputs)}
    digests = dict.fromkeys(names, digest.hex())
    blank, filled = PLAN.blank_ledger(), placed_lines(PLAN, TensorResult(digests, errors), digests)
    assert [len(line) for line in blank] == [len(line) for line in filled]
    assert sum(map(len, filled)) == PLAN.ledger_size_bytes()
    for line in filled:
        row = json.loads(line)
        assert {part["sha256"] for part in (*row["sources"], *row["outputs"])} == {digest.hex()}
        assert ("error" in row) == (row["fate"] == "quantized")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", ["copy", "dequantize"])
def test_it_balances(name: str, by: str) -> None:
    prefix = "language_model." if name == "kimi-k2.6-int4" else ""
    buffer = f"{prefix}model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoint = with_tensor(tiny(name), buffer, "F32", (8,))
    plan = plan_of(checkpoint, by, max_file_bytes=10**6)
    rows = [json.loads(line) for line in plan.blank_ledger()]
    assert len({row["tensor"] for row in rows}) == len(rows) == len(plan.tensors)
    sources = [part["name"] for row in rows for part in row["sources"]]
    assert sorted(sources) == sorted(checkpoint.tensors)
    written = [(part["file"], part["name"], *part["data_offsets"]) for row in rows for part in row["outputs"]]
    planned = [(unit.file_name, t.name, t.start, t.end) for unit in plan.units for t in unit.layout]
    assert sorted(written) == sorted(planned)
    dropped = [row for row in rows if row["fate"] == Fate.DROPPED]
    assert [row["tensor"] for row in dropped] == ([buffer] if by == "dequantize" else [])
    assert all(row["outputs"] == [] and row["reason"] for row in dropped)


@given(first=ERRORS, second=ERRORS)
@settings(max_examples=50, deadline=None)
def test_figures_add_up(first: ErrorFigures, second: ErrorFigures) -> None:
    both = first + second
    assert repr(both.sq_error) == repr(first.sq_error + second.sq_error)
    assert repr(both.max_error) == repr(max(first.max_error, second.max_error))
    assert both.num_weights == first.num_weights + second.num_weights
    assert repr(first + ErrorFigures()) == repr(first)


def test_golden_shares() -> None:
    errors = ErrorFigures(sq_error=2.0, energy=8.0, max_error=0.5, num_clipped=3, num_weights=12)
    assert (errors.relative_mse, errors.clipped_share) == (0.25, 0.25)
    assert (ErrorFigures().relative_mse, ErrorFigures().clipped_share) == (0.0, 0.0)


@pytest.mark.parametrize(("sq_error", "energy"), [(math.inf, math.inf), (1.0, math.inf), (math.nan, 1.0)])
def test_overflowed_sums_are_not_small_errors(sq_error: float, energy: float) -> None:
    errors = ErrorFigures(sq_error, energy, 1.0, 0, 1)
    assert errors.relative_mse == math.inf
    assert errors.summary() == ErrorSummary(LARGEST_FIGURE, 1.0, 0.0)


def test_the_ledgers_size_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
    size = plan.ledger_size_bytes()
    monkeypatch.setattr(type(plan), "blank_ledger", None)
    assert plan.ledger_size_bytes() == size


def test_names_beyond_ascii_are_counted_in_bytes() -> None:
    checkpoint = with_tensor(tiny("kimi-k2.6-int4"), "vision_tower.a.weight", "BF16", (2, 2))
    plan = plan_of(checkpoint, "copy")
    assert plan.ledger_size_bytes() == len(b"".join(plan.blank_ledger()))
    assert ledger_line({"tensor": "é"}) == '{"tensor": "é"}\n'.encode()
