"""The ledger beside the rank files: every rank has its slice of every tensor, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import assert_refusal
from tiny_ranks import bend_ledger, layout_of, rank_tensors, read_rows, write_rank_release, write_rows, write_tensors
from tiny_releases import SHARDS, write_index

from memopt.errors import LayoutError, LedgerError, MemoptError
from memopt.manifests.file_roles import is_weights
from memopt.manifests.ledger_check import check_ledger
from memopt.manifests.rank_folders import RankFolder
from memopt.manifests.signed_files import PlainFiles
from memopt.manifests.tree import open_root, scan_tree
from memopt.manifests.weights_check import check_weights

LAYOUTS = [("tp1", True), ("tp2", True), ("tp4", False), ("ep2", True), ("ep4", False)]


def problems_of(folder: Path, readable: Callable[[str], bool] = lambda _name: True) -> list[MemoptError]:
    """What the checks of headers and ledger find."""
    root_fd = open_root(folder)
    names = scan_tree(root_fd).files
    source = PlainFiles(root_fd)
    weights = check_weights(names, source, {name for name in names if readable(name)})
    return weights.problems + check_ledger(source, weights.tensors, [name for name in names if is_weights(name)])


def only_problem(folder: Path) -> MemoptError:
    (problem,) = problems_of(folder)
    return problem


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS)
def test_sound_releases(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    assert problems_of(folder) == []
    # A pod that holds one rank's files only.
    assert problems_of(folder, lambda name: "rank-0" in name or "/" not in name) == []


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS[1:])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_missing(layout: str, has_hub: bool, rank: int, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    shutil.rmtree(folder / layout / f"rank-{rank}")
    assert_refusal(
        only_problem(folder), LayoutError, f"{layout}/rank-{rank}/", f"rank {rank} of {layout}", "not complete"
    )


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS)
def test_a_rank_that_lacks_a_file(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    part = folder / layout / "rank-0"
    (part / SHARDS[1]).unlink()
    write_index(part, SHARDS[:1])
    problem = only_problem(folder)
    assert_refusal(
        problem, LayoutError, f"{layout}/rank-0/", SHARDS[1] if has_hub else "is in ledger.jsonl, not in the file"
    )


@pytest.mark.parametrize(("layout", "has_hub"), LAYOUTS)
def test_a_file_too_many(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    part = folder / layout / "rank-0"
    shutil.copy(part / SHARDS[1], part / "other.safetensors")
    (folder / layout / "rank-0" / "model.safetensors.index.json").unlink()
    (folder / layout / "rank-7").mkdir()
    (folder / layout / "rank-0" / "deeper").mkdir()
    shutil.copy(part / SHARDS[1], folder / layout / "rank-7" / "x.safetensors")
    shutil.copy(part / SHARDS[1], folder / layout / "rank-0" / "deeper" / "x.safetensors")
    found = {problem.file for problem in problems_of(folder) if "ledger.jsonl" in str(problem)}
    other = f"{layout}/rank-0/" + ("other.safetensors" if has_hub else "")
    assert found == {other, f"{layout}/rank-7/x.safetensors", f"{layout}/rank-0/deeper/x.safetensors"}


@pytest.mark.parametrize("has_hub", [True, False])
@pytest.mark.parametrize("layout", ["tp2", "ep2"])
def test_a_slice_of_another_shape_or_type_or_name(layout: str, has_hub: bool, tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", layout, has_hub=has_hub)
    part = RankFolder(layout_of(layout), 1)
    tensors = rank_tensors(1, part)
    name = next(name for name in tensors if name.endswith("attention.weight"))

    def write(changed: dict[str, Any]) -> str:
        write_tensors(folder / part.path / SHARDS[1], changed, part.metadata)
        write_index(folder / part.path, SHARDS)
        problem = only_problem(folder)
        assert_refusal(problem, LayoutError, "ledger.jsonl", f"{layout}/rank-1/")
        return str(problem)

    differs = f"'{name}' differs between file and ledger.jsonl (2 differences)"
    assert differs in write(tensors | {name: tensors[name].reshape(-1)})
    assert differs in write(tensors | {name: tensors[name].view(dtype=torch.int32)})
    lacks = f"'{name}' is in ledger.jsonl, not in the file"
    assert lacks in write({key: tensor for key, tensor in tensors.items() if key != name})
    # Another order: each tensor lies elsewhere than the ledger says.
    assert "differs between file and ledger.jsonl" in write(dict(reversed(list(tensors.items()))))
    renamed = write({("extra" if key == name else key): tensor for key, tensor in tensors.items()})
    assert "'extra' is in the file, not in ledger.jsonl (2 differences)" in renamed


def test_an_expert_on_two_ranks(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "ep2")
    part = RankFolder(layout_of("ep2"), 1)
    tensors = rank_tensors(0, RankFolder(part.layout, 0))
    write_tensors(folder / part.path / SHARDS[0], tensors, part.metadata)
    write_index(folder / part.path, SHARDS)
    assert_refusal(only_problem(folder), LayoutError, f"ep2/rank-1/{SHARDS[0]}", ".experts.", "3 differences")


def test_slices_that_the_ledger_places_elsewhere(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2")
    bend_ledger(folder, "norm.weight", lambda output: output["ranks"].update(data_offsets=[0, 28]))
    found = problems_of(folder)
    assert [problem.file for problem in found] == [f"tp2/rank-{rank}/{SHARDS[0]}" for rank in range(2)]
    for problem in found:
        assert_refusal(problem, LayoutError, "norm.weight", "2 differences")


def test_hub_files_that_a_ledger_of_ranks_does_not_have(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2", has_hub=False)
    shutil.copy(folder / "tp2" / "rank-0" / SHARDS[0], folder / "model.safetensors")
    found = problems_of(folder)
    assert {problem.file for problem in found} == {"model.safetensors"}
    assert any("is not in ledger.jsonl" in str(problem) for problem in found)


def test_a_second_layout_that_the_ledger_does_not_name(tmp_path: Path) -> None:
    """Another tool's: headers and index are checked, the ledger says nothing of it."""
    folder = write_rank_release(tmp_path / "release", "tp2")
    other = write_rank_release(tmp_path / "other", "tp4")
    shutil.copytree(other / "tp4", folder / "tp4")
    assert problems_of(folder) == []
    shutil.rmtree(folder / "tp4" / "rank-3")
    assert problems_of(folder) == []


