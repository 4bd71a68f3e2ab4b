"""The state folder: what a lock, a record and a crash on the way out leave behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from faults.small_source import OPTIONS, compress, make_small_source
from faults.trees import tree

import memopt
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.fingerprint import plan_fingerprint
from memopt.compressor.workspace import (
    FINISHED_FOLDER,
    STATE_FOLDER,
    Workspace,
    check_output_place,
    is_complete,
    release_file_names,
)
from memopt.errors import OutputError

FINGERPRINT = "f" * 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("workspace") / "source")


def test_a_lock_is_free_again_after_close(tmp_path: Path) -> None:
    with (
        Workspace(tmp_path / "out", FINGERPRINT, frozenset()),
        pytest.raises(OutputError, match="another run is writing to"),
    ):
        Workspace(tmp_path / "out", FINGERPRINT, frozenset())
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset()) as workspace:
        workspace.close()
        workspace.close()


def test_the_refused_run_leaves_the_descriptor_table_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("x")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OutputError):
            Workspace(tmp_path / "out", FINGERPRINT, frozenset())
    assert os.listdir("/proc/self/fd") == before


def test_stamps_are_remembered(tmp_path: Path) -> None:
    stamps = {"b.safetensors": FileStamp(7, 2**62), "a.safetensors": FileStamp(0, 1)}
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset()) as workspace:
        assert workspace.source_stamps is None
        workspace.save_plan(stamps)
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset()) as workspace:
        assert workspace.source_stamps == stamps


def test_files_in_flight_are_cleared(tmp_path: Path) -> None:
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset()) as workspace:
        workspace.temporary("model-00001-of-00001.safetensors").write_bytes(b"half")
        workspace.save_plan({})
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset()) as workspace:
        assert not workspace.temporary("model-00001-of-00001.safetensors").exists()


def test_write_file_replaces_whole_files(tmp_path: Path) -> None:
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset({"config.json"})) as workspace:
        workspace.write_file("config.json", b"old")
        workspace.write_file("config.json", b"new")
        assert (tmp_path / "out" / "config.json").read_bytes() == b"new"
        workspace.finish()
    assert tree(tmp_path / "out").keys() == {"config.json"}


def test_leftovers_of_a_crash_on_the_way_out_are_removed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out)
    expected = tree(out)
    (out / FINISHED_FOLDER / "units").mkdir(parents=True)
    (out / FINISHED_FOLDER / "lock").write_bytes(b"")
    assert compress(source, out).was_complete
    assert tree(out) == expected


def test_a_run_refused_by_a_release_that_was_just_finished_leaves_no_state(source: Path, tmp_path: Path) -> None:
    """A second run that made the state folder after the first one had removed its own."""
    out = tmp_path / "out"
    compress(source, out)
    expected = tree(out)
    (out / STATE_FOLDER).mkdir()
    with pytest.raises(OutputError, match="is not empty"):
        compress(source, out)
    assert tree(out) == expected
    assert compress(source, out).was_complete


def test_complete_means_this_plan_and_no_state(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out)
    fingerprint = plan_fingerprint(memopt.plan(source, options=OPTIONS))
    assert is_complete(out, fingerprint)
    assert not is_complete(out, FINGERPRINT)
    assert not is_complete(tmp_path / "nothing", fingerprint)
    for damage in (b"", b"[]", b'{"identity": []}', b'{"identity": {}}', b"\xff"):
        (out / "release.json").write_bytes(damage)
        assert not is_complete(out, fingerprint)


def test_release_file_names_are_all_that_a_release_holds(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out)
    plan = memopt.plan(source, options=OPTIONS)
    assert release_file_names(plan.units, tuple(file.name for file in plan.small_files)) == set(tree(out))


def test_places_beside_each_other_are_fine(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "model-int4"
    source.mkdir()
    check_output_place(source, out)
    out.mkdir()
    check_output_place(source, out)
    shutil.rmtree(out)
    out.symlink_to(source)
    with pytest.raises(OutputError, match="is inside the source"):
        check_output_place(source, out)
