"""Releases against their source, streamed a layer at a time: transformers' logits, bits, gate, refusals."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.invoke import invoke
from gguf_files import tiny_llama_bytes
from safetensors.torch import save_file
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
from memopt.errors import (
    ContentError,
    DataFileError,
    DiskFullError,
    OutputError,
    QualityGateError,
    ShapeError,
    UsageError,
)

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


def transformers_logits(
    checkpoint: Path, scratch: Path, windows: tuple[Window, ...], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Logits of every window, from the weights that `memopt dequantize` gives."""
    memopt.dequantize(checkpoint, scratch)
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=dtype, experts_implementation="eager").eval()
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


def test_every_figure_is_that_of_transformers_in_float64(glm4: Path, tmp_path: Path) -> None:
    windows = windows_of(glm4, 300)
    base, release = (
        torch.cat(
            [part[:-1] for part in transformers_logits(glm4 / name, tmp_path / name, windows, torch.float64)]
        ).log_softmax(-1)
        for name in ("source", "release")
    )
    came = torch.cat([torch.from_numpy(window.ids[1:]) for window in windows])[:, None]
    quality = evaluate_release(glm4 / "source", glm4 / "release", glm4 / "text.jsonl", OPTIONS)
    kl = (base.exp() * (base - release)).sum(-1)
    assert kl.mean() > 1e-4
    assert quality.kl.value == pytest.approx(kl.mean().item(), rel=1e-3)
    assert quality.kl_max == pytest.approx(kl.max().item(), rel=1e-3)
    same = base.argmax(-1) == release.argmax(-1)
    assert quality.top1.value == pytest.approx(same.double().mean().item(), abs=1 / len(same))
    for found, log_p in ((quality.base_perplexity, base), (quality.release_perplexity, release)):
        assert found.value == pytest.approx(torch.exp(-log_p.gather(-1, came).mean()).item(), rel=1e-4)
    # One token of context, and the token after it.
    first = torch.tensor([index == 0 for window in windows for index in range(window.num_predicted)])
    assert quality.by_position[0].kl == pytest.approx(kl[first].mean().item(), rel=1e-3)
    worst = quality.worst[0]
    window = next(window for window in windows if (window.document, window.start) == (worst.document, 0))
    assert worst.base_surprise == pytest.approx(
        -base[int(kl.argmax())].gather(-1, torch.from_numpy(window.ids[worst.position][None])).item(), rel=1e-4
    )
    assert (quality.base.kind, quality.release.kind) == ("source", "release")
    assert quality.num_tokens == len(came)
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


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("ledger.jsonl", b'{"layer": 1}\n', "a source must have name and sha256"),
        ("ledger.jsonl", b'{"sources": []}\n', "has no list of outputs"),
        ("ledger.jsonl", b'{"sources": [3], "outputs": []}\n', "a source must have name and sha256"),
        ("ledger.jsonl", b'{"sources": [{"name": "a", "sha256": "A"}], "outputs": []}\n', "a source must have"),
        ("ledger.jsonl", b'{"sources": [], "outputs": [3]}\n', "an output must have"),
        ("ledger.jsonl", b"{{\n", "not strict JSON"),
        ("ledger.jsonl", b"", "not the ledger that release"),
        ("release.json", b"{}", "not the ledger that release"),
        ("release.json", b'{"ledger": 3}', "not the ledger that release"),
        ("release.json", b"[]", "a JSON object is needed"),
        ("release.json", b'{"recipe": {"gate": {"kl_max": -1}}}', "recipe.gate"),
        ("release.json", b'{"recipe": {"gate": 3}}', "recipe.gate"),
    ],
)
def test_broken_files_of_a_release_are_refused_before_any_work(
    glm4: Path, tmp_path: Path, name: str, raw: bytes, words: str
) -> None:
    release = copied(glm4, tmp_path)
    (release / name).write_bytes(raw)
    refused = invoke("evaluate", glm4 / "source", release, "--data", glm4 / "text.jsonl")
    assert refused.code in (4, 8)
    assert words in refused.refusal


def test_a_folder_whose_name_is_no_text_is_evaluated(glm4: Path, tmp_path: Path) -> None:
    release = shutil.copytree(glm4 / "release", tmp_path / os.fsdecode(b"caf\xe9"))
    done = invoke("evaluate", glm4 / "source", release, "--data", glm4 / "text.jsonl", "--window", "32")
    assert done.code == 0
    assert parse_quality((release / "quality.json").read_bytes()).release.name == "caf?"


def test_data_of_the_calibration_is_refused(glm4: Path, tmp_path: Path) -> None:
    release = copied(glm4, tmp_path)
    digest = hashlib.sha256((glm4 / "text.jsonl").read_bytes()).hexdigest()
    table = json.loads((release / "release.json").read_text())
    (release / "release.json").write_text(json.dumps(table | {"calibration": {"data_sha256": digest}}))
    with pytest.raises(DataFileError, match=r"text\.jsonl: is what the release was calibrated on"):
        evaluate_release(glm4 / "source", release, glm4 / "text.jsonl", OPTIONS)
    (release / "release.json").write_text(json.dumps(table | {"calibration": {"data_sha256": "0" * 64}}))
    evaluate_release(glm4 / "source", release, glm4 / "text.jsonl", OPTIONS)


