"""stage: a private copy of the verified bytes, whole or not there at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from tiny_ranks import swap, write_rank_release
from tiny_releases import NOW, POLICY, SHARDS, THREE_CHUNKS, flip_byte, sign, signed_release

from memopt.errors import ContentError, DiskFullError, MemoptIOError, OutputError, UsageError
from memopt.manifests import loader as loader_module
from memopt.manifests.release import Release, open_release
from memopt.manifests.stage import stage


def opened(folder: Path) -> Release:
    return open_release(folder, policy=POLICY, now=NOW)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def release_folder(tmp_path: Path) -> Path:
    return signed_release(tmp_path / "release", rows=THREE_CHUNKS // 16, num_ranks=2)


def test_the_copy_is_the_release_and_private(release_folder: Path, tmp_path: Path) -> None:
    with opened(release_folder) as release:
        dest = stage(release, tmp_path / "private")
    assert dest == tmp_path / "private"
    assert contents(dest) == contents(release_folder)
    for path in (dest, *dest.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o400), path
    with opened(dest) as again:
        again.load(rank=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["private", "release"]


def test_the_umask_does_not_matter(release_folder: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(release_folder) as release:
            dest = stage(release, tmp_path / "private")
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (dest, *dest.rglob("*")))


def test_one_rank(release_folder: Path, tmp_path: Path) -> None:
    with opened(release_folder) as release:
        dest = stage(release, tmp_path / "private", rank=1)
        assert not (dest / SHARDS[0]).exists()
        assert not (dest / "tp2" / "rank-0").exists()
        assert (dest / "config.json").exists()
        with refusal(UsageError, "no files of rank 2"):
            stage(release, tmp_path / "other", rank=2)
    with opened(dest) as again:
        again.load(rank=1)


def test_one_rank_of_one_of_two_layouts(tmp_path: Path) -> None:
    folder = write_rank_release(tmp_path / "release", "tp2")
    shutil.move(write_rank_release(tmp_path / "other", "ep2") / "ep2", folder / "ep2")
    sign(folder)
    with opened(folder) as release:
        dest = stage(release, tmp_path / "private", rank=1, expert_parallel=2)
        with refusal(UsageError, "not in tp4/"):
            stage(release, tmp_path / "more", rank=1, tensor_parallel=4)
        with refusal(UsageError, "no rank is named"):
            stage(release, tmp_path / "more", expert_parallel=2)
    assert {path.parent.name for path in dest.rglob("*.safetensors")} == {"rank-1"}
    assert not (dest / "tp2").exists()
    with opened(dest) as again:
        again.load(rank=1, expert_parallel=2)


def test_a_swapped_rank_is_not_staged(release_folder: Path, tmp_path: Path) -> None:
    swap(*(release_folder / "tp2" / f"rank-{rank}" / SHARDS[1] for rank in range(2)))
    words = (f"tp2/rank-1/{SHARDS[1]}", "the two files were swapped")
    with opened(release_folder) as release, refusal(ContentError, *words):
        stage(release, tmp_path / "private", rank=1)
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_a_change_after_opening_leaves_nothing(release_folder: Path, tmp_path: Path) -> None:
    with opened(release_folder) as release:
        flip_byte(release_folder / SHARDS[1], -1)
        with pytest.raises(ContentError, match=SHARDS[1]):
            stage(release, tmp_path / "private")
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_changed_byte_leaves_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("stage")
    release_folder = signed_release(folder / "release")
    with opened(release_folder) as release:
        names = sorted(release.files_for())
        name = data.draw(st.sampled_from(names))
        flip_byte(release_folder / name, data.draw(st.integers(0, (release_folder / name).stat().st_size - 1)))
        with pytest.raises(ContentError):
            stage(release, folder / "private")
    assert [path.name for path in folder.iterdir()] == ["release"]
    shutil.rmtree(folder)


def test_a_file_changed_while_it_is_copied(
    release_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is the memory that was hashed: a later change of the original does not reach the copy."""
    before = contents(release_folder)
    write = loader_module._write

    def change_then_write(descriptor: int, offset: int, memory: memoryview) -> None:
        os.truncate(release_folder / SHARDS[1], offset + 1)
        write(descriptor, offset, memory)
        (release_folder / SHARDS[1]).write_bytes(before[SHARDS[1]])

    monkeypatch.setattr(loader_module, "_write", change_then_write)
    with open_release(release_folder, policy=POLICY, now=NOW, jobs=1) as release:
        dest = stage(release, tmp_path / "private")
    assert contents(dest) == before


def test_dest_must_be_new_and_outside(release_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    with opened(release_folder) as release:
        for name in ("full", "link", "release"):
            with refusal(OutputError, "exists already", name):
                stage(release, tmp_path / name)
        with refusal(OutputError, "does not exist"):
            stage(release, tmp_path / "absent" / "private")
        with refusal(OutputError, "inside the release"):
            stage(release, release_folder / "private")
        with refusal(OutputError, "inside the release"):
            stage(release, release_folder / "tp2" / "private")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, MemoptIOError)]
)
def test_a_full_disk_leaves_nothing(
    release_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(loader_module, "_write", fail)
    with opened(release_folder) as release, pytest.raises(error, match=os.strerror(number)):
        stage(release, tmp_path / "private")
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_ctrl_c_leaves_nothing(release_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader_module, "_write", interrupt)
    with opened(release_folder) as release, pytest.raises(KeyboardInterrupt):
        stage(release, tmp_path / "private")
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_somebody_makes_the_folder_meanwhile(
    release_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_files = Release.copy_files

    def copy_and_make(release: Release, copies: list[tuple[str, int]]) -> None:
        copy_files(release, copies)
        (tmp_path / "private").mkdir(exist_ok=True)
        (tmp_path / "private" / "theirs").touch()

    monkeypatch.setattr(Release, "copy_files", copy_and_make)
    with opened(release_folder) as release, refusal(OutputError, "appeared while it was copied"):
        stage(release, tmp_path / "private")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["private", "release"]
