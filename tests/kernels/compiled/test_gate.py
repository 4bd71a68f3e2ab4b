"""Every kernel compiles for its targets and keeps its budget. `make gate`; nothing here needs a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

import pytest
from child_process import ChildResult, started

from compiled.budget import FOLDER, findings, read_budget, rewrite
from compiled.build import Figures

TESTS = Path(__file__).parents[1]
TOPICS = sorted(path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py"))
TIMEOUT_SECONDS = 600.0
FIGURES_MARK = "FIGURES "

Children = dict[str, Future[ChildResult]]


@pytest.fixture(scope="module")
def children(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """The children that build the topics that this run selected."""
    selected = {getattr(item, "callspec", None) and item.callspec.params.get("topic") for item in request.session.items}
    commands = {topic: ["-m", "compiled.build", f"compiled.cases_{topic}"] for topic in TOPICS if topic in selected}
    # A cache of its own: a kernel that was compiled before would prove nothing.
    environment = {"PYTHONPATH": str(TESTS), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    with started(commands, environment, TIMEOUT_SECONDS) as running:
        yield running


@pytest.mark.gate
@pytest.mark.parametrize("topic", TOPICS)
def test_the_budget_is_kept(topic: str, children: Children, request: pytest.FixtureRequest) -> None:
    result = children[topic].result()
    assert result.is_success, f"cases_{topic}: {result.ended}\n{result.output}"
    lines = [line.removeprefix(FIGURES_MARK) for line in result.output.splitlines() if line.startswith(FIGURES_MARK)]
    figures = [Figures(**json.loads(line)) for line in lines]
    assert figures, f"cases_{topic} has no case"
    if request.config.getoption("--write-budgets", default=False):
        print(f"\nbudgets/{topic}.json", *rewrite(topic, figures), sep="\n  ")
    found = findings(figures, read_budget(topic))
    assert not found, "\n".join([f"compiled by Triton {version('triton')}", *found])


def test_every_budget_has_its_cases() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} <= set(TOPICS)
