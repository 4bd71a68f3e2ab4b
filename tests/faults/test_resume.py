"""A rerun goes on with the same work and refuses any other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.invoke import run_command

import memopt
from faults.small_source import EXPERT, FLAGS, OPTIONS, compress, edit_tensor, file_of
from faults.trees import finished_units, stamps, tree
from memopt.compressor.checkpoint.reader import SourceReader
from memopt.compressor.progress import Progress
from memopt.compressor.workspace import STATE_FOLDER
from memopt.errors import MemoptError, OutputError, SizeMismatchError, SourceChangedError

NUM_UNITS_BEFORE_STOP = 3


class Stop(Exception):
    """Raised by a progress callback to interrupt a run."""


def interrupt(source: Path, out: Path, **options: object) -> set[str]:
    """Run until a few units are finished; the names of the finished files."""

    def stop(progress: Progress) -> None:
        if progress.num_done_units >= NUM_UNITS_BEFORE_STOP:
            raise Stop

    with pytest.raises(Stop):
        compress(source, out, progress=stop, **options)
    finished = finished_units(out)
    # A unit may finish between the callback's fault and the end of the run.
    assert NUM_UNITS_BEFORE_STOP <= len(finished) <= NUM_UNITS_BEFORE_STOP + 2
    return finished


def test_finished_units_are_kept(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    before = stamps(out, finished)
    result = compress(source, out, workers=2)
    assert result.num_resumed_units == len(finished)
    assert stamps(out, finished) == before
    assert tree(out) == reference


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"lines": 5, "errors": {}}', b'{"lines": [1], "errors": []}', b"\xff"]
)
def test_a_damaged_record_only_repeats_its_unit(
    damage: bytes, source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    next((out / STATE_FOLDER / "units").glob("*.json")).write_bytes(damage)
    assert compress(source, out).num_resumed_units == len(finished) - 1
    assert tree(out) == reference


def _lose(path: Path) -> None:
    path.unlink()


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _spoil_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtypE"', 1))


@pytest.mark.parametrize("damage", [_lose, _shorten, _spoil_header])
def test_a_damaged_finished_file_is_made_again(
    damage: Callable[[Path], None], source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    damage(out / min(finished))
    assert compress(source, out).num_resumed_units == len(finished) - 1
    assert tree(out) == reference


def _other_config(source: Path) -> dict[str, object]:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"note": "changed"}))
    return {}


def _other_tokenizer(source: Path) -> dict[str, object]:
    (source / "tokenizer_config.json").write_text("{}")
    return {}


def _another_small_file(source: Path) -> dict[str, object]:
    (source / "vocab.json").write_text("{}")
    return {}


def _other_header(source: Path) -> dict[str, object]:
    path, _, _ = file_of(source, EXPERT)
    raw = path.read_bytes()
    # The same length: the metadata of the header alone changes.
    assert b'"format":"pt"' in raw
    path.write_bytes(raw.replace(b'"format":"pt"', b'"format":"tp"', 1))
    return {}


def _other_recipe(_: Path) -> dict[str, object]:
    return {"recipe": "dequantize"}


def _other_file_size(_: Path) -> dict[str, object]:
    return {"options": memopt.PlanOptions(max_file_bytes=400_000, tensor_parallel=1)}


def _other_name(_: Path) -> dict[str, object]:
    return {"options": memopt.PlanOptions(OPTIONS.max_file_bytes, 1, release_name="another")}


def _allowed_code(_: Path) -> dict[str, object]:
    return {"options": memopt.PlanOptions(OPTIONS.max_file_bytes, 1, allow_code=True)}


OTHER_WORK = [
    _other_config, _other_tokenizer, _another_small_file, _other_header, _other_recipe, _other_file_size, _other_name,
    _allowed_code,
]  # fmt: skip


@pytest.mark.parametrize("change", OTHER_WORK)
def test_another_work_is_refused_and_nothing_is_touched(
    change: Callable[[Path], dict[str, object]], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupt(source, out)
    before = tree(out)
    options = change(source)
    with pytest.raises(OutputError, match=r"out holds the unfinished work of another source, recipe, option") as caught:
        compress(source, out, **options)
    assert caught.value.code == "MEMOPT_OUTPUT"
    assert tree(out) == before


def test_weights_that_differ_from_what_was_read_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    assert finished
    rows = json.loads((out / STATE_FOLDER / "units" / "00001.json").read_bytes())["lines"]
    name = json.loads(rows[0])["sources"][0]["name"]
    path = edit_tensor(source, name, lambda raw: raw.__setitem__(0, raw[0] ^ 1))
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChangedError, match="differs from what the interrupted run read") as caught:
        compress(source, out)
    assert (caught.value.tensor, caught.value.file) == (name, path.name)
    assert str(out) in caught.value.remedy


def test_touched_but_equal_weights_go_on(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    for path in source.glob("*.safetensors"):
        os.utime(path, ns=(1, 1))
    assert compress(source, out).num_resumed_units == len(finished)
    assert tree(out) == reference


def test_a_copy_of_the_source_elsewhere_goes_on(source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    copy = shutil.copytree(source, tmp_path / "copy")
    shutil.rmtree(source)
    assert compress(copy, out).num_resumed_units == len(finished)
    assert tree(out) == reference


def test_weights_that_no_finished_unit_read_may_be_repaired(
    source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """The way on after a NaN: fetch the file again and run the same command."""
    whole = file_of(source, EXPERT)[0].read_bytes()
    path = edit_tensor(source, EXPERT, lambda raw: raw.__setitem__(5, 0x7F))
    out = tmp_path / "out"
    with pytest.raises(MemoptError, match="not a finite number"):
        compress(source, out)
    finished = finished_units(out)
    assert finished
    path.write_bytes(whole)
    assert compress(source, out).num_resumed_units == len(finished)
    assert tree(out) == reference


def test_a_complete_output_is_not_touched(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = compress(source, out)
    before = stamps(out, set(tree(out)))

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SourceReader, "__init__", refuse)
    again = compress(source, out)
    assert (again.was_complete, first.was_complete) == (True, False)
    assert again.total_size_bytes == first.total_size_bytes == sum((out / name).stat().st_size for name in before)
    assert stamps(out, set(tree(out))) == before
    done = run_command("compress", source, out, *FLAGS)
    assert done.code == 0
    assert "is complete already" in done.stdout


@pytest.mark.parametrize("name", ["model-00002", "tokenizer_config.json", "ledger.jsonl", "config.json"])
def test_a_complete_output_with_a_lost_or_resized_file_is_an_error(name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out)
    path = next(out.glob(f"{name}*"))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SizeMismatchError, match=f"has {size + 1:,} bytes, the plan gave it {size:,}") as resized:
        compress(source, out)
    path.unlink()
    with pytest.raises(OutputError, match="is missing from the finished release") as lost:
        compress(source, out)
    assert resized.value.file == lost.value.file == path.name


def test_a_complete_output_is_refused_to_another_recipe(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out)
    before = tree(out)
    with pytest.raises(OutputError, match="is not empty: it holds"):
        compress(source, out, recipe="dequantize")
    assert tree(out) == before
