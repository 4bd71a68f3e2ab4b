"""Which folders `compress` refuses to write to, and that it leaves them as they are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.invoke import invoke

from faults.small_source import FLAGS, compress
from faults.trees import tree
from memopt.compressor.progress import Progress
from memopt.compressor.workspace import STATE_FOLDER
from memopt.errors import OutputError


def _equal(source: Path, _: Path) -> Path:
    return source


def _inside(source: Path, _: Path) -> Path:
    return source / "deep" / "out"


def _around(source: Path, _: Path) -> Path:
    return source.parent


def _dotted(source: Path, folder: Path) -> Path:
    return folder / ".." / folder.name / source.name / "."


def _linked(source: Path, folder: Path) -> Path:
    (folder / "link").symlink_to(source)
    return folder / "link" / "out"


def _file(_: Path, folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def _below_a_file(_: Path, folder: Path) -> Path:
    return _file(_, folder) / "out"


def _dangling(_: Path, folder: Path) -> Path:
    (folder / "dangling").symlink_to("nowhere")
    return folder / "dangling"


def _loop(_: Path, folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


def _fifo(_: Path, folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def _not_empty(_: Path, folder: Path) -> Path:
    (folder / "full").mkdir()
    (folder / "full" / "photo.jpg").write_text("x")
    return folder / "full"


def _hidden_file(_: Path, folder: Path) -> Path:
    (folder / "hidden").mkdir()
    (folder / "hidden" / ".git").mkdir()
    return folder / "hidden"


def _below_proc(_: Path, __: Path) -> Path:
    return Path("/proc/memopt-out")


def _too_long(_: Path, folder: Path) -> Path:
    return folder / ("x" * 300)


CASES: dict[Callable[[Path, Path], Path], str] = {
    _equal: "is inside the source",
    _inside: "is inside the source",
    _around: "the source is inside the output",
    _dotted: "is inside the source",
    _linked: "is inside the source",
    _file: "is not a folder",
    _below_a_file: "Not a directory",
    _dangling: "is not a folder",
    _loop: "cannot use output",
    _fifo: "is not a folder",
    _not_empty: "is not empty: it holds 'photo.jpg'",
    _hidden_file: "is not empty: it holds '.git'",
    _below_proc: "cannot write",
    _too_long: "File name too long",
}


@pytest.mark.parametrize("make", CASES)
def test_a_folder_that_cannot_be_used(make: Callable[[Path, Path], Path], source: Path, tmp_path: Path) -> None:
    out = make(source, tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    refused = invoke("compress", source, out, *FLAGS, "--json")
    assert refused.code == 2, refused.stderr
    assert (refused.verdict["code"], refused.verdict["status"]) == ("MEMOPT_OUTPUT", "refused")
    assert CASES[make] in refused.refusal
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_name_that_is_empty(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset shell variable must not fill the working directory."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    refused = invoke("compress", source, "", *FLAGS)
    assert (refused.code, "MEMOPT_USAGE" in refused.refusal) == (2, True)
    assert list(empty.iterdir()) == []


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write to: a read-only mount for root, whom modes do not bind; else a mode."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "memopt-test", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"root, and a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("below", ["", "out"])
def test_a_read_only_folder(below: str, read_only: Path, source: Path) -> None:
    refused = invoke("compress", source, read_only / below, *FLAGS)
    assert (refused.code, "MEMOPT_OUTPUT" in refused.refusal) == (2, True)
    assert str(read_only) in refused.refusal
    assert "choose a writable output folder" in refused.refusal


def test_a_link_to_an_empty_folder_is_followed(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    compress(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert tree(tmp_path / "real") == reference


def test_the_root_of_a_file_system_is_empty(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """mkfs.ext4 puts an empty lost+found there."""
    out = tmp_path / "mnt"
    (out / "lost+found").mkdir(parents=True)

    def stop(progress: Progress) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        compress(source, out, progress=stop)
    compress(source, out)
    assert tree(out) == dict(sorted((reference | {"lost+found": "folder"}).items()))
    assert compress(source, out).was_complete


def test_what_fsck_found_is_somebodys(source: Path, tmp_path: Path) -> None:
    for number, make in enumerate((Path.touch, Path.mkdir, lambda path: path.symlink_to("/"))):
        out = tmp_path / str(number)
        out.mkdir()
        make(out / "lost+found")
        if (out / "lost+found").is_dir() and not (out / "lost+found").is_symlink():
            (out / "lost+found" / "#12").write_text("x")
        with pytest.raises(OutputError, match=r"is not empty: it holds .lost\+found"):
            compress(source, out)


@pytest.mark.parametrize("foreign", ["notes.txt", "model-00099-of-00099.safetensors", ".hidden"])
def test_a_foreign_file_in_a_half_done_output(foreign: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(progress: Progress) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        compress(source, out, progress=stop)
    (out / foreign).write_text("x")
    before = tree(out)
    with pytest.raises(OutputError, match=f"is not empty: it holds '{foreign}'"):
        compress(source, out)
    assert tree(out) == before
    (out / foreign).unlink()
    compress(source, out)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'"x"'])
def test_a_damaged_state_is_refused(damage: bytes, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(progress: Progress) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        compress(source, out, progress=stop)
    (out / STATE_FOLDER / "plan.json").write_bytes(damage)
    refused = invoke("compress", source, out, *FLAGS)
    assert (refused.code, "plan.json is damaged" in refused.refusal) == (2, True)
    assert f"remove {out} to start anew" in refused.refusal


def test_a_state_whose_plan_is_lost_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(progress: Progress) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        compress(source, out, progress=stop)
    (out / STATE_FOLDER / "plan.json").unlink()
    with pytest.raises(OutputError, match="is not empty"):
        compress(source, out)
