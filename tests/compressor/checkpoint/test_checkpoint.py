"""A checkpoint folder: config, index and headers must tell the same story; every disagreement is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import assert_refusal, refusal, within_seconds
from tiny_checkpoints import TINY_GLM5, make_checkpoint

from memopt.compressor.checkpoint.checkpoint import open_checkpoint, raise_first, scan_checkpoint
from memopt.errors import (
    ConfigError,
    HeaderError,
    IndexFileError,
    LayoutError,
    LfsPointerError,
    MemoptError,
    MissingFileError,
    MissingTensorError,
    TruncatedError,
    UsageError,
)
from memopt.manifests.safetensors_header import TensorHeader, render_header
from memopt.manifests.safetensors_index import INDEX_NAME

NAME = "glm-4.7-fp8"
FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pristine") / "checkpoint", NAME)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    table = json.loads((folder / INDEX_NAME).read_text())
    change(table["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(table))


def write_shard(path: Path, name: str, size: int = 8) -> None:
    path.write_bytes(render_header([TensorHeader(name, "U8", (size,), 0, size)], {}) + bytes(size))


def only_problem(folder: Path) -> MemoptError:
    problems = scan_checkpoint(folder).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_the_trained_example_opens() -> None:
    checkpoint = open_checkpoint(TINY_GLM5)
    index = json.loads((TINY_GLM5 / INDEX_NAME).read_text())
    assert {name: t.file for name, t in checkpoint.tensors.items()} == index["weight_map"]
    assert checkpoint.size_bytes == index["metadata"]["total_size"]
    for name, file in checkpoint.files.items():
        assert file.size_bytes == (TINY_GLM5 / name).stat().st_size
        ends = [t.start + t.size_bytes for t in checkpoint.tensors.values() if t.file == name]
        assert max(ends) == file.size_bytes


def test_a_tensor_that_the_index_puts_where_it_is_not(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({"model.ghost.weight": SECOND}))
    assert_refusal(only_problem(folder), MissingTensorError, "model.ghost.weight", SECOND, "where it is not")


def test_a_tensor_that_the_index_lacks(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.pop(NORM))
    assert_refusal(only_problem(folder), IndexFileError, NORM, FIRST, "not in the index")


def test_a_tensor_that_lies_in_another_shard(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({NORM: SECOND}))
    assert_refusal(only_problem(folder), IndexFileError, NORM, FIRST, SECOND)


def test_a_shard_that_no_tensor_of_the_index_lies_in(folder: Path) -> None:
    write_shard(folder / "mtp.safetensors", "model.layers.9.eh_proj.weight")
    assert_refusal(only_problem(folder), LayoutError, "mtp.safetensors", "its tensors would be lost")


def test_a_tensor_in_two_shards(folder: Path) -> None:
    write_shard(folder / "model-00003-of-000002.safetensors", NORM)
    edit_index(folder, lambda weight_map: weight_map.update({"model.x.weight": "model-00003-of-000002.safetensors"}))
    problems = scan_checkpoint(folder).problems
    assert_refusal(problems[0], LayoutError, NORM, FIRST, "model-00003-of-000002.safetensors", "is also in")
    with refusal(LayoutError, NORM, FIRST, "more problems"):
        open_checkpoint(folder)


def test_a_missing_shard_is_one_problem_not_one_a_tensor(folder: Path) -> None:
    (folder / SECOND).unlink()
    assert_refusal(only_problem(folder), MissingFileError, SECOND, str(folder))


def test_a_half_written_shard(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)
    assert_refusal(only_problem(folder), TruncatedError, SECOND, "half-written")


def test_a_shard_with_bytes_too_many(folder: Path) -> None:
    with (folder / SECOND).open("ab") as stream:
        stream.write(b"\0")
    assert_refusal(only_problem(folder), HeaderError, SECOND, "1 bytes after the last tensor")


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling link", "pointer"])
def test_something_else_in_a_shards_place(kind: str, folder: Path) -> None:
    shard = folder / SECOND
    shard.unlink()
    error: type[MemoptError] = LayoutError
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "folder":
        shard.mkdir()
    elif kind == "pointer":
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
        error = LfsPointerError
    else:
        shard.symlink_to("../blobs/gone")
        error = MissingFileError
    with within_seconds(5):
        assert_refusal(only_problem(folder), error, SECOND)


def test_a_shard_of_links_as_in_the_hubs_cache(folder: Path) -> None:
    (folder.parent / "blobs").mkdir()
    for name in (FIRST, SECOND):
        shutil.move(folder / name, folder.parent / "blobs" / name)
        (folder / name).symlink_to(f"../blobs/{name}")
    assert scan_checkpoint(folder).problems == ()


def test_every_problem_is_told_at_once(folder: Path) -> None:
    os.truncate(folder / FIRST, 100)
    (folder / SECOND).unlink()
    problems = scan_checkpoint(folder).problems
    assert [type(problem) for problem in problems] == [TruncatedError, MissingFileError]
    with refusal(TruncatedError, FIRST, "1 more problem: see `memopt inspect`"):
        raise_first(problems)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "single", NAME, num_files=1)
    (folder / "model-00001-of-000001.safetensors").rename(folder / "model.safetensors")
    (folder / INDEX_NAME).unlink()
    scan = scan_checkpoint(folder)
    assert scan.problems == ()
    assert set(scan.checkpoint.files) == {"model.safetensors"}
    write_shard(folder / "extra.safetensors", "x.weight")
    assert_refusal(only_problem(folder), LayoutError, "extra.safetensors")


def test_several_files_without_an_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    with refusal(MissingFileError, INDEX_NAME, str(folder)):
        scan_checkpoint(folder)


def test_a_release_of_rank_files_alone_is_told_the_way_out(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / "tp8").mkdir()
    with refusal(MissingFileError, str(folder), "tp8/", "memopt merge"):
        scan_checkpoint(folder)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with refusal(MissingFileError, "config.json", str(folder)):
        scan_checkpoint(folder)


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "glm4_moe",}')
    with refusal(ConfigError, "config.json", "not strict JSON"):
        scan_checkpoint(folder)


@pytest.mark.parametrize("name", ["absent", "x" * 300, "config.json"])
def test_no_folder_at_all(name: str, folder: Path) -> None:
    with refusal(UsageError, name[:50], "no checkpoint folder", "org/name@revision"):
        scan_checkpoint(folder / name)


def test_no_tensors_at_all(folder: Path) -> None:
    for name in (FIRST, SECOND, INDEX_NAME):
        (folder / name).unlink()
    (folder / "model.safetensors").write_bytes(render_header([], {}))
    with refusal(MissingFileError, str(folder), "no tensors"):
        open_checkpoint(folder)
