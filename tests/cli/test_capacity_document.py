"""docs/capacity.md: its commands print the figures that stand beside them, and its schema is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_plans import plan_of, published

from cli.invoke import invoke
from memopt.cli.plan import plan_command
from memopt.compressor.capacity.capacity_plan import plan_capacity
from memopt.compressor.capacity.gpus import GIB, GPUS, gpu_named
from memopt.compressor.capacity.request import CapacityRequest

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "capacity.md").read_text()


def rows() -> dict[str, list[str]]:
    """Command of the table of published figures -> words that it must print."""
    found: dict[str, list[str]] = {}
    command = ""
    for line in DOCUMENT.partition("## Published figures")[2].partition("## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or "`" not in cells[2]:
            continue
        if cells[1].startswith("`"):
            command = cells[1].strip("`")
        found.setdefault(command, []).extend(re.findall(r"`([^`]+)`", cells[2]))
    return found


def test_the_table_has_every_published_figure() -> None:
    words = [word for figures in rows().values() for word in figures]
    assert len(rows()) == 5
    for figure in ("703.7 GiB", "419.9 GiB", "52.5 GiB", "88.0 GiB", "1,176,384", "70,272 B", "35,136 B", "32.0 GiB"):
        assert figure in words


# Options of every plan, that say nothing of capacity.
GENERAL_OPTIONS = {
    "--recipe",
    "--config",
    "--layout",
    "--max-file-size",
    "--allow-code",
    "--name",
    "--workers",
    "--json",
}


def test_every_option_and_gpu_is_told() -> None:
    section = DOCUMENT.partition("## Options")[2].partition("\n## ")[0]
    options = {option for parameter in plan_command.params for option in parameter.opts if option.startswith("--")}
    assert set(re.findall(r"`(--[a-z0-9-]+)`", section)) == options - GENERAL_OPTIONS
    assert set(GPUS) <= set(re.findall(r"`([a-z0-9-]+)`", section))


def bounds() -> list[tuple[str, int, int, str]]:
    """Rows of the table of decode bounds: model, requests, tokens, and the words that stand beside them."""
    rows = re.findall(r"^\| (GLM|Kimi)[^,|]*, (\d+) x ([\d,]+) \| (.*) \|$", DOCUMENT, re.MULTILINE)
    return [(model, int(number), int(length.replace(",", "")), words) for model, number, length, words in rows]


@pytest.mark.slow
def test_the_table_of_bounds_is_what_the_model_says() -> None:
    plans = {
        "GLM": plan_of(published("glm-5.2-fp8"), "glm-5.2-int4", tensor_parallel=8),
        "Kimi": plan_of(published("kimi-k2.6-int4"), "kimi-k2.6", tensor_parallel=8),
    }
    assert len(bounds()) == 4
    for model, number, length, words in bounds():
        asked = CapacityRequest(gpu=gpu_named("h200"), context=length, requests=number)
        (stage,) = plan_capacity(plans[model], asked).stages
        assert stage.speed is not None
        step = stage.speed.step
        assert step.seconds is not None
        assert step.binds is not None
        sizes = (step.expert_bytes, step.other_weight_bytes, step.kv_bytes)
        read = " / ".join(f"{size / GIB:.1f}" for size in sizes)
        binds = step.binds.removeprefix("memory bandwidth: ")
        assert words == f"{read} GiB | {step.seconds * 1e3:.2f} ms | {binds}"


@pytest.mark.slow
@pytest.mark.parametrize("command", rows(), ids=lambda command: command[:60])
def test_the_commands_print_their_figures(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    told = invoke("plan", *command.split())
    assert told.code == 0, told.stderr
    for words in rows()[command]:
        assert words in told.stdout, words
