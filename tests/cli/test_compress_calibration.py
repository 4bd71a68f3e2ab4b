"""`memopt compress --calibration`: text through the checkpoint's tokenizer, signed and verified; and its refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from calibrated_runs import experts, recipe
from tiny_checkpoints import TINY_GLM5, make_checkpoint

from cli.invoke import invoke
from memopt.errors import ExitCode

WORDS = "A release is compressed, signed, and served. def rank(x): return x + 1\n"
NUMBERS = ("--samples", "4", "--seq-len", "32", "--coverage-tokens", "4", "--calibration-device", "cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the tokenizer of the example."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("source") / "checkpoint",
        "glm-5.1-fp8",
        hidden_size=128,
        vocab_size=2048,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_GLM5 / name, folder / name)
    return folder


@pytest.fixture
def form(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    chosen = recipe([experts("weighted")], kv_cache={"format": "fp8_e4m3", "scales": "calibrated"})
    path.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_none=True)))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number}: {WORDS}" * 8}) + "\n" for number in range(8)))
    return path


def test_text_becomes_a_signed_release_without_a_word_of_it(
    source: Path, form: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert invoke("keygen", tmp_path / "release.pem", "--no-passphrase").code == 0
    key = ("--key", tmp_path / "release.pem")
    made = invoke("compress", source, out, "--recipe", form, "--calibration", text, *NUMBERS, *key, "--tp", "2")
    assert made.code == 0, made.stderr
    assert "calibrate" in made.stderr
    (said,) = (line for line in made.stdout.splitlines() if line.startswith("calibrated  routed_expert: output error "))
    assert "; 0 of 12 weights fell back; " in said
    assert invoke("verify", out, "--key", tmp_path / "release.pub").code == 0
    for path in out.rglob("*.json*"):
        assert "compressed, signed, and served" not in path.read_text(), path
    table = json.loads((out / "release.json").read_text())
    assert table["calibration"]["tokens"] == 4 * 32
    assert table["formats"]["kv_cache"] == "fp8_e4m3, calibrated scales"
    again = invoke("compress", source, out, "--recipe", form, "--calibration", text, *NUMBERS, *key, "--tp", "2")
    assert again.code == 0
    assert "complete already" in again.stdout


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "is empty"),
        ('{"text": "too short"}\n', "4 samples of 32 need"),
        ('{"words": "no text"}\n', "'text' is no string"),
        (b'{"text": "\xff"}\n', "is not UTF-8"),
    ],
)
def test_data_that_is_no_text_is_refused_before_a_layer_runs(
    source: Path, form: Path, tmp_path: Path, content: str | bytes, fault: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(content.encode() if isinstance(content, str) else content)
    refused = invoke("compress", source, tmp_path / "out", "--recipe", form, "--calibration", data, *NUMBERS)
    assert refused.code == ExitCode.MALFORMED
    assert fault in refused.refusal
    assert not (tmp_path / "out").exists()


def test_options_without_data_and_data_without_need(source: Path, form: Path, text: Path, tmp_path: Path) -> None:
    alone = invoke("compress", source, tmp_path / "out", "--samples", "4")
    assert alone.code == ExitCode.USAGE
    assert "without --calibration" in alone.refusal
    needless = invoke("compress", source, tmp_path / "out", "--tp", "1", "--calibration", text, *NUMBERS)
    assert needless.code == ExitCode.USAGE
    assert "needs no calibration data" in needless.refusal
    without = invoke("compress", source, tmp_path / "out", "--recipe", form)
    assert without.code == ExitCode.USAGE
    assert "give --calibration" in without.refusal
    long = invoke(
        "compress", source, tmp_path / "out", "--recipe", form, "--calibration", text, "--seq-len", "5000",
        "--samples", "1",
    )  # fmt: skip
    assert long.code == ExitCode.USAGE
    assert "made for 4,096" in long.refusal


def test_of_several_ranks_one_gives_the_verdict(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("compress", source, tmp_path / "out", "--samples", "4", "--json")
    for rank, num_verdicts in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        refused = invoke(*call)
        assert (refused.code, len(refused.stdout.splitlines())) == (ExitCode.USAGE, num_verdicts)
        assert "without --calibration" in refused.refusal
