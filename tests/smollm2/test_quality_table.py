"""The table's figures are those of `memopt evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_files import tiny_llama_bytes

import memopt
from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.llama_source import read_llama
from benchmarks.smollm2.prepare import write_model
from benchmarks.smollm2.quality_table import WINDOW_TOKENS, text_rows
from memopt.compressor.evaluate.evaluate_release import EvaluateOptions, evaluate_release


def test_rows_are_what_evaluate_says(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_llama_bytes())
    write_model(read_llama(tmp_path / "tiny.gguf"), tmp_path / "checkpoint", ExpertSplit(), use_fp8=True)
    recipe = memopt.load_recipe("glm-4.7-int4").model_copy(update={"tensor_parallel": 1})
    memopt.compress(tmp_path / "checkpoint", tmp_path / "int4", recipe=recipe, device="cpu")
    text = tmp_path / "held-out-code.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"the other thing {number}, over there"}) + "\n" for number in range(6))
    )
    (row,) = text_rows(tmp_path, "held-out-code", [tmp_path / "int4"], num_windows=4)
    options = EvaluateOptions(window_tokens=WINDOW_TOKENS, max_windows=4, compute="float32")
    # The tiny model is made for 128 tokens, the texts are shorter.
    quality = evaluate_release(tmp_path / "checkpoint", tmp_path / "int4", text, options)
    assert (row.release, row.text, row.num_tokens) == ("int4", "held-out-code", quality.num_tokens)
    assert row.kl == pytest.approx(quality.kl.value, rel=1e-9)
    assert row.perplexity == pytest.approx(quality.release_perplexity.value, rel=1e-9)
    assert row.kl > 0
