"""The state folder: what a lock, a record and a crash on the way out leave behind."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.small_source import OPTIONS, compress, make_small_source
from faults.trees import tree

import memopt
from memopt.compressor.checkpoint.file_stamp import FileStamp
from memopt.compressor.checkpoint.writer import WRITE_BUFFER_BYTES
from memopt.compressor.fingerprint import plan_fingerprint
from memopt.compressor.output_folder import (
    FINISHED_FOLDER,
    STATE_FOLDER,
    FinishedIdentity,
    check_output_place,
    is_complete,
)
from memopt.compressor.workspace import Workspace, release_file_names
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


def test_a_lock_taken_while_its_run_finished_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run opens the lock's file, the first one renames its folder and lets go: the lock is nobody's."""
    out = tmp_path / "out"
    first = Workspace(out, FINGERPRINT, frozenset({"config.json"}))
    first.write_file("config.json", b"{}")
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        first.finish()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OutputError, match="another run is writing to"):
        Workspace(out, FINGERPRINT, frozenset({"config.json"}))
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1, "the first run's lock is closed, the second one's too"
    assert tree(out).keys() == {"config.json"}


def test_the_lock_is_let_go_before_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a removed file that is open under another name, and its folder with it."""
    out = tmp_path / "out"
    rmtree = shutil.rmtree
    opened: list[str] = []

    def look(path: Path, **options: bool) -> None:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        opened.extend(os.readlink(link) for link in links if os.path.lexists(link))
        rmtree(path, **options)

    with Workspace(out, FINGERPRINT, frozenset({"config.json"})) as workspace:
        workspace.write_file("config.json", b"{}")
        monkeypatch.setattr(shutil, "rmtree", look)
        workspace.finish()
    assert [path for path in opened if path.startswith(f"{out / FINISHED_FOLDER}")] == []
    assert tree(out).keys() == {"config.json"}


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


def test_a_streamed_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    written: list[int] = []
    with Workspace(tmp_path / "out", FINGERPRINT, frozenset({"ledger.jsonl"})) as workspace:

        def chunks() -> Iterator[bytes]:
            for _ in range(3):
                yield bytes(2 * WRITE_BUFFER_BYTES)
                written.append(workspace.temporary("ledger.jsonl").stat().st_size)

        workspace.write_stream("ledger.jsonl", chunks())
    assert written == [2 * WRITE_BUFFER_BYTES * count for count in (1, 2, 3)]
    assert (tmp_path / "out" / "ledger.jsonl").stat().st_size == written[-1]


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
    identity = FinishedIdentity(fingerprint, ("hub",))
    assert is_complete(out, identity)
    assert not is_complete(out, FinishedIdentity(FINGERPRINT, ("hub",)))
    assert not is_complete(out, FinishedIdentity(fingerprint, ("hub", "tp2")))
    assert not is_complete(tmp_path / "nothing", identity)
    for damage in (
        b"",
        b"[]",
        b'{"identity": {"plan_fingerprint": null}}',
        b'{"identity": []}',
        b'{"identity": {}}',
        b"\xff",
    ):
        (out / "release.json").write_bytes(damage)
        assert not is_complete(out, identity)


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
