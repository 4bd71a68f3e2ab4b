"""`memopt plan`: exact sizes, fates, notes; the same numbers for people and machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults.small_source import FLAGS, OPTIONS, compress, make_small_source
from tiny_checkpoints import CONFIGS, TINY_GLM5

import memopt
from cli.invoke import invoke
from memopt.cli.plan import build_options


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("plan") / "source")


def test_planned_sizes_are_the_real_ones(source: Path, tmp_path: Path) -> None:
    verdict = invoke("plan", source, *FLAGS, "--json").verdict
    compress(source, tmp_path / "out")
    real = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {file["name"]: file["size_bytes"] for file in verdict["files"]} == real
    assert verdict["total_size_bytes"] == sum(real.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert verdict["quantization_config"] == config["quantization_config"]


def test_every_tensor_has_one_row(source: Path) -> None:
    verdict = invoke("plan", source, *FLAGS, "--json").verdict
    rows = verdict["tensors"]
    assert len({row["name"] for row in rows}) == len(rows) == sum(verdict["fates"].values())
    assert sum(row["size_bytes"] for row in rows) == verdict["weights_size_bytes"]
    assert {row["to"] for row in rows if row["role"] == "routed_expert"} == {"int4 group 32"}
    assert verdict["not_copied"] == [
        {"name": "modeling_custom.py", "reason": "code is not copied unless it is allowed (--allow-code)"}
    ]


def test_people_read_the_same_numbers(source: Path) -> None:
    told = invoke("plan", source, *FLAGS)
    verdict = invoke("plan", source, *FLAGS, "--json").verdict
    assert (told.code, told.stderr) == (0, "")
    for file in verdict["files"][:6]:
        assert f"{file['name']:<44} {file['size_bytes']:>18,} B" in told.stdout
    for words in (
        "Engine lint: passes for vllm, sglang, transformers",
        "vLLM #48905",
        "not copied: modeling_custom.py",
    ):
        assert words in told.stdout


def test_planning_writes_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    invoke("plan", source, *FLAGS)
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before


def test_options_reach_the_plan(source: Path) -> None:
    shown = invoke(
        "plan", source, "--tp", "2", "--max-file-size", "1MiB", "--allow-code", "--name", "mine", "--recipe",
        "glm-5.1-int4", "--json",
    ).verdict  # fmt: skip
    assert (shown["tensor_parallel"], shown["recipe"], shown["not_copied"]) == (2, "glm-5.1-int4", [])
    assert build_options(2, 2**20, True, "mine") == memopt.PlanOptions(2**20, 2, True, "mine")
    assert build_options(None, None, False, None) == memopt.PlanOptions()


def test_a_published_config_alone() -> None:
    verdict = invoke("plan", "--config", CONFIGS / "glm-5.2-fp8.json", "--json").verdict
    assert (verdict["source_tensors"], round(verdict["weights_size_bytes"] / 2**30, 1)) == (118_629, 419.9)


def test_more_workers_shorten_the_estimate() -> None:
    one, eight = (
        invoke("plan", TINY_GLM5, "--workers", str(workers), "--json").verdict["estimate"] for workers in (1, 8)
    )
    assert one["seconds"] == pytest.approx(8 * eight["seconds"])
    assert (one["workers"], eight["workers"]) == (1, 8)


def test_the_plan_of_a_release_is_a_copy(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    memopt.compress(source, out, options=OPTIONS, device="cpu")
    verdict = invoke("plan", out, "--recipe", "copy", "--json").verdict
    assert set(verdict["fates"]) == {"copied"}