def test_many_files_that_differ_do_not_read_the_ledger_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_rank_release(tmp_path / "release", "tp4")
    rows = read_rows(folder)
    for row in rows:
        row["outputs"][0]["ranks"]["data_offsets"] = [0, 8]
        row["outputs"][0]["data_offsets"] = [0, 8]
    write_rows(folder, rows)
    count = 0
    lines = PlainFiles.lines

    def counted(self: PlainFiles, name: str) -> Any:
        nonlocal count
        count += 1
        return lines(self, name)

    monkeypatch.setattr(PlainFiles, "lines", counted)
    assert len(problems_of(folder)) == 10
    assert count == 5


def test_a_malformed_line_is_the_only_finding(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2")
    bend_ledger(folder, "attention.weight", lambda output: output["ranks"]["sha256"].pop())
    assert_refusal(only_problem(folder), LedgerError, "ledger.jsonl:", "must be 2 digests")
    (folder / "ledger.jsonl").write_text(json.dumps({"outputs": 1}))
    assert "no list of outputs" in str(only_problem(folder))


@pytest.mark.parametrize("readable", ["hub", "rank-0", "rank-1"])
def test_what_is_read_alone_is_still_compared(readable: str, tmp_path: Path) -> None:
    """The ledger's other tensors are not looked at; those of the files that were read are."""

    def is_readable(name: str) -> bool:
        return readable in name if readable != "hub" else not name.startswith("ep2/")

    folder = write_rank_release(tmp_path / "release", "ep2")
    assert problems_of(folder, is_readable) == []
    bend_ledger(folder, "norm.weight", lambda output: output["ranks"].update(data_offsets=[400, 428]))
    found = problems_of(folder, is_readable)
    assert [problem.file for problem in found] == ([] if readable == "hub" else [f"ep2/{readable}/{SHARDS[0]}"])
    owned = write_rank_release(tmp_path / "owned", "ep2")
    bend_ledger(owned, "experts.weight_packed", lambda output: output["ranks"].update(data_offsets=[800, 808]))
    owner = read_rows(owned)[[row["tensor"].endswith("weight_packed") for row in read_rows(owned)].index(True)]
    place = f"rank-{owner['outputs'][0]['ranks']['owner']}"
    assert bool(problems_of(owned, is_readable)) == (readable == place)


def test_no_headers_of_unreadable_files_are_asked_for(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2", has_hub=False)
    (folder / "tp2" / "rank-1" / SHARDS[0]).write_bytes(b"")
    assert problems_of(folder, lambda name: "rank-1" not in name) == []
    assert {problem.file for problem in problems_of(folder)} == {f"tp2/rank-1/{SHARDS[0]}"}
