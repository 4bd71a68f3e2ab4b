"""release.json: what the release is made of, without time, host or path, and of the size that was planned."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import make_checkpoint
from tiny_plans import plan_of, tiny

import memopt
from memopt.compressor.ledger import UNKNOWN_DIGEST, ErrorFigures, ErrorSummary
from memopt.compressor.plan import Plan
from memopt.compressor.release_file import render_release
from memopt.compressor.source_identity import SourceIdentity

PLAN = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
FIGURES = st.just(math.nan) | st.floats(0)


def rendered(plan: Plan, **results: Any) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(render_release(plan, **results))
    return table


@given(
    values=st.tuples(FIGURES, FIGURES, FIGURES), count=st.integers(0, 2**40), digest=st.binary(min_size=32, max_size=32)
)
@settings(max_examples=60, deadline=None)
def test_results_do_not_change_its_size(values: tuple[float, float, float], count: int, digest: bytes) -> None:
    errors = {"routed_expert": ErrorFigures(*values, count, count + 1).summary()}
    filled = render_release(PLAN, ledger_sha256=digest.hex(), errors_by_role=errors)
    assert len(filled) == len(render_release(PLAN))
    table = json.loads(filled)
    assert ErrorSummary(**table["totals"]["error"]["routed_expert"]) == errors["routed_expert"]
    assert table["ledger"] == {"file": "ledger.jsonl", "sha256": digest.hex()}
    assert list(table["totals"]["error"]) == ["routed_expert"]
    assert b"\\u0000" not in filled


def test_contents() -> None:
    table = rendered(PLAN)
    assert table["identity"]["name"] == "glm-5.2-int4"
    assert table["identity"]["family"] == "glm_moe_dsa"
    assert table["identity"]["plan_fingerprint"] == UNKNOWN_DIGEST
    assert rendered(PLAN, fingerprint="ab" * 32)["identity"]["plan_fingerprint"] == "ab" * 32
    assert table["source"]["tensors"] == 186
    assert table["source"]["size_bytes"] == PLAN.source.size_bytes
    assert table["formats"]["weights"]["routed_expert"] == ["int4 group 32"]
    assert table["formats"]["weights"]["router_bias"] == ["F32"]
    assert table["stages"] == ["decode"]
    assert table["totals"]["fates"] == {str(fate): count for fate, count in PLAN.fate_counts.items()}
    assert table["totals"]["weights_size_bytes"] == PLAN.weights_size_bytes
    assert table["rounding"]["codes"] == [-8, 7]
    assert table["layouts"] == ["hub"]
    assert any("vLLM #48905" in note["message"] for note in table["engine_notes"])
    assert table["recipe"]["rules"][0]["format"]["scale"] == "mse-signed"
    assert table["tool"]["memopt"] == memopt.__version__


def test_nothing_is_rounded_nothing_is_said_of_rounding() -> None:
    table = rendered(plan_of(tiny("glm-5.2-fp8"), "copy"))
    assert table["rounding"] is None
    assert table["totals"]["error"] == {}


def test_a_hub_source_is_named_with_its_commit_and_digests() -> None:
    (file,) = PLAN.source.files
    identity = SourceIdentity("hub", "zai-org/GLM-5.2-FP8", "c" * 40, ((file, "d" * 64),))
    source = rendered(replace(PLAN, identity=identity))["source"]
    assert (source["repository"], source["commit"]) == ("zai-org/GLM-5.2-FP8", "c" * 40)
    # The branch or tag that led to the commit does not belong to it.
    assert "revision" not in source
    assert source["files"][0]["sha256"] == "d" * 64
    assert "sha256" not in rendered(PLAN)["source"]["files"][0]


@pytest.mark.parametrize(
    ("source", "recipe", "expected"),
    [
        ("glm-5.2-fp8", "copy", ["prefill"]),
        ("glm-5.2-fp8", "dequantize", ["prefill"]),
        ("glm-5.2-fp8", "glm-5.2-int4-fp8", ["decode"]),
        ("kimi-k2.6-int4", "kimi-k2.6", ["decode"]),
        ("kimi-k2.6-int4", "copy", ["decode"]),
    ],
)
def test_stages_follow_from_the_weights(source: str, recipe: str, expected: list[str]) -> None:
    assert rendered(plan_of(tiny(source), recipe, tensor_parallel=1))["stages"] == expected


@pytest.mark.parametrize("name", ["nightly", 'a "quoted"\nname', "模型 é", "1.000000e+00"])
def test_the_name_may_be_anything(name: str) -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", release_name=name)
    assert rendered(plan)["identity"]["name"] == name


def test_a_runs_file_has_no_path_and_names_what_was_left_behind(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8")
    result = memopt.compress(source, tmp_path / "out", recipe="glm-5.2-int4")
    raw = (tmp_path / "out" / "release.json").read_text()
    assert str(tmp_path) not in raw
    table = json.loads(raw)
    assert [skipped["name"] for skipped in table["not_copied"]] == ["modeling_custom.py"]
    assert table["code_files"] == []
    assert table["totals"]["error"]["routed_expert"]["relative_mse"] == pytest.approx(
        result.errors_by_role["routed_expert"].relative_mse, rel=1e-5
    )
    assert 0 < table["totals"]["error"]["routed_expert"]["relative_mse"] < 0.02


def test_code_that_was_allowed_is_listed(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8")
    plan = memopt.plan(source, "glm-5.2-int4", options=memopt.PlanOptions(allow_code=True))
    table = rendered(plan)
    assert table["code_files"] == ["modeling_custom.py"]
    assert table["not_copied"] == []
