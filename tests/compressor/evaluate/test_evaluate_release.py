"""Releases against their source, streamed a layer at a time: transformers' logits, bits, gate, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.invoke import invoke
from gguf_files import tiny_llama_bytes
from tiny_checkpoints import TINY_GLM5
from transformers import AutoModelForCausalLM

import memopt
from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.llama_source import read_llama
from benchmarks.smollm2.prepare import write_model
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.evaluate_release import EvaluateOptions, evaluate_release, text_encoder
from memopt.compressor.evaluate.quality_file import parse_quality, render_quality
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.streamed_forward import StreamOptions, final_states
from memopt.compressor.evaluate.token_windows import Window, document_windows
from memopt.compressor.recipe import parse_recipe
from memopt.errors import ContentError, OutputError, ShapeError, UsageError

RECIPE = """
name: tiny-int4
description: for tests
families: [glm4_moe]
rules:
  - roles: [routed_expert]
    format: {{type: int4, group_size: 32, scale: {scale}}}
default: bf16
{gate}
"""
FLOAT32 = StreamOptions(compute="float32", kv_cache="fp32")
OPTIONS = EvaluateOptions(window_tokens=32, compute="float32")


def int4_release(source: Path, out: Path, gate: str = "", scale: str = "absmax") -> Path:
    recipe = parse_recipe(RECIPE.format(gate=gate, scale=scale).encode(), "tiny.yaml")
    memopt.compress(source, out, recipe=recipe, device="cpu")
    return out


@pytest.fixture(scope="module")
def glm4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "source" (tiny glm4_moe in block FP8), "release" (INT4), and texts."""
    folder = tmp_path_factory.mktemp("glm4")
    (folder / "tiny.gguf").write_bytes(tiny_llama_bytes())
    write_model(read_llama(folder / "tiny.gguf"), folder / "source", ExpertSplit(), use_fp8=True)
    int4_release(folder / "source", folder / "release")
    words = ["in the year 1984 an era on the road", "the end", "another one, a thing on the other", "over there"]
    lines = [json.dumps({"text": f"{text} {number}"}) for number, text in enumerate(words * 2)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def windows_of(folder: Path, vocabulary: int) -> tuple[Window, ...]:
    data = read_token_data(folder / "text.jsonl", vocabulary, text_encoder(folder / "source"))
    return document_windows(data, 32)


def transformers_logits(checkpoint: Path, scratch: Path, windows: tuple[Window, ...]) -> list[torch.Tensor]:
    """Float32 logits of every window, from the weights that `memopt dequantize` gives."""
    memopt.dequantize(checkpoint, scratch)
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.from_numpy(window.ids)[None], use_cache=False).logits[0] for window in windows]


def streamed_logits(folder: Path, windows: tuple[Window, ...], options: StreamOptions = FLOAT32) -> list[torch.Tensor]:
    with StoredModel(folder) as model, torch.no_grad():
        states = final_states(model, windows, options)
        rows = np.cumsum([0, *(len(window.ids) for window in windows)])
        return [states.logits(int(row), len(window.ids)) for row, window in zip(rows, windows, strict=False)]


