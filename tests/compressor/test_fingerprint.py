"""Two runs are the same run exactly if everything that they print and write, but results, is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.small_source import OPTIONS, compress, make_small_source
from hub_server import running_hub
from tiny_plans import plan_of, tiny

import memopt
from memopt.compressor import fingerprint, release_file
from memopt.compressor.fingerprint import plan_fingerprint, run_fingerprint
from memopt.compressor.lint import EngineNote
from memopt.compressor.metadata_files import MetadataSelection, SkippedFile
from memopt.compressor.plan import Plan
from memopt.compressor.source_identity import SourceIdentity

PLAN = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")


def _note(plan: Plan) -> Plan:
    note = plan.notes[0]
    assert isinstance(note, EngineNote)
    return replace(plan, notes=(replace(note, message="another"), *plan.notes[1:]))


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "a file left behind": lambda plan: replace(plan, metadata=MetadataSelection((), (SkippedFile("x", "y"),))),
    "an engine note": _note,
    "a release name": lambda plan: replace(plan, options=replace(plan.options, release_name="x")),
    "a commit": lambda plan: replace(plan, identity=SourceIdentity("hub", "org/name", "c" * 40)),
    "a recipe's description": lambda plan: replace(plan, recipe=plan.recipe.model_copy(update={"description": "x"})),
    "config.json": lambda plan: replace(plan, config_bytes=plan.config_bytes + b"\n"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_plan_has_another_fingerprint(what: str) -> None:
    changed = CHANGES[what](PLAN)
    assert plan_fingerprint(changed) != plan_fingerprint(PLAN)
    assert plan_fingerprint(changed) == plan_fingerprint(CHANGES[what](PLAN))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "layout": "hub"},
        {"tensor_parallel": 4, "layout": "tp"},
        {"expert_parallel": 2},
    ],
)
def test_layouts_are_another_run_of_the_same_plan(options: dict[str, Any]) -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4", **options)
    assert plan_fingerprint(plan) == plan_fingerprint(PLAN)
    same = run_fingerprint(plan_fingerprint(plan), plan.layouts.names) == run_fingerprint(
        plan_fingerprint(PLAN), ["hub"]
    )
    assert same == (plan.layouts.names == ("hub",))


def test_a_library_that_is_named_in_the_release_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_fingerprint(PLAN)
    monkeypatch.setattr(release_file.metadata, "version", lambda name: "99.1")
    assert plan_fingerprint(PLAN) != before


def test_memopts_own_version_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_fingerprint(PLAN)
    monkeypatch.setattr(fingerprint, "__version__", "99.1")
    assert plan_fingerprint(PLAN) != before


def test_a_branch_and_its_commit_are_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_small_source(tmp_path / "source")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        commit = hub.add("zai-org/tiny", source)
        by_branch, by_commit = (memopt.plan(f"zai-org/tiny@{name}", options=OPTIONS) for name in ("main", commit))
        assert plan_fingerprint(by_branch) == plan_fingerprint(by_commit)
        assert release_file.render_release(by_branch) == release_file.render_release(by_commit)
        compress(Path("zai-org/tiny@main"), tmp_path / "out")
        assert compress(Path(f"zai-org/tiny@{commit}"), tmp_path / "out").was_complete
