"""The tables of docs/kv-quality.md have the form that the benchmark writes, and are written where they belong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.kv_quality.cache_cases import CASES
from benchmarks.kv_quality.main import MODELS
from benchmarks.kv_quality.measure import ModelResult
from benchmarks.kv_quality.scores import KINDS, CaseScores, Score
from benchmarks.kv_quality.tables import markdown, markers, replaced, write_into

DOCUMENT = Path(__file__).parents[2] / "docs" / "kv-quality.md"
GQA_CASES = tuple(case for case in CASES if case.kv_cache != "fp8_ds_mla" and not case.has_exact_indexer)


def result_of(name: str, score: Score) -> ModelResult:
    _, plan = MODELS[name]
    scores = {kind: (score,) * len(plan.turns.ends) for kind in KINDS}
    cases = CASES if name == "tiny-glm5" else GQA_CASES
    compared = {case.kv_cache: 7 for case in cases}
    return ModelResult(plan, tuple(CaseScores(case.name, scores) for case in cases), compared)


def form(text: str) -> list[str]:
    """Lines without their figures."""
    return [re.sub(r"(> )?\b\d[\d,.]*\d\b|\b\d\b", "#", line) for line in text.strip().splitlines()]


@pytest.mark.parametrize("name", MODELS)
def test_the_document_has_what_the_benchmark_writes(name: str) -> None:
    begin, end = markers(name)
    written = DOCUMENT.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert form(written) == form(markdown(result_of(name, Score(5, 0.5, 0.5, 50.0))))


def test_figures() -> None:
    table = markdown(result_of("smollm2", Score(512, 0.0123456, 0.98765, 12345.0)))
    assert "| bf16 | 0.01235 | 0.01235 | 0.01235 | 98.8 % | 98.8 % | 98.8 % | > 10,000 | > 10,000 | > 10,000 |" in table
    assert "| fp32 | 12.35 |" in markdown(result_of("smollm2", Score(512, 12.345, 0.5, 20.0)))


def test_only_its_own_part_of_a_document_is_replaced(tmp_path: Path) -> None:
    begin, end = markers("m")
    path = tmp_path / "doc.md"
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_into(path, "m", "new")
    assert path.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"


@pytest.mark.parametrize("text", ["", "B\n", "E\nB\n", "B\nE\nB\nE\n"])
def test_a_document_without_its_markers_is_refused(text: str) -> None:
    begin, end = markers("m")
    with pytest.raises(ValueError, match="kv-quality m begin"):
        replaced(text.replace("B", begin).replace("E", end), "m", "new")