def test_a_full_disk_is_told(glm4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match="bytes of hidden states: No space left"):
        evaluate_release(glm4 / "source", glm4 / "release", glm4 / "text.jsonl", replace(OPTIONS, scratch=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_scratch_folder_that_is_not_there_is_told_before_any_work(glm4: Path, tmp_path: Path) -> None:
    call = ("evaluate", glm4 / "source", glm4 / "release", "--data", glm4 / "text.jsonl", "--no-write")
    refused = invoke(*call, "--scratch", tmp_path / "none")
    assert (refused.code, "none: there is no such folder" in refused.refusal) == (2, True)


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
    verified = invoke("verify", loose, "--key", tmp_path / "k.pub", "--json")
    assert verified.code == 0
    roles = {file["path"]: file["role"] for file in json.loads((loose / "memopt.manifest.json").read_text())["files"]}
    assert (roles["quality.json"], roles["report.html"]) == ("quality", "quality")
    again = invoke("evaluate", glm4 / "source", loose, *call)
    assert (again.code, again.verdict["code"]) == (2, "MEMOPT_OUTPUT")
    assert invoke("evaluate", glm4 / "source", loose, *call, "--no-write").code == 0

    # The figures of one release do not sign another; they do sign its copy.
    copy = int4_release(glm4 / "source", tmp_path / "copy", "gate: {kl_max: 5, top1_min: 10%}", "mse")
    for name in ("quality.json", "report.html"):
        shutil.copy(loose / name, copy / name)
    assert invoke("sign", copy, "--key", key).code == 0
    shutil.copy(loose / "quality.json", strict / "quality.json")
    swapped = invoke("sign", strict, "--key", key)
    assert (swapped.code, "measured on other weights" in swapped.refusal) == (4, True)


def test_a_release_that_was_compared_with_itself_is_not_signed(glm4: Path, tmp_path: Path) -> None:
    gated = int4_release(glm4 / "source", tmp_path / "gated", "gate: {kl_max: 5}")
    call = ("--data", glm4 / "text.jsonl", "--window", "32")
    refused = invoke("evaluate", gated, gated, *call)
    assert (refused.code, "KL, upper end" in refused.stderr, "BASE is not the checkpoint" in refused.stderr) == (
        5,
        True,
        True,
    )
    with pytest.raises(QualityGateError, match="not measured against the checkpoint that the release was made from"):
        memopt.sign_release(gated, [])


def test_figures_hold_for_rank_files_of_the_same_weights(tmp_path: Path) -> None:
    """GLM-5 in miniature: evaluated with hub files, signed without them."""
    save_file({"ids": torch.randint(0, 2048, (6, 12))}, tmp_path / "ids.safetensors")
    (tmp_path / "r.yaml").write_text(
        RECIPE.format(gate="gate: {kl_max: 5}", scale="absmax").replace("glm4_moe", "glm_moe_dsa")
    )
    recipe = ("--recipe", tmp_path / "r.yaml", "--tp", "2")
    for name, layout in (("both", "both"), ("ranks", "tp")):
        assert invoke("compress", TINY_GLM5, tmp_path / name, *recipe, "--layout", layout).code == 0
    invoke("keygen", tmp_path / "k.pem", "--no-passphrase")
    done = invoke("evaluate", TINY_GLM5, tmp_path / "both", "--data", tmp_path / "ids.safetensors", "--json")
    assert (done.code, done.verdict["base"]["kind"]) == (0, "source")
    assert invoke("sign", tmp_path / "ranks", "--key", tmp_path / "k.pem").code == 5
    for name in ("quality.json", "report.html"):
        shutil.copy(tmp_path / "both" / name, tmp_path / "ranks" / name)
    assert invoke("sign", tmp_path / "ranks", "--key", tmp_path / "k.pem").code == 0
    assert invoke("verify", tmp_path / "ranks", "--key", tmp_path / "k.pub").code == 0


def test_compress_does_not_sign_what_nothing_measured(glm4: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.format(gate="gate: {kl_max: 5}", scale="absmax"))
    invoke("keygen", tmp_path / "k.pem", "--no-passphrase")
    call = ("compress", glm4 / "source", tmp_path / "out", "--recipe", tmp_path / "r.yaml")
    refused = invoke(*call, "--key", tmp_path / "k.pem")
    assert refused.code == 2
    assert "recipe tiny-int4 sets a quality gate" in refused.refusal
    assert "then memopt evaluate SRC OUT" in refused.refusal
    assert not (tmp_path / "out").exists()


def test_a_signed_release_is_not_written_to(glm4: Path, tmp_path: Path) -> None:
    from memopt.compressor.evaluate.release_gate import refuse_signed

    release = copied(glm4, tmp_path)
    refuse_signed(release)
    (release / "model.sig").write_text("{}")
    with pytest.raises(OutputError, match=r"is signed already \(model\.sig\)"):
        refuse_signed(release)
