"""`memopt inspect`: what it tells people and machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults.small_source import make_small_source
from tiny_checkpoints import NAMES, TINY_GLM5, make_checkpoint

import memopt
from cli.invoke import invoke
from memopt.cli.inspect import problem_exit_code
from memopt.cli.output import size_text


def test_the_example_is_told_in_words() -> None:
    told = invoke("inspect", TINY_GLM5)
    assert told.code == 0
    assert told.stderr == ""
    found = memopt.inspect(TINY_GLM5)
    for words in (
        "glm_moe_dsa (GlmMoeDsaForCausalLM)",
        "5 + 1 MTP",
        "405 in 3 files",
        size_text(found.size_bytes),
        "glm-5.2-int4",
        "fp8-block 128x128",
        "no problems found",
    ):
        assert words in told.stdout, words
    assert max(map(len, told.stdout.splitlines())) <= 160


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_holds_what_python_gives(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", name)
    verdict = invoke("inspect", source, "--json").verdict
    found = memopt.inspect(source)
    assert (verdict["schema"], verdict["status"], verdict["exit_code"]) == ("memopt.verdict/1", "ok", 0)
    assert (verdict["family"], verdict["size_bytes"]) == (found.family, found.size_bytes)
    assert verdict["num_stored_tensors"] == found.num_stored_tensors == sum(1 for _ in _stored(source))
    assert verdict["tensor_parallel_degrees"] == list(found.tensor_parallel_degrees)
    assert verdict["suggested_recipe"] == found.suggested_recipe
    assert sum(row["size_bytes"] for row in verdict["roles"]) == found.size_bytes
    assert "code" not in verdict


def _stored(source: Path) -> dict[str, str]:
    index: dict[str, dict[str, str]] = json.loads((source / "model.safetensors.index.json").read_text())
    return index["weight_map"]


def test_problems_are_listed_and_set_the_exit_code(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8", num_files=3)
    lost, half, _ = sorted(source.glob("*.safetensors"))
    lost.unlink()
    half.write_bytes(half.read_bytes()[:-1])
    told = invoke("inspect", source)
    assert told.code == 6
    assert "2 problems" in told.stdout
    assert f"MEMOPT_MISSING_FILE  there is no {lost.name}" in told.stdout
    assert "MEMOPT_TRUNCATED" in told.stdout
    verdict = invoke("inspect", source, "--json").verdict
    assert (verdict["status"], verdict["code"], verdict["exit_code"]) == ("refused", "MEMOPT_MISSING_FILE", 6)
    assert [problem["code"] for problem in verdict["problems"]] == ["MEMOPT_MISSING_FILE", "MEMOPT_TRUNCATED"]


def test_a_long_list_of_problems_is_cut_for_people_only(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 256}))
    told = invoke("inspect", source)
    problems = invoke("inspect", source, "--json").verdict["problems"]
    assert len(problems) > 20
    assert f"{len(problems):,} problems" in told.stdout
    assert f"and {len(problems) - 20:,} more (--json lists all)" in told.stdout
    assert told.stdout.count("MEMOPT_SHAPE") == 20


@pytest.mark.parametrize("name", ["[/red]", "[bold]x[/bold]", "\x1b[2Jx", "a\u2028b", ""])
def test_a_hostile_architecture_is_text(name: str, tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    told = invoke("inspect", source)
    assert told.code == 0
    assert "\x1b" not in told.stdout
    if name.isprintable() and name:
        assert f"({name})" in told.stdout


def test_every_code_has_its_exit_code() -> None:
    from memopt import errors

    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.MemoptError):
            assert problem_exit_code(error.code) == int(error.exit_code)
    assert problem_exit_code("MEMOPT_NEVER_HEARD_OF") == 1
