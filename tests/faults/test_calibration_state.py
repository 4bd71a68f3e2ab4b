"""What a calibration that was cut off left, damaged: a resume refuses it, and never ends with other bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrated_runs import compress, experts, options, recipe, write_ids
from rank_processes import Refusal, run_ranks
from tiny_checkpoints import make_checkpoint

import memopt
from faults.small_source import make_small_source
from faults.trees import tree
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.calibrate.scratch_size import BOOKKEEPING_BYTES_A_TENSOR, calibration_scratch_bytes
from memopt.compressor.calibration_store import CALIBRATION_FOLDER, CalibrationStore
from memopt.compressor.layer_record import parse_layer_record, render_layer_record
from memopt.compressor.output_folder import STATE_FOLDER
from memopt.compressor.progress import CALIBRATE_STAGE
from memopt.compressor.recipe import Recipe
from memopt.errors import ContentError, ExitCode, InterruptedRunError, PeerError

WEIGHTED = recipe([experts("weighted")])
# 6 samples of 24 tokens.
NUM_ROWS = 144
SMALL = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}


def make_release(source: Path, out: Path, data: Path) -> int:
    return compress(source, out, WEIGHTED, options(data)).num_units


def stop_after(num_layers: int, source: Path, out: Path, data: Path, form: Recipe = WEIGHTED) -> Path:
    """Cut a calibration off after so many layers; its store."""

    def stop(progress: memopt.Progress) -> None:
        if progress.stage == CALIBRATE_STAGE and progress.num_done_units == num_layers:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        compress(source, out, form, options(data), progress=stop)
    return out / STATE_FOLDER / CALIBRATION_FOLDER


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("source") / "checkpoint")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("data") / "ids.safetensors")


@pytest.fixture(scope="module")
def expected(source: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("expected") / "out"
    make_release(source, out, data)
    return out


@pytest.mark.parametrize(("num_layers", "place"), [(1, 0), (1, NUM_ROWS * 128 * 4 - 1), (2, 5000)])
def test_a_flipped_bit_between_layers_is_refused(
    source: Path, data: Path, expected: Path, tmp_path: Path, num_layers: int, place: int
) -> None:
    rows = stop_after(num_layers, source, tmp_path / "out", data) / f"hidden-{num_layers:05d}"
    flip(rows, place)
    with pytest.raises(ContentError, match=r"rows \d+ to \d+ were changed after they were written") as found:
        make_release(source, tmp_path / "out", data)
    assert found.value.file == rows.name
    assert found.value.exit_code == ExitCode.CONTENT
    assert f"remove {tmp_path / 'out'} to calibrate anew" in found.value.remedy
    flip(rows, place)
    make_release(source, tmp_path / "out", data)
    assert tree(tmp_path / "out") == tree(expected)


def test_ranks_share_the_comparison(source: Path, data: Path, expected: Path, tmp_path: Path) -> None:
    """Written by one rank, in batches of its own; read again by two, of which the second finds the last row."""
    rows = stop_after(1, source, tmp_path / "out", data) / "hidden-00001"
    flip(rows, NUM_ROWS * 128 * 4 - 1)
    first, second = run_ranks(2, make_release, source, tmp_path / "out", data)
    assert isinstance(second, Refusal)
    assert second.kind is ContentError
    assert f"to {NUM_ROWS - 1} were changed" in second.text
    assert isinstance(first, Refusal)
    assert first.kind is PeerError
    flip(rows, NUM_ROWS * 128 * 4 - 1)
    run_ranks(2, make_release, source, tmp_path / "out", data)
    assert tree(tmp_path / "out") == tree(expected)


def test_a_flipped_bit_in_a_selection_is_refused(data: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8", **SMALL, index_topk=16, num_nextn_predict_layers=0)
    store = stop_after(2, source, tmp_path / "out", data)
    selection = store / "selection-00002"
    assert selection.stat().st_size == NUM_ROWS * 16 * 4
    flip(selection, 4 * 16 * 100)
    with pytest.raises(ContentError, match="were changed after they were written") as found:
        make_release(source, tmp_path / "out", data)
    assert found.value.file == selection.name
    selection.write_bytes(selection.read_bytes()[:-1])
    with pytest.raises(ContentError, match="is not what the finished layers left"):
        make_release(source, tmp_path / "out", data)


def test_rows_are_read_again_only_where_a_run_starts_from_them(
    source: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, int]] = []
    read_sha256 = RowFile.read_sha256

    def watched(rows: RowFile, first: int, count: int) -> bytes:
        compared.extend((rows.path.name, row) for row in range(first, first + count))
        return read_sha256(rows, first, count)

    monkeypatch.setattr(RowFile, "read_sha256", watched)
    make_release(source, tmp_path / "whole", data)
    assert not compared
    stop_after(1, source, tmp_path / "out", data)
    make_release(source, tmp_path / "out", data)
    assert sorted(compared) == [("hidden-00001", row) for row in range(NUM_ROWS)]


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.pop(name) and None


def _with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.update(changes)


def _with_a_longer_gap(table: dict[str, Any]) -> None:
    table["rows"]["hidden-00002"][-1]["count"] -= 1


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no columns": _with(selection_columns=None),
    "columns of another kind": _with(selection_columns="16"),
    "no parts": _without("parts"),
    "parts of another kind": _with(parts=[]),
    "a part outside": _with(parts={"../../../release.json": "0" * 64}),
    "a part that is not there": _with(parts={"layer-00001.experts-00000-00009.safetensors": "0" * 64}),
    "a scale that is none": _with(kv_scales={"model.layers.1.self_attn.k_scale": float("inf")}),
    "one key more": _with(extra={}),
    "another layer": _with(layer=0),
    "a row less": _with_a_longer_gap,
    "no rows": _with(rows={}),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("has_digest", [True, False], ids=["digest made anew", "digest as it was"])
def test_a_record_that_was_edited_is_refused(
    stopped: Path, source: Path, data: Path, name: str, has_digest: bool
) -> None:
    path = stopped / STATE_FOLDER / CALIBRATION_FOLDER / "layer-00001.json"
    original = path.read_bytes()
    table = json.loads(original)
    CHANGES[name](table)
    path.write_bytes(_rendered(table) if has_digest else json.dumps(table).encode())
    try:
        with pytest.raises(ContentError, match=r"remove .* to calibrate anew"):
            make_release(source, stopped, data)
    finally:
        path.write_bytes(original)


def _rendered(table: dict[str, Any]) -> bytes:
    """As `render_layer_record` does, but of any table."""
    table.pop("sha256")
    return json.dumps(
        table | {"sha256": hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()}
    ).encode()


@pytest.fixture(scope="module")
def stopped(source: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder whose calibration was cut off after two layers; tests leave it as it was."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    stop_after(2, source, out, data)
    return out


@pytest.mark.parametrize("raw", [b"", b"garbage", b"[]", b"{}", b"\xff", b'{"layer": 1, "layer": 1}', None])
@pytest.mark.parametrize("name", ["layer-00001.json", "layer-09999.json"])
def test_garbage_in_a_records_place_is_refused(
    stopped: Path, source: Path, data: Path, name: str, raw: bytes | None
) -> None:
    path = stopped / STATE_FOLDER / CALIBRATION_FOLDER / name
    original = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    if raw is None:
        path.mkdir()
    else:
        path.write_bytes(raw)
    try:
        with pytest.raises(ContentError, match="to calibrate anew") as found:
            make_release(source, stopped, data)
        assert found.value.file == name
    finally:
        path.rmdir() if raw is None else path.unlink()
        if original is not None:
            path.write_bytes(original)


def test_a_record_without_its_parts_stops_the_release(source: Path, data: Path, tmp_path: Path) -> None:
    """Edited with care, so that nothing but the missing figures can tell."""
    store = stop_after(2, source, tmp_path / "out", data)
    path = store / "layer-00001.json"
    record = parse_layer_record(path.read_bytes(), path.name)
    path.write_bytes(render_layer_record(record.model_copy(update={"parts": {}})))
    with pytest.raises(ContentError, match="has no codes") as found:
        make_release(source, tmp_path / "out", data)
    assert found.value.tensor is not None
    assert found.value.tensor.startswith("model.layers.1.mlp.experts.")


@pytest.mark.parametrize("kind", ["MTP", "sparse", "dense"])
def test_the_folder_stays_within_what_was_planned_for_it(
    kind: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured after every write; leftovers of a run that was cut off, and of another number of waves, count too."""
    attention = {"roles": ["attention"], "format": {"type": "int4", "method": "weighted"}}
    dense = {"roles": ["dense_mlp", "shared_expert"], "format": {"type": "int4", "method": "weighted"}}
    if kind == "MTP":
        source, form = make_small_source(tmp_path / "source"), recipe([experts("weighted"), attention])
    elif kind == "sparse":
        source = make_checkpoint(
            tmp_path / "source", "glm-5.2-fp8", **SMALL, index_topk=20, num_nextn_predict_layers=0,
            num_hidden_layers=4, indexer_types=["full", "full", "shared", "shared"],
        )  # fmt: skip
        form = recipe([experts("rtn"), attention])
    else:
        wide = SMALL | {"intermediate_size": 2048}
        source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", **wide, num_nextn_predict_layers=0)
        form = recipe([experts("weighted"), dense], "glm4_moe")
    sizes: list[int] = []
    write, write_part = RowFile.write, CalibrationStore.write_part

    def measure(folder: Path) -> None:
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))

    def watched_write(rows: RowFile, *rest: Any) -> None:
        write(rows, *rest)
        measure(rows.path.parent)

    def watched_part(store: CalibrationStore, *rest: Any) -> None:
        write_part(store, *rest)
        measure(store.folder)

    monkeypatch.setattr(RowFile, "write", watched_write)
    monkeypatch.setattr(CalibrationStore, "write_part", watched_part)
    asked = options(data)
    store = stop_after(1, source, tmp_path / "out", data, form)
    for name in ("inputs-00001-2", "attended-00001", "mtp-hidden-00002", "layer-00002.tmp"):
        (store / name).write_bytes(bytes(2**20))
    (store / "layer-00001.experts-00000-00003.safetensors").write_bytes(bytes(2**20))
    compress(source, tmp_path / "out", form, asked)
    plan = memopt.plan(source, form, options=memopt.PlanOptions(calibration=asked.identity()))
    planned = calibration_scratch_bytes(plan)
    assert max(sizes) <= planned
    # The allowance for headers and records is the larger part of it here.
    assert max(sizes) > planned - len(plan.tensors) * BOOKKEEPING_BYTES_A_TENSOR


def test_a_plan_without_calibration_needs_no_folder(source: Path) -> None:
    assert calibration_scratch_bytes(memopt.plan(source, recipe([experts("rtn")]))) == 0