@pytest.mark.parametrize("name", ["source", "release"])
def test_streamed_logits_are_transformers(glm4: Path, tmp_path: Path, name: str) -> None:
    windows = windows_of(glm4, 300)
    expected = transformers_logits(glm4 / name, tmp_path / "plain", windows)
    for found, wanted in zip(streamed_logits(glm4 / name, windows), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def test_mla_with_shared_selections_too(tmp_path: Path) -> None:
    """GLM-5's architecture: latent attention, an indexer whose selection later layers share, a dense first layer."""
    generator = np.random.default_rng(0)
    windows = tuple(Window(number, 0, generator.integers(0, 2048, 24)) for number in range(2))
    expected = transformers_logits(TINY_GLM5, tmp_path / "plain", windows)
    for found, wanted in zip(streamed_logits(TINY_GLM5, windows), expected, strict=True):
        assert (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < 2e-3


def test_bits_do_not_depend_on_what_runs_together(glm4: Path, tmp_path: Path) -> None:
    windows = windows_of(glm4, 300)
    together = streamed_logits(glm4 / "release", windows)
    alone = streamed_logits(
        glm4 / "release", windows, StreamOptions(compute="float32", kv_cache="fp32", batch_tokens=1)
    )
    on_disk = streamed_logits(
        glm4 / "release", windows, StreamOptions(compute="float32", kv_cache="fp32", batch_tokens=40, scratch=tmp_path)
    )
    for one, two, three in zip(together, alone, on_disk, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_kl_is_that_of_transformers_and_the_base_is_known_as_the_source(glm4: Path, tmp_path: Path) -> None:
    windows = windows_of(glm4, 300)
    base, release = (
        torch.cat([part[:-1] for part in transformers_logits(glm4 / name, tmp_path / name, windows)]).log_softmax(-1)
        for name in ("source", "release")
    )
    quality = evaluate_release(glm4 / "source", glm4 / "release", glm4 / "text.jsonl", OPTIONS)
    expected = float((base.exp() * (base - release)).sum(-1).double().mean())
    assert expected > 1e-4
    assert quality.kl.value == pytest.approx(expected, rel=2e-2)
    assert (quality.base.kind, quality.release.kind) == ("source", "release")
    assert quality.num_tokens == sum(window.num_predicted for window in windows)
    again = evaluate_release(glm4 / "source", glm4 / "release", glm4 / "text.jsonl", OPTIONS)
    assert render_quality(again) == render_quality(quality)


def test_a_copy_costs_nothing(glm4: Path, tmp_path: Path) -> None:
    memopt.compress(glm4 / "source", tmp_path / "copy", recipe="copy", device="cpu")
    quality = evaluate_release(glm4 / "source", tmp_path / "copy", glm4 / "text.jsonl", OPTIONS)
    assert (quality.kl_max, quality.top1.value, quality.perplexity_ratio.value) == (0.0, 1.0, 1.0)
    rounded = evaluate_release(
        glm4 / "source",
        tmp_path / "copy",
        glm4 / "text.jsonl",
        EvaluateOptions(window_tokens=32, compute="float32", kv_cache="fp8_e4m3"),
    )
    assert rounded.kl.value > 1e-6
    assert (rounded.conditions.base_kv_cache, rounded.conditions.kv_cache) == ("fp32", "fp8_e4m3")


def copied(glm4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(glm4 / "release", tmp_path / "release"))


def test_a_flipped_byte_of_the_release_is_found(glm4: Path, tmp_path: Path) -> None:
    release = copied(glm4, tmp_path)
    path = next(release.glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ContentError, match="not those of the ledger"):
        evaluate_release(glm4 / "source", release, glm4 / "text.jsonl", OPTIONS)
    ledger = release / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"layer": 1', b'"layer": 0', 1))
    with pytest.raises(ContentError, match=r"not the ledger that release\.json names"):
        StoredModel(release)


def test_wrong_pairs_are_refused(glm4: Path) -> None:
    data = glm4 / "text.jsonl"
    with pytest.raises(UsageError, match=r"no release\.json"):
        evaluate_release(glm4 / "release", glm4 / "source", data, OPTIONS)
    with pytest.raises(ShapeError, match="vocabularies of 2,048 and 300"):
        evaluate_release(TINY_GLM5, glm4 / "release", data, OPTIONS)
    long = EvaluateOptions(window_tokens=32, compute="float32")
    assert evaluate_release(glm4 / "release", glm4 / "release", data, long).base.kind == "release"


def test_the_command_writes_quality_and_the_gate_decides(glm4: Path, tmp_path: Path) -> None:
    call = ("--data", glm4 / "text.jsonl", "--window", "32", "--json")
    key = tmp_path / "k.pem"
    invoke("keygen", key, "--no-passphrase")
    strict = int4_release(glm4 / "source", tmp_path / "strict", "gate: {kl_max: 1.0e-9}")
    unmeasured = invoke("sign", strict, "--key", key)
    assert (unmeasured.code, "there is no quality.json" in unmeasured.refusal) == (5, True)
    failed = invoke("evaluate", glm4 / "source", strict, *call)
    assert failed.code == 5
    assert failed.verdict["code"] == "MEMOPT_QUALITY_GATE"
    assert "FAILS" in (strict / "report.html").read_text()
    assert invoke("sign", strict, "--key", key).code == 5
    assert not (strict / "model.sig").exists()

    loose = int4_release(glm4 / "source", tmp_path / "loose", "gate: {kl_max: 5, top1_min: 10%}", "mse")
    passed = invoke("evaluate", glm4 / "source", loose, *call)
    assert passed.code == 0
    assert [check["holds"] for check in passed.verdict["gate"]] == [True, True]
    quality = parse_quality((loose / "quality.json").read_bytes())
    assert quality.kl.value == pytest.approx(passed.verdict["kl"]["value"], rel=1e-6)
    assert invoke("sign", loose, "--key", key).code == 0
    assert invoke("verify", loose, "--key", tmp_path / "k.pub").code == 0
    again = invoke("evaluate", glm4 / "source", loose, *call)
    assert (again.code, again.verdict["code"]) == (2, "MEMOPT_OUTPUT")
    assert invoke("evaluate", glm4 / "source", loose, *call, "--no-write").code == 0

    # Measured on other weights: the figures of one release do not sign another.
    shutil.copy(loose / "quality.json", strict / "quality.json")
    swapped = invoke("sign", strict, "--key", key)
    assert (swapped.code, "measured on other weights" in swapped.refusal) == (4, True)


def test_a_signed_release_is_not_written_to(glm4: Path, tmp_path: Path) -> None:
    from memopt.compressor.evaluate.release_gate import refuse_signed

    release = copied(glm4, tmp_path)
    refuse_signed(release)
    (release / "model.sig").write_text("{}")
    with pytest.raises(OutputError, match=r"is signed already \(model\.sig\)"):
        refuse_signed(release)
