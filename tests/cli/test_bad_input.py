"""Every refusal is one line with a stable code and the right exit code, never a traceback; with --json one verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from faults.small_source import FLAGS, make_small_source
from tiny_checkpoints import make_checkpoint

import memopt.cli.plan as plan_command
from cli.bad_checkpoints import BAD_CHECKPOINTS, BadCheckpoint
from cli.invoke import Outcome, invoke, run_command
from memopt.cli.output import VERDICT_SCHEMA

RECIPE = """name: x
description: x
families: [glm_moe_dsa]
rules:
  - roles: [routed_expert]
    format: {type: int4}
default: bf16
"""
KEYS = {"schema", "command", "status", "exit_code", "code", "message", "remedy", "tensor", "file"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("bad-input") / "good")


@pytest.fixture
def source(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "source")


def check(outcome: Outcome, command: str, code: str, exit_code: int, words: tuple[str, ...]) -> None:
    """A refusal in both forms: the line for people, the verdict for machines."""
    line = outcome.refusal
    assert line.startswith(f"memopt {command}: {code}: "), line
    assert line.isprintable()
    verdict = outcome.verdict
    assert set(verdict) == KEYS
    assert (verdict["schema"], verdict["command"], verdict["status"]) == (VERDICT_SCHEMA, command, "refused")
    assert (verdict["code"], verdict["exit_code"], outcome.code) == (code, exit_code, exit_code)
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("case", BAD_CHECKPOINTS, ids=lambda case: case.name)
def test_a_bad_checkpoint(case: BadCheckpoint, source: Path, tmp_path: Path) -> None:
    case.spoil(source)
    expected = (case.code, case.exit_code, case.words)
    check(invoke("plan", source, "--json", "--tp", "1"), "plan", *expected)
    check(invoke("compress", source, tmp_path / "out", *FLAGS, "--json"), "compress", *expected)
    check(invoke("dequantize", source, tmp_path / "out", "--json"), "dequantize", *expected)
    assert not (tmp_path / "out").exists()
    inspected = invoke("inspect", source, "--json")
    assert (inspected.code, inspected.verdict["exit_code"]) == (case.exit_code, case.exit_code)
    assert (inspected.verdict["status"], inspected.verdict["code"]) == ("refused", case.code)
    plain = invoke("inspect", source)
    assert plain.code == case.exit_code
    assert case.code in plain.stdout + plain.stderr


RECIPES = {
    "unknown name": (None, "MEMOPT_RECIPE", ("there is no recipe", "glm-5.2-int4")),
    "another family": (RECIPE.replace("glm_moe_dsa", "kimi_k2"), "MEMOPT_RECIPE", ("for kimi_k2", "is glm_moe_dsa")),
    "unknown family": (RECIPE.replace("glm_moe_dsa", "llama"), "MEMOPT_RECIPE", ("unknown family llama",)),
    "unknown key": (RECIPE + "speed: 5\n", "MEMOPT_RECIPE", ("speed",)),
    "unknown role": (RECIPE.replace("routed_expert", "experts"), "MEMOPT_RECIPE", ("rules.0.roles.0",)),
    "matches nothing": (
        RECIPE.replace("[routed_expert]", "[vision]"),
        "MEMOPT_RECIPE",
        ("roles vision", "matches no tensor"),
    ),
    "not YAML": ("{", "MEMOPT_RECIPE", ("is not a recipe",)),
    "empty": ("", "MEMOPT_RECIPE", ("recipe",)),
    "aliases": ("a: &a [x]\nb: *a\n", "MEMOPT_RECIPE", ("aliases",)),
    "a bad pattern": (RECIPE.replace("roles: [routed_expert]", 'names: ["("]'), "MEMOPT_RECIPE", ("rules.0.names",)),
    "group 48": (RECIPE.replace("{type: int4}", "{type: int4, group_size: 48}"), "MEMOPT_RECIPE", ("group_size",)),
    "asymmetric": (RECIPE.replace("{type: int4}", "{type: int4, zero_point: 1}"), "MEMOPT_RECIPE", ("zero_point",)),
    "norms as INT4": (RECIPE.replace("routed_expert", "norm"), "MEMOPT_RECIPE", ("only Linear weights can be INT4",)),
    "router as INT4": (RECIPE.replace("[routed_expert]", "[router]") + "engines: [vllm]\n", "MEMOPT_LINT", ("router",)),
    "TP in the recipe": (RECIPE + "tensor_parallel: 64\n", "MEMOPT_ALIGNMENT", ("/ 64 ranks", "legal")),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe(name: str, good: Path, tmp_path: Path) -> None:
    text, code, words = RECIPES[name]
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    check(invoke("plan", good, "--recipe", file, "--json"), "plan", code, 2, words)
    refused = invoke("compress", good, tmp_path / "out", "--recipe", file, "--json")
    check(refused, "compress", code, 2, words)
    assert not (tmp_path / "out").exists()


def test_a_group_that_does_not_divide(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", moe_intermediate_size=192)
    file = tmp_path / "mine.yaml"
    recipe = RECIPE.replace("glm_moe_dsa", "glm4_moe").replace("{type: int4}", "{type: int4, group_size: 128}")
    file.write_text(recipe)
    words = ("down_proj.weight", "192 columns are not a multiple of group 128", "legal groups: 32, 64")
    check(invoke("plan", source, "--recipe", file, "--json"), "plan", "MEMOPT_ALIGNMENT", 2, words)


CALLS = {
    "unknown command": (["frobnicate"], "", ("No such command 'frobnicate'",)),
    "unknown option": (["compress", "SRC", "OUT", "--fast"], "compress", ("--fast",)),
    "no output": (["compress", "SRC"], "compress", ("Missing argument 'OUT'",)),
    "too many": (["inspect", "SRC", "more"], "inspect", ("more",)),
    "size of nothing": (
        ["compress", "SRC", "OUT", "--max-file-size", "4 parsecs"],
        "compress",
        ("'4 parsecs' is not a size",),
    ),
    "size nan": (["plan", "SRC", "--max-file-size", "nan"], "plan", ("'nan' is not a size",)),
    "size infinite": (["plan", "SRC", "--max-file-size", "1e999"], "plan", ("'1e999' is not a size",)),
    "size zero": (["plan", "SRC", "--max-file-size", "0"], "plan", ("0 bytes",)),
    "size negative": (["compress", "SRC", "OUT", "--max-file-size", "-5GB"], "compress", ("-5000000000 bytes",)),
    "no workers": (["compress", "SRC", "OUT", "--workers", "0"], "compress", ("'--workers'",)),
    "workers as text": (["dequantize", "SRC", "OUT", "--workers", "many"], "dequantize", ("'many'",)),
    "tp zero": (["plan", "SRC", "--tp", "0"], "plan", ("'--tp'",)),
    "unknown device": (["compress", "SRC", "OUT", "--device", "tpu"], "compress", ("'tpu'",)),
    "two sources": (["plan", "SRC", "--config", "SRC/config.json"], "plan", ("SRC or --config",)),
    "no source": (["plan"], "plan", ("SRC or --config",)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_line_too(name: str, good: Path, tmp_path: Path) -> None:
    arguments, command, words = CALLS[name]
    places = {"SRC": str(good), "OUT": str(tmp_path / "out"), "SRC/config.json": str(good / "config.json")}
    refused = invoke(*(places.get(argument, argument) for argument in arguments), "--json")
    assert (refused.code, refused.verdict["code"], refused.verdict["command"]) == (2, "MEMOPT_USAGE", command)
    assert refused.refusal.startswith(f"memopt {command}: MEMOPT_USAGE: ".replace("memopt :", "memopt:"))
    for word in words:
        assert word in refused.refusal
    assert not (tmp_path / "out").exists()


def test_tp_that_does_not_divide(good: Path) -> None:
    words = ("/ 8 ranks", "legal: tensor-parallel 1, 2, 4")
    check(invoke("plan", good, "--tp", "8", "--json"), "plan", "MEMOPT_ALIGNMENT", 2, words)


def test_a_file_as_source(good: Path, tmp_path: Path) -> None:
    check(invoke("plan", good / "config.json", "--json"), "plan", "MEMOPT_USAGE", 2, ("there is no checkpoint folder",))


@pytest.mark.parametrize("content", [None, "", "[]", '{"model_type": "llama"}'])
def test_a_bad_config_alone(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    refused = invoke("plan", "--config", file, "--json")
    assert refused.code in {6, 8, 9}
    assert (refused.verdict["exit_code"], "config.json" in refused.refusal) == (refused.code, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; others: the next test")
def test_an_unreadable_file_as_another_user(good: Path) -> None:
    nobody = 65534
    program = (
        "import os, sys; from memopt.cli.main import main; import memopt.compressor.api;"
        "os.setuid(int(sys.argv.pop(1))); main()"
    )
    with tempfile.TemporaryDirectory() as folder:
        # Not below tmp_path, which only its owner may enter.
        Path(folder).chmod(0o755)
        source = shutil.copytree(good, Path(folder) / "source")
        next(source.glob("*.safetensors")).chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", program, str(nobody), "inspect", str(source), "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["code"]) == (7, "MEMOPT_IO"), done.stderr
    assert "Permission denied" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(source: Path) -> None:
    next(source.glob("*.safetensors")).chmod(0)
    refused = invoke("plan", source, "--json")
    assert (refused.code, refused.verdict["code"]) == (7, "MEMOPT_IO")


def test_an_unexpected_fault_is_one_line(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr(plan_command, "build_options", fail)
    refused = invoke("plan", good, "--json")
    assert (refused.code, refused.verdict["code"]) == (1, "MEMOPT_INTERNAL")
    assert "ZeroDivisionError: first second (a bug: please report it" in refused.refusal
    monkeypatch.setenv("MEMOPT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        invoke("plan", good)


def test_a_fault_of_the_system_is_one_line(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "/dev/broken")

    monkeypatch.setattr(plan_command, "build_options", fail)
    check(invoke("plan", good, "--json"), "plan", "MEMOPT_IO", 7, ("/dev/broken: Input/output error",))


def test_the_real_command_says_the_same(good: Path, tmp_path: Path) -> None:
    """The matrix above runs in this process; the entry point adds nothing."""
    calls = [
        ("plan", str(good), "--tp", "8", "--json"),
        ("compress", str(good), "--json"),
        ("inspect", str(tmp_path / "no")),
    ]
    for call in calls:
        assert run_command(*call) == invoke(*call)
