"""A rerun goes on with the same work and refuses any other."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.invoke import invoke

import memopt
from faults.small_source import EXPERT, FLAGS, OPTIONS, compress, edit_tensor, file_of
from faults.trees import finished_units, stamps, tree
from memopt.compressor import pipeline, release_file, resume
from memopt.compressor.output_folder import STATE_FOLDER
from memopt.compressor.progress import Progress
from memopt.compressor.recheck import require_outputs
from memopt.compressor.units import Unit
from memopt.errors import InterruptedRunError, MemoptError, OutputError, SourceChangedError

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
    # Those whose last bytes wait for the disk (one a worker) and those in work may still finish.
    assert NUM_UNITS_BEFORE_STOP <= len(finished) <= NUM_UNITS_BEFORE_STOP + 4
    return finished


def interrupt_at_the_end(source: Path, out: Path) -> None:
    """Run until every unit is finished, and stop before the ledger is written."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "balance", stop)
        with pytest.raises(InterruptedRunError):
            compress(source, out)


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


def _another_file_left_behind(source: Path) -> dict[str, object]:
    """release.json lists what was not copied."""
    (source / "notes.pt").write_bytes(b"x")
    return {}


def _allowed_code(_: Path) -> dict[str, object]:
    return {"options": memopt.PlanOptions(OPTIONS.max_file_bytes, 1, allow_code=True)}


OTHER_WORK = [
    _other_config, _other_tokenizer, _another_small_file, _other_header, _other_recipe, _other_file_size, _other_name,
    _allowed_code, _another_file_left_behind,
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


def test_another_version_of_a_library_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """release.json names the libraries that rounded: half of the units by one, half by another is no release."""
    out = tmp_path / "out"
    interrupt(source, out)
    monkeypatch.setattr(release_file.metadata, "version", lambda name: "99.1")
    with pytest.raises(OutputError, match="or version of memopt, numba or numpy") as caught:
        compress(source, out)
    assert f"remove {out} to start anew" in caught.value.remedy


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


def _flip(path: Path, position: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_changed_byte_of_a_finished_unit_is_found_and_the_unit_is_made_again(
    workers: int, source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    spoiled, kept = min(finished), finished - {min(finished)}
    _flip(out / spoiled, -1)
    before = stamps(out, kept)
    assert compress(source, out, workers=workers).num_resumed_units == len(kept)
    assert stamps(out, kept) == before
    assert tree(out) == reference


def test_a_unit_that_is_made_again_need_not_have_read_the_same_source(
    source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """Nothing is left of what was read: there is nothing to mix."""
    out = tmp_path / "out"
    finished = interrupt(source, out)
    for name in finished:
        _flip(out / name, -1)
    rows = json.loads((out / STATE_FOLDER / "units" / "00001.json").read_bytes())["lines"]
    edit_tensor(source, json.loads(rows[0])["sources"][0]["name"], lambda raw: raw.__setitem__(0, raw[0] ^ 1))
    assert compress(source, out).num_resumed_units == 0
    assert tree(out).keys() == reference.keys()


@pytest.mark.parametrize("text", [rb"\"sha256\": \"", rb"\"relative_mse\": ", b'"sq_error": ', b'"size_bytes": '])
def test_a_changed_byte_of_a_record_repeats_its_unit(
    text: bytes, source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupt_at_the_end(source, out)
    records = sorted((out / STATE_FOLDER / "units").glob("*.json"))
    record = next(path for path in records if text in path.read_bytes())
    raw = record.read_bytes()
    place = raw.index(text) + len(text)
    other = b"5" if raw[place : place + 1] != b"5" else b"6"
    record.write_bytes(raw[:place] + other + raw[place + 1 :])
    assert compress(source, out).num_resumed_units == len(records) - 1
    assert tree(out) == reference


def test_files_that_nobody_touched_are_not_read_again(
    source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    asked: list[str] = []

    def ask(out: Path, unit: Unit, *rest: Any) -> None:
        asked.append(unit.file_name)
        require_outputs(out, unit, *rest)

    monkeypatch.setattr(resume, "require_outputs", ask)
    seen: list[Progress] = []
    touched = max(finished)
    os.utime(out / touched, ns=(1, 1))
    result = compress(source, out, progress=seen.append)
    assert asked == [touched]
    assert result.num_resumed_units == len(finished)
    assert {progress.stage for progress in seen if progress.num_units == 1} == {"check"}
    assert tree(out) == reference


def test_rates_are_of_this_run_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = interrupt(source, out)
    seen: list[Progress] = []
    result = compress(source, out, progress=seen.append)
    own = [progress for progress in seen if progress.stage == "write"]
    assert 0 < result.resumed_size_bytes < result.input_size_bytes
    assert all(progress.num_resumed_units == len(finished) for progress in own)
    assert own[-1].done_bytes == own[-1].total_bytes == result.input_size_bytes
    seconds = (result.input_size_bytes - result.resumed_size_bytes) / own[-1].rate_bytes_per_second
    assert 0 < seconds <= result.seconds


def test_the_command_counts_no_rate_for_what_an_earlier_run_did(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt_at_the_end(source, out)
    done = invoke("compress", source, out, *FLAGS)
    assert "10 weight files, 10 of them from an interrupted run" in done.stdout
    assert re.search(r"^time .*, 0\.00 GB/s of source$", done.stdout, re.MULTILINE)
