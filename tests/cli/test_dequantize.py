"""`memopt dequantize`: a release becomes a BF16 checkpoint, with the same manners as compress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults.small_source import FLAGS, compress, make_small_source
from faults.trees import tree

import memopt
from cli.invoke import invoke, run_command


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dequantize")
    compress(make_small_source(folder / "source"), folder / "release")
    return folder / "release"


def test_every_weight_becomes_bf16(release: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = invoke("dequantize", release, out, "--max-file-size", "300KB", "--workers", "2")
    assert made.code == 0
    assert made.stdout.splitlines()[0].startswith(f"made        {out}: ")
    assert made.stdout.splitlines()[-1] == f"next        memopt inspect {out}"
    found = memopt.inspect(out)
    assert ({row.format for row in found.roles}, found.problems) == ({"BF16", "F32"}, ())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert len(list(out.glob("*.safetensors"))) > 3


def test_workers_and_the_real_command_do_not_change_bytes(release: Path, tmp_path: Path) -> None:
    invoke("dequantize", release, tmp_path / "one", "--workers", "1")
    assert run_command("dequantize", release, tmp_path / "four", "--workers", "4").code == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "four")


def test_one_verdict(release: Path, tmp_path: Path) -> None:
    verdict = invoke("dequantize", release, tmp_path / "out", "--json").verdict
    assert (verdict["command"], verdict["status"], verdict["errors_by_role"]) == ("dequantize", "ok", {})
    again = invoke("dequantize", release, tmp_path / "out", "--json").verdict
    assert again["was_complete"] is True


def test_the_files_of_the_release_itself_stay_behind(release: Path, tmp_path: Path) -> None:
    for name in ("SHA256SUMS", "model.sig", "memopt.manifest.json", "quality.json"):
        (release / name).write_text("{}")
    invoke("dequantize", release, tmp_path / "out")
    names = set(tree(tmp_path / "out"))
    assert not names & {"SHA256SUMS", "model.sig", "memopt.manifest.json", "quality.json"}
    own = json.loads((tmp_path / "out" / "release.json").read_text())
    assert own["identity"]["name"] == "dequantize"


def test_the_output_of_compress_is_not_mixed_with_it(release: Path, tmp_path: Path) -> None:
    refused = invoke("dequantize", release, release)
    assert (refused.code, "MEMOPT_OUTPUT" in refused.refusal) == (2, True)
    invoke("dequantize", release, tmp_path / "out")
    mixed = invoke("compress", release, tmp_path / "out", *FLAGS, "--recipe", "copy")
    assert (mixed.code, "is not empty" in mixed.refusal) == (2, True)


def test_options_of_compress_are_not_taken(release: Path, tmp_path: Path) -> None:
    refused = invoke("dequantize", release, tmp_path / "out", "--recipe", "copy")
    assert (refused.code, "--recipe" in refused.refusal) == (2, True)
