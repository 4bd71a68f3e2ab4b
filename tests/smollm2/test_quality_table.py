"""The table's figures are those of `memopt evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_files import tiny_llama_bytes

from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.llama_source import read_llama
from benchmarks.smollm2.lossless_encoder import lossless_encoder
from benchmarks.smollm2.prepare import write_model
from benchmarks.smollm2.quality import write_between
from benchmarks.smollm2.quality_models import QualityModel, write_ids
from benchmarks.smollm2.quality_releases import CASES, make_releases
from benchmarks.smollm2.quality_table import text_rows
from memopt.compressor.evaluate.evaluate_release import EvaluateOptions, evaluate_release
from memopt.errors import ContentError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> QualityModel:
    folder = tmp_path_factory.mktemp("quality")
    (folder / "tiny.gguf").write_bytes(tiny_llama_bytes())
    write_model(read_llama(folder / "tiny.gguf"), folder / "checkpoint", ExpertSplit(), use_fp8=True)
    for name, first in (("held-out-code", 0), ("calibration", 100)):
        lines = [json.dumps({"text": f"the other thing {first + number}, over there"}) for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    found = QualityModel("tiny", "glm4_moe", folder / "checkpoint", folder, ("held-out-code",), 8, 16, 64)
    write_ids(found.checkpoint, folder / "calibration.jsonl", found.calibration_ids)
    return found


def test_rows_are_what_evaluate_says(model: QualityModel) -> None:
    cases = tuple(case for case in CASES if case.name in ("absmax-g32", "weighted-g32"))
    releases = list(make_releases(model, cases, 1))
    assert [release.name for release in releases] == ["absmax-g32", "weighted-g32-8x16"]
    text = model.folder / "held-out-code.jsonl"
    rows = list(text_rows(model.checkpoint, text, releases, num_windows=6, window_tokens=64))
    options = EvaluateOptions(window_tokens=64, max_windows=6, compute="float32")
    for row, release in zip(rows, releases, strict=True):
        quality = evaluate_release(model.checkpoint, release, text, options)
        assert (row.release, row.text, row.num_tokens) == (release.name, "held-out-code", quality.num_tokens)
        assert row.kl.value == pytest.approx(quality.kl.value, rel=1e-9)
        assert row.kl.high == pytest.approx(quality.kl.high, rel=1e-9)
        assert row.perplexity == pytest.approx(quality.release_perplexity.value, rel=1e-9)
        assert row.kl.value > 0
    assert rows[0].kl.value != rows[1].kl.value


def test_a_release_that_is_there_is_not_made_again(model: QualityModel) -> None:
    case = next(case for case in CASES if case.name == "mse-g32")
    (release,) = make_releases(model, (case,), 1)
    before = (release / "release.json").stat().st_mtime_ns
    assert list(make_releases(model, (case,), 1)) == [release]
    assert (release / "release.json").stat().st_mtime_ns == before


def test_every_case_has_its_own_name_and_recipe() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 10
    forms = {case.name: case.recipe("glm4_moe").rules[0].format for case in CASES}
    assert len({form.model_dump_json() for form in forms.values()}) == 10


def test_a_text_that_the_vocabulary_cannot_spell_is_refused(model: QualityModel, tmp_path: Path) -> None:
    tokenizer = json.loads((model.checkpoint / "tokenizer.json").read_text())
    # GPT-2's byte characters: control byte 4 is U+0104.
    del tokenizer["model"]["vocab"]["\u0104"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    encode = lossless_encoder(tmp_path)
    assert len(encode("the thing")) >= 2
    with pytest.raises(ContentError, match="cannot spell"):
        encode("a control byte: \x04")


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<a>\nold\n<b>\nafter\n")
    write_between(path, "<a>", "<b>", "new")
    assert path.read_text() == "before\n<a>\nnew\n<b>\nafter\n"
    with pytest.raises(ValueError, match="one <b>"):
        write_between(path, "<b>", "<a>", "new")
