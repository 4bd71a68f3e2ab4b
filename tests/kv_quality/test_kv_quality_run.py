"""A small run of the KV-cache benchmark on the trained example: turns, modes, orderings, and what ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from signed_tiny_model import signed_tiny_model
from tokenizers import Tokenizer

from benchmarks.kv_quality.cache_cases import BASE, CASES
from benchmarks.kv_quality.forced_run import DifferentBitsError, HiddenRows, RowRecorder, TurnPlan, forced_run
from benchmarks.kv_quality.modes import compare_modes
from benchmarks.kv_quality.proof_models import (
    TINY_GLM5,
    ProofModel,
    calibration_documents,
    long_documents,
    package_texts,
)
from benchmarks.kv_quality.scores import ANSWER, KINDS, PROMPT, CaseScores
from benchmarks.kv_quality.worker import Worker, load_worker
from memopt.runtime.engine.request import Request
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.kv_scales import UNIT_KV_SCALES
from memopt.runtime.model.step_rows import PrefillChunk, StepRows

# The second turn is past the 256 tokens of DSA's selection.
TURNS = TurnPlan((128, 272), answer_tokens=5, chunk_rows=96, reuses_pages=True)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    release = signed_tiny_model(tmp_path_factory.mktemp("kv-quality"))
    tokenizer = Tokenizer.from_file(str(TINY_GLM5 / "tokenizer.json"))
    texts = package_texts("idlelib")
    documents = (
        *long_documents(tokenizer, texts, TURNS.ends[1] + 1, count=1),
        *long_documents(tokenizer, texts[20:], TURNS.ends[0] + 1, count=1),
    )
    calibration = calibration_documents(tokenizer, package_texts("asyncio"))
    return load_worker(ProofModel(release.folder, release.key, documents, calibration), TURNS)


@dataclass(frozen=True)
class SmallRun:
    """Scores by name of the case, and the rows of each format that were compared between modes."""

    scores: Mapping[str, CaseScores]
    compared_rows: Mapping[str, int]


@pytest.fixture(scope="module")
def run(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    folder = tmp_path_factory.mktemp("rows")
    paths = {case: folder / f"{number}.pt" for number, case in enumerate(worker.cases)}
    scales = worker.calibrate()
    compared: dict[str, int] = {}
    for case, path in paths.items():
        modes_end = None if case.kv_cache in compared else TURNS.ends[-1]
        num_compared = worker.record(case, scales, path, modes_end)
        compared.setdefault(case.kv_cache, num_compared)
    scores = {case.name: worker.score(case.name, paths[BASE], path) for case, path in paths.items()}
    return SmallRun(scores, compared)


def kl(run: SmallRun, name: str, kind: str, turn: int) -> float:
    return run.scores[name].scores[kind][turn].kl


def test_every_case_is_scored_in_every_turn(worker: Worker, run: SmallRun) -> None:
    assert worker.cases == CASES
    for case in run.scores.values():
        assert set(case.scores) == set(KINDS)
        assert [score.num_tokens for score in case.scores[PROMPT]] == [2 * 123, 139]
        assert [score.num_tokens for score in case.scores[ANSWER]] == [8, 4]
    for kind in KINDS:
        assert [(score.kl, score.top1) for score in run.scores["bf16"].scores[kind]] == [(0, 1), (0, 1)]


def test_wrong_scales_show(run: SmallRun) -> None:
    for kind in KINDS:
        right = kl(run, "fp8_e4m3, calibrated", kind, 0)
        assert 0 < right < 0.1
        assert kl(run, "fp8_e4m3, scales / 16", kind, 0) > 20 * right
        # Lost scales cannot be told in the first turn, and ruin the second.
        lost = "fp8_e4m3, scales lost after turn 1"
        assert kl(run, lost, kind, 0) == right
        assert kl(run, lost, kind, 1) > 20 * kl(run, "fp8_e4m3, calibrated", kind, 1)


def test_formats_order_by_what_they_keep(run: SmallRun) -> None:
    """Before the selection begins: bf16 to fp32 is nearer than any e4m3, and scales a token better than one a layer."""
    nearest, token, layer = (kl(run, name, PROMPT, 0) for name in ("fp32", "fp8_ds_mla", "fp8_e4m3, calibrated"))
    assert nearest < token < layer
    # Of no more than top_k tokens all are selected, whatever the indexer's keys.
    assert kl(run, "bf16, indexer keys fp32", PROMPT, 0) == 0
    assert kl(run, "bf16, indexer keys fp32", PROMPT, 1) > 0


def test_modes_agree_to_the_bit(run: SmallRun) -> None:
    """Else the fixture's run would have ended."""
    num_rows = 2 * (267 + 4)
    assert run.compared_rows == dict.fromkeys(("bf16", "fp32", "fp8_ds_mla", "fp8_e4m3"), num_rows)


def test_a_bit_that_differs_between_modes_ends_the_run(worker: Worker) -> None:
    document = worker.proof.documents[0]
    rows = forced_run(worker.model, "bf16", UNIT_KV_SCALES, (document,), TURNS)
    assert compare_modes(worker.model, "bf16", UNIT_KV_SCALES, document, TURNS, TURNS.ends[0], rows) == 2 * (123 + 4)
    bits = rows.answer.view(torch.int32)
    bits[0, 125, 7] ^= 1
    with pytest.raises(DifferentBitsError, match="bf16: 1 of 4 rows differ between one shot and turns"):
        compare_modes(worker.model, "bf16", UNIT_KV_SCALES, document, TURNS, TURNS.ends[0], rows)


def test_a_row_that_is_computed_again_with_other_bits_ends_the_run() -> None:
    recorder = RowRecorder(HiddenRows.empty(1, 4, 2))
    recorder.requests = [Request(0, [1, 2, 3], 3, SamplingParams(), pages=[HeldPage(7, 0)])]
    positions = torch.arange(3)
    table = torch.full((3, 1), 7, dtype=torch.int32)
    rows = StepRows(positions, positions, positions, table, positions + 1, (PrefillChunk(0, 2, 0),), 3)
    hidden = torch.ones(3, 2)
    recorder.record(rows, hidden)
    recorder.record(rows, hidden)
    assert recorder.rows.prompt[0, :2].tolist() == [[1, 1], [1, 1]]
    assert recorder.rows.answer[0, 2].tolist() == [1, 1]
    assert recorder.rows.prompt[0, 2:].isnan().all()
    with pytest.raises(DifferentBitsError, match="1 rows have other bits"):
        recorder.record(rows, hidden - torch.tensor([[0.0], [1.0], [0.0]]))


def test_turns_without_their_cached_pages_end_the_run(worker: Worker) -> None:
    plan = TurnPlan(TURNS.ends, TURNS.answer_tokens, TURNS.chunk_rows, reuses_pages=False)
    with pytest.raises(RuntimeError, match="turn 2 reused 0 tokens, not 64"):
        forced_run(worker.model, "bf16", UNIT_KV_SCALES, worker.proof.documents, plan)
